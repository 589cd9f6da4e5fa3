"""The server process: `python -m moerl.rollout.vllm.server --model DIR ...`, see moerl.rollout.engines.process.

vLLM's own processes import this module before anything else, and inherit its environment. It is not a __main__.py, which
multiprocessing would not import.
"""

import ctypes
import os
import signal

import torch

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__mp_main__":
    # vLLM's processes notice the end of this server's, by kill -9 say, only when they are told to do something.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

# A fork of a process with an event loop and threads may hang.
os.environ |= {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
if not torch.cuda.is_available():
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}

from moerl.rollout.engines.process import main
from moerl.rollout.vllm.core import find_problems, start

if __name__ == "__main__":
    main("vllm", find_problems=find_problems, start=start)
