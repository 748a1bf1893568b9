# MUST NOT block or confuse the host with half, huge or broken frames
import os, struct
os.write(3, struct.pack('>I', 5) + b'{{{{{' + struct.pack('>I', 0) + struct.pack('>I', 0xffffffff) + b'x' * 1000)
print('sent')
