# MUST NOT make the cleanup of the episode fail
import os
n = 0
try:
    for i in range(3000): os.mkdir('d'); os.chdir('d'); n += 1
except OSError as e: print('stopped by', e.strerror)
os.chdir('/work') if os.path.isdir('/work') else None
try: os.chmod('d', 0)
except OSError: pass
print('ok depth', n)
