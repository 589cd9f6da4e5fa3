"""Settings of the whole test process, made before any test module imports torch; processes that tests start inherit them."""

import os

from hypothesis import settings

# Two OpenMP threads on two busy cores spin against each other: 5 to 10 times slower.
os.environ["OMP_NUM_THREADS"] = "1"
# A name that is no local directory must fail at once instead of being looked up on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples in every run; no deadline, because a busy machine is no failure.
settings.register_profile("moerl", derandomize=True, deadline=None)
settings.load_profile("moerl")
