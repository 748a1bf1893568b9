# MUST NOT return more output than the cap through an error message
raise ValueError('E' * (1 << 27))
