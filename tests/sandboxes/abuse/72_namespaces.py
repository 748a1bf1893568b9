# MUST NOT make a namespace of its own, where it would have capabilities
import ctypes, os
l = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000):
    print('BREACH unshare' if l.unshare(flag) == 0 else 'ok unshare', hex(flag), os.strerror(ctypes.get_errno()))
stack = ctypes.create_string_buffer(65536)
r = l.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | 17, 0, 0, 0, 0)
if r == 0: os._exit(0)
print('BREACH clone' if r > 0 else 'ok clone', os.strerror(ctypes.get_errno()))
args = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
r = l.syscall(435, args, 88)
if r == 0: os._exit(0)
print('BREACH clone3' if r > 0 else 'ok clone3', os.strerror(ctypes.get_errno()))
