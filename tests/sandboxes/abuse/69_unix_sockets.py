# MUST NOT connect to a unix socket of the host, by path or by abstract name
import socket
for name in ('{{CANARY_DIR}}/socket', '\0canary', '/var/run/docker.sock', '/run/systemd/private'):
    try:
        s = socket.socket(socket.AF_UNIX); s.settimeout(1); s.connect(name); print('BREACH connected', repr(name))
    except OSError as e: print('ok', e)
