"""Makes the modules of tests/gpu and tests/train importable, here and in the processes they start."""

import sys
from pathlib import Path

for directory in (Path(__file__).parent, Path(__file__).parent.parent / "train"):
    sys.path.insert(0, str(directory))
