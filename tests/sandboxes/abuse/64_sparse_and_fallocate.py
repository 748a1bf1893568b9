# MUST NOT make a file larger than the limit without writing it
import os
for how in (lambda f: os.ftruncate(f, 1 << 40), lambda f: os.posix_fallocate(f, 0, 1 << 30), lambda f: os.pwrite(f, b'x', 1 << 35)):
    f = os.open('big', os.O_RDWR | os.O_CREAT)
    try: how(f); print('BREACH size', os.fstat(f).st_size)
    except OSError as e: print('ok', e.strerror)
    finally: os.close(f)
