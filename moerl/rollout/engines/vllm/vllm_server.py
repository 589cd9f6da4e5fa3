"""The server process: `python -m moerl.rollout.engines.vllm.vllm_server --model DIR ...`, see moerl.rollout.engines.engine_process.

vLLM's own processes import this module before anything else, and inherit its environment. It is not a __main__.py, which
multiprocessing would not import.
"""

import ctypes
import os
import signal

if __name__ == "__mp_main__":
    # vLLM's processes notice the end of this server's, by kill -9 say, only when they are told to do something.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of linux/prctl.h

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of a process with an event loop and threads may hang
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # moerl.rollout.engines.vllm.vllm_sampling is for the first one's sampler
os.environ["VLLM_NO_USAGE_STATS"] = "1"

from moerl.rollout.engines.engine_process import main  # after the settings, which vLLM reads as it is imported
from moerl.rollout.engines.vllm import vllm_cpu
from moerl.rollout.engines.vllm.follower import follow
from moerl.rollout.engines.vllm.vllm_core import find_problems, start

if __name__ == "__mp_main__":
    vllm_cpu.patch_processes()

if __name__ == "__main__":
    main("vllm", find_problems=find_problems, start=start, follow=follow)
