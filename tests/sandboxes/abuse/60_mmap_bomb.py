# MUST NOT hold more than the memory limit in anonymous or shared maps
import mmap
held = []; n = 0
try:
    for i in range(200):
        m = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS if i % 2 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, 16 << 20, 4096): m[at] = 1
        held.append(m); n += 16
except (OSError, MemoryError, ValueError) as e: print('stopped by', type(e).__name__)
print('BREACH mapped MiB' if n > 1600 else 'ok mapped MiB', n)
