"""What `whole_runs` says is left in shared memory."""

import subprocess
import sys

from whole_runs import left_in_shared_memory, shared_memory

HOLDS_A_SEMAPHORE = """
import multiprocessing
import sys

semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
sys.stdin.read()
"""


def test_what_another_living_process_holds_is_not_left():
    """Also a semaphore, whose file had another name when it was mapped."""
    before = shared_memory()
    holder = subprocess.Popen([sys.executable, "-c", HOLDS_A_SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    name = f"sem.{holder.stdout.readline().strip().removeprefix('/')}"
    try:
        assert name.startswith("sem.mp-") and name not in shared_memory()
    finally:
        holder.communicate()
    assert left_in_shared_memory(before) == set()
