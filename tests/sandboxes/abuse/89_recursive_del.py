# MUST NOT delay the end of the episode with finalizers that make new objects
class D:
    def __del__(self):
        global d
        d = D()
        try:
            while True: pass
        except BaseException: pass
d = D(); del d
