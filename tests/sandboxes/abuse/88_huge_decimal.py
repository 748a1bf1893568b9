# MUST NOT run past the hard timeout or the memory limit in C code that never looks at signals
import decimal
decimal.getcontext().prec = 10 ** 8
print(str(decimal.Decimal(2) ** (10 ** 12))[:10])
