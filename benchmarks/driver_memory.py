"""Memory of this process above what it was at the beginning: now, and the most of it, looked at every 10 ms."""

import threading

import psutil


class Memory:
    """Of this process, above what it was at the beginning."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._now()
        self.peak = (0, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def growth(self) -> tuple[int, int]:
        """Private and shared bytes."""
        now = self._now()
        return now[0] - self._before[0], now[1] - self._before[1]

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _now(self) -> tuple[int, int]:
        info = self._process.memory_info()
        return info.rss - info.shared, info.shared

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            now = self.growth()
            self.peak = max(self.peak, now, key=sum)
