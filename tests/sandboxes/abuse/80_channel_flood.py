# MUST NOT block the host or fill its memory through the channel
import os, struct
b = struct.pack('>I', 60000) + b' ' * 60000
while True: os.write(3, b)
