# MUST NOT keep a CPU busy for long after its turn is over
import os, threading
def burn():
    while True: pass
for _ in range(3): threading.Thread(target=burn, daemon=True).start()
for _ in range(3):
    if os.fork() == 0: burn()
print('left burning')
