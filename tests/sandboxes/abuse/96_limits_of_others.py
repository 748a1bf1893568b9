# MUST NOT change the limits, the affinity or the priority of another process
import ctypes, os, resource
l = ctypes.CDLL(None, use_errno=True)
for p in {os.getppid(), {{CANARY_PID}}} - {0, os.getpid()}:
    try: resource.prlimit(p, resource.RLIMIT_NOFILE, (0, 0)); print('BREACH prlimit', p)
    except OSError as e: print('ok', e.strerror)
    try: os.sched_setaffinity(p, {0}); print('BREACH affinity', p)
    except OSError as e: print('ok', e.strerror)
    try: os.setpriority(os.PRIO_PROCESS, p, 19); print('BREACH priority', p)
    except OSError as e: print('ok', e.strerror)
