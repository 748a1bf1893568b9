# MUST NOT reach io_uring, bpf, perf, userfaultfd, the key rings or module loading
import ctypes, os
l = ctypes.CDLL(None, use_errno=True); b = ctypes.create_string_buffer(256)
x86 = os.uname().machine == 'x86_64'
for name, number in (('io_uring_setup', 425), ('bpf', 321 if x86 else 280), ('perf_event_open', 298 if x86 else 241), ('userfaultfd', 323 if x86 else 282), ('keyctl', 250 if x86 else 219), ('add_key', 248 if x86 else 217)):
    r = l.syscall(number, 1 if name == 'io_uring_setup' else 0, b, 0, 0, 0); e = ctypes.get_errno()
    print('ok' if r < 0 and e in (1, 38) else 'BREACH', name, r, os.strerror(e))
