# MUST NOT get around the filter through the 32-bit or x32 entry
import ctypes, mmap, os
if os.uname().machine == 'x86_64':
    l = ctypes.CDLL(None, use_errno=True)
    r = l.syscall(0x40000000 + 39); print('BREACH x32' if r > 0 else 'ok x32', os.strerror(ctypes.get_errno()))
    try:
        m = mmap.mmap(-1, 4096, prot=7); m.write(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3')
        f = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
        r = f(); print('BREACH int80' if r > 0 else 'ok int80', r)
    except OSError as e: print('ok', e)
else: print('ok not this machine')
