# MUST NOT write into another process through /proc/*/mem or devices
import os
for p in ('/proc/1/mem', '/proc/self/task/1/../../1/mem', '/dev/mem', '/dev/kmem', '/dev/kmsg', '/dev/port', '/proc/kcore', '/dev/sda', '/dev/vda', '/dev/tty', '/dev/ptmx'):
    try:
        f = os.open(p, os.O_RDWR)
        print('BREACH' if os.getpid() != 1 or 'proc/1' not in p and 'task/1' not in p else 'own', p)
    except OSError as e: print('ok', p, e.strerror)
