# MUST NOT make an unbounded number of files
import os
n = 0
try:
    for i in range(200000):
        os.close(os.open(f'i{i}', os.O_CREAT)); n += 1
except OSError as e: print('stopped by', e.strerror)
print('BREACH files' if n > 50000 else 'ok files', n)
