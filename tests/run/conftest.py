"""Whole runs as a user starts them: `moerl train` in a process of its own, on a small model. Lets tests import `whole_runs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
