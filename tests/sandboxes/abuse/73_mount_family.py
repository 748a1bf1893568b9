# MUST NOT mount, unmount, pivot or chroot
import ctypes, os
l = ctypes.CDLL(None, use_errno=True)
for name, call in (('mount', lambda: l.mount(b't', b'/work', b'tmpfs', 0, b'')), ('umount', lambda: l.umount2(b'/proc', 2)), ('chroot', lambda: l.chroot(b'/work')),
                   ('pivot', lambda: l.syscall(155, b'.', b'.')), ('fsopen', lambda: l.syscall(430, b'tmpfs', 0)), ('open_tree', lambda: l.syscall(428, -100, b'/', 1))):
    print('BREACH' if call() >= 0 else 'ok', name, os.strerror(ctypes.get_errno()))
