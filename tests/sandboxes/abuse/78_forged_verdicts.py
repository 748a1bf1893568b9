# MUST NOT forge the outcome of a later turn or shift the answers of turns
import os, struct
for status in (b'ok', b'infra', b'x' * 1000, b'', b'\xff'):
    for nonce in (b'0' * 16, b'', b'ready'):
        b = nonce + status
        try: os.write(3, struct.pack('>I', len(b)) + b)
        except OSError: pass
1 / 0
