# MUST NOT leave a process running that left its session, its group and its parent
import os, subprocess, sys
code = "import os,time\ntry: os.setsid()\nexcept OSError: pass\nif os.fork()==0:\n  try: os.setpgid(0,0)\n  except OSError: pass\n  time.sleep(60)"
for _ in range(3):
    try: subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, TypeError) as e: print(e)
print('started')
