# MUST NOT resolve a name or fetch a page
import socket, urllib.request
for f in (lambda: socket.getaddrinfo('example.com', 80), lambda: urllib.request.urlopen('http://127.0.0.1:{{PORT}}/', timeout=1).read()):
    try: print('BREACH', str(f())[:60])
    except Exception as e: print('ok', type(e).__name__)
