"""How many requests a server may have, by the pressure on its cache of keys and values.

An engine whose cache is full preempts: it takes the cache of one request for the others, and computes it again later, every token so far.
No engine knows how long answers become, so it starts what fits now. The bound learns what fits from the answers, which all carry the
server's load, by one rule:

    an answer under pressure takes its place along; any other brings one more

so it grows and shrinks by its own size while as many requests are answered as the server has. It begins at `most`: nothing changes for a
cache with room for all.

Invariants, by the names of their tests:
* in_range: the bound is in [1, most].
* no_stall: a server without requests gets one, whatever it reported.
* no_cascade: under pressure the bound follows the requests in flight; many reports of one pressure cut it once.
"""

from moerl.types.completion import ServerLoad


class CacheBound:
    """Bound of one server, in requests."""

    def __init__(self, *, most: int, high: float):
        """`most`: requests of a server without pressure. `high`: share of its cache above which it gets no new ones."""
        self._most, self._high = most, high
        self._reported = 0
        self.now = most
        """Requests that the server may have at present."""
        self.num_preempted = 0
        """Preemptions so far, of every process that served there."""

    def report(self, load: ServerLoad, num_in_flight: int) -> None:
        """Take notice of a load. `num_in_flight`: requests that it has, with the one that it answers here."""
        # A server that was started again counts from 0.
        new = load.num_preempted - self._reported if load.num_preempted >= self._reported else load.num_preempted
        self._reported = load.num_preempted
        self.num_preempted += new
        has_pressure = new > 0 or load.cache_share > self._high
        self.now = max(1, min(self._most, self.now + 1, num_in_flight - 1 if has_pressure else self._most))
