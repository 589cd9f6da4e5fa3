"""`python -m moerl.cluster.forks NAME`: a server of its own process, which ends with the one that started it."""

import os
import sys

from moerl.cluster.forks.server import ForkServer, listen, preload

if __name__ == "__main__":
    parent = os.getppid()
    listener = listen(sys.argv[1])
    preload()
    ForkServer(listener, parent).run()
