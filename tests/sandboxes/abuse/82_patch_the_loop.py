# MUST NOT break later episodes by changing what the interpreter's own loop uses
import builtins, json, os, sys, traceback, ast
builtins.print = builtins.repr = builtins.compile = builtins.exec = builtins.eval = builtins.len = lambda *a, **k: (_ for _ in ()).throw(SystemError('patched'))
json.dumps = json.loads = lambda *a, **k: 1 / 0
traceback.TracebackException = ast.parse = None
sys.stdout = sys.stderr = None
for m in list(sys.modules):
    if m.startswith('inside'): sys.modules[m].__dict__.clear()
raise ValueError
