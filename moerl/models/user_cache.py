"""Files that are kept for every process of this user, on every node that shares the folder: what took long to find, and can be found again.

Files lie in ~/.cache/moerl, or below XDG_CACHE_HOME. Each names what it follows from. Of the standard library alone: engines' environments
read some.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_file(*parts: str) -> Path | None:
    """None: the user has no home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache.joinpath("moerl", *parts)


def read_kept(file: Path | None) -> bytes:
    """Empty if there is none, or another user's."""
    with suppress(OSError):
        if file is not None and file.stat().st_uid == os.getuid():
            return file.read_bytes()
    return b""


def keep_file(file: Path | None, content: bytes) -> None:
    """Whole or not at all: others may be reading. Where it cannot be written, every process finds it again."""
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as partial:
            partial.write(content)
        Path(partial.name).replace(file)
