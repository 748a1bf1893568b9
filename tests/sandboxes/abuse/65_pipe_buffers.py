# MUST NOT hold much kernel memory in pipes and socket pairs
import os, socket, fcntl
n = 0; keep = []
try:
    for i in range(1000):
        r, w = os.pipe(); keep += [r, w]
        try: fcntl.fcntl(w, 1031, 1 << 20)
        except OSError: pass
        os.set_blocking(w, False)
        try:
            while True: n += os.write(w, b'x' * 65536)
        except BlockingIOError: pass
except OSError as e: print('stopped by', e.strerror)
print('BREACH MiB' if n > 200 << 20 else 'ok MiB', n >> 20)
