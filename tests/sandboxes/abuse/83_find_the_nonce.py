# MUST NOT turn an error into a success that earns anything: status may be forged, stdout may not gain text of others
import gc, sys, os, json, struct
f = sys._getframe(); nonce = None
while f:
    nonce = f.f_locals.get('nonce', nonce); f = f.f_back
b = json.dumps({'nonce': nonce, 'status': 'ok', 'stdout': 'BREACH forged', 'seconds': -1}).encode()
os.write(3, struct.pack('>I', len(b)) + b)
raise ValueError('after the forged reply')
