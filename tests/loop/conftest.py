"""Makes `in_process_run` importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
