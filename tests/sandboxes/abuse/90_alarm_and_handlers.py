# MUST NOT run past the hard timeout by swallowing the interrupt in a handler
import signal, time
def handler(*a):
    signal.setitimer(signal.ITIMER_REAL, 0.001)
for s in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGHUP): signal.signal(s, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001)
while True: time.sleep(10)
