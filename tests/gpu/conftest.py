"""Makes the modules of tests/gpu, tests/train and tests/weights importable, here and in the processes they start."""

import sys
from pathlib import Path

for directory in (Path(__file__).parent, *(Path(__file__).parent.parent / name for name in ("train", "weights"))):
    sys.path.insert(0, str(directory))
