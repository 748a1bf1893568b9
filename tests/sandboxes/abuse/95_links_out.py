# MUST NOT reach or remove host files through links left for the cleanup
import os
os.symlink('{{CANARY_DIR}}', 'folder'); os.symlink('{{CANARY_DIR}}/secret.txt', 'file'); os.symlink('/', 'root')
for p in ('folder/secret.txt', 'file', 'root{{CANARY_DIR}}/secret.txt'):
    try: print('BREACH', open(p).read())
    except OSError as e: print('ok', e.strerror)
try: os.link('{{CANARY_DIR}}/secret.txt', 'hard'); print('BREACH hard link')
except OSError as e: print('ok', e.strerror)
