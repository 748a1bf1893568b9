# MUST NOT hang or crash the display of a value or an error
class R(Exception):
    def __repr__(self): raise SystemExit(0)
    def __str__(self):
        while True: pass
try: raise R()
except R as e: x = e
raise R() from x
