import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the hand-made runs of planted.py
