# MUST NOT reach the host's process group
import os, signal
os.killpg(0, signal.SIGTERM)
print('ok still here')
