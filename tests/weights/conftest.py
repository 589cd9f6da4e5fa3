"""Lets the tests, and the processes they start, import session_process by its name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
