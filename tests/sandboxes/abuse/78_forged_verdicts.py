# MUST NOT forge the outcome of a later turn or shift the answers of turns
import json, os, struct
for status in ('ok', 'infra', 'x' * 1000, None, [1]):
    for nonce in ('0' * 16, '', None, 5):
        b = json.dumps({'nonce': nonce, 'status': status, 'stdout': 'BREACH', 'ready': True}).encode()
        try: os.write(3, struct.pack('>I', len(b)) + b)
        except OSError: pass
1 / 0
