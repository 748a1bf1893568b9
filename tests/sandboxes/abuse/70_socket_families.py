# MUST NOT open a socket of any family: vsock, netlink, packet, raw and Bluetooth know no or weak namespaces
import socket
for family, kind, protocol in ((40, 1, 0), (16, 3, 0), (17, 3, 0), (2, 3, 1), (31, 1, 3), (38, 5, 0), (29, 3, 1), (44, 3, 0)):
    try: socket.socket(family, kind, protocol); print('BREACH family', family)
    except (OSError, OverflowError) as e: print('ok', family, e)
