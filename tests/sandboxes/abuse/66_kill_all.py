# MUST NOT kill anything but its own episode with kill(-1)
import os, signal
try: os.kill(-1, signal.SIGKILL); print('sent')
except OSError as e: print('ok', e.strerror)
