# MUST NOT hold more than the memory limit spread over children
import os, time
for _ in range(12):
    try:
        if os.fork() == 0:
            b = bytearray(150 << 20); b[::4096] = b'x' * len(b[::4096]); time.sleep(20); os._exit(0)
    except OSError: break
time.sleep(20)
print('BREACH all of it lived')
