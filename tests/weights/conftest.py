"""Lets the tests, and the processes they start, import session_process, fault_jobs, and what runs training ranks, by their names."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "train")]
