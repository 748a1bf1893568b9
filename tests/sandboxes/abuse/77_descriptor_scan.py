# MUST NOT find a descriptor of the host
import os
for fd in range(4, 1024):
    try: s = os.fstat(fd)
    except OSError: continue
    try: t = os.readlink(f'/proc/self/fd/{fd}')
    except OSError: t = '?'
    try: data = os.pread(fd, 200, 0)
    except OSError: data = b''
    print('BREACH' if b'{{SECRET}}' in data else 'info', fd, t)
print('ok')
