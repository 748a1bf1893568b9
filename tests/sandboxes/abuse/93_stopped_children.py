# MUST NOT leave stopped processes or zombies behind
import os, signal, time
for i in range(8):
    try:
        p = os.fork()
    except OSError: break
    if p == 0:
        if i % 2: os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)
time.sleep(0.1); print('ok')
