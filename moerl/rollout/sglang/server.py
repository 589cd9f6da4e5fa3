"""The server process: `python -m moerl.rollout.sglang.server --model DIR ...`, see moerl.rollout.engines.process.

SGLang's own processes import this module before anything else, so the CPU's stand-ins are there when they come to sglang. It is not a
__main__.py, which multiprocessing would not import.
"""

import os

import torch

from moerl.rollout.sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()
# moerl.max_context is the limit; the engine gets a few positions more than the model's configuration names.
os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"

from moerl.rollout.engines.process import main  # after the stand-ins
from moerl.rollout.sglang.core import find_problems, follow, start

if __name__ == "__main__":
    main("sglang", find_problems=find_problems, start=start, follow=follow)
