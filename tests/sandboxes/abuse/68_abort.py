# MUST NOT leave a core file or look like a success
import os; os.abort()
