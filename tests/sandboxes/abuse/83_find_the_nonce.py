# MUST NOT turn an error into a success that earns anything: status may be forged, stdout may not gain text of others
import sys, os, struct
f = sys._getframe(); nonce = b''
while f:
    nonce = f.f_locals.get('nonce', nonce); f = f.f_back
b = nonce + b'ok'
os.write(3, struct.pack('>I', len(b)) + b)
raise ValueError('after the forged reply')
