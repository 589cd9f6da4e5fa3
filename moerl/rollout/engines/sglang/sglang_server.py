"""The server process: `python -m moerl.rollout.engines.sglang.sglang_server --model DIR ...`, see moerl.rollout.engines.engine_process.

SGLang's own processes import this module before anything else, so the CPU's stand-ins are there when they come to sglang. It is not a
__main__.py, which multiprocessing would not import.
"""

import os

from moerl.cluster.descendants import end_with_parent

if __name__ == "__mp_main__":
    # SGLang's processes ask for this after their imports, too late for a server that ended meanwhile: they would stay, with its GPUs.
    end_with_parent()

import torch

from moerl.rollout.engines.sglang import sglang_cpu

if not torch.cuda.is_available():
    sglang_cpu.prepare()
# moerl.max_context is the limit; the engine gets a few positions more than the model's configuration names.
os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
# When one of SGLang's processes ends, the server would be deaf for 65 s, and count as one that hangs: it dumps what nobody asked for.
os.environ.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")

from moerl.config.schema.rollout_config import MOST_LEFT
from moerl.rollout.engines.engine_process import main  # after the stand-ins
from moerl.rollout.engines.sglang.sglang_core import find_problems, follow, start

if __name__ == "__main__":
    main("sglang", find_problems=find_problems, start=start, follow=follow, most_left=MOST_LEFT)
