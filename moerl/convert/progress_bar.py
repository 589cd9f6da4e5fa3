"""A bar with bytes per second and the time left, on a terminal; a line at the end everywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from moerl.convert.tensors.writing import OnBytes


@contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[OnBytes]:
    """Called with bytes done since the last call, from any thread."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    lock = Lock()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total_bytes)

        def advance(num_bytes: int) -> None:
            with lock:
                progress.advance(task, num_bytes)

        yield advance
