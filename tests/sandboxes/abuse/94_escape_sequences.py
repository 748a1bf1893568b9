# MUST NOT return what is not text
import os
os.write(1, bytes(range(256)) * 40 + b'\xed\xa0\x80\xf0\x9f\x98')
