# MUST NOT exhaust the host's stack with a nested reply
import os, struct
b = b'[' * 60000
os.write(3, struct.pack('>I', len(b)) + b)
print('sent')
