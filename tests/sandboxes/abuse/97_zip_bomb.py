# MUST NOT hold more than the memory limit by unpacking
import zlib
small = zlib.compress(bytes(1 << 26)); n = 0; parts = []
try:
    for _ in range(40): parts.append(zlib.decompress(small)); n += 64
except MemoryError: parts = None; print('ok MemoryError')
print('BREACH MiB' if n > 1600 else 'ok MiB', n)
