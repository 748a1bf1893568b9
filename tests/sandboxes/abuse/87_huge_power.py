# MUST NOT run past the hard timeout in one bytecode
x = 9 ** 9 ** 9
