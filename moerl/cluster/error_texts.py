"""The text of an error: whether it tells the cause of a failure or a consequence of another one, and its traceback as a person wants it.

Imports neither torch nor Ray: servers load it.
"""

import re
from pathlib import Path

LEFT = "left the push"
LATE = "did not come within"
_CONSEQUENCES = (
    LEFT, LATE,
    "Connection closed by peer", "Connection reset by peer", "Socket closed", "connection was closed", "Broken pipe", "Connection refused",
    "recvValue failed", "NCCL communicator was aborted", "Timed out waiting", "wait timeout after",
    "Connection closed by remote peer", "Connection was likely closed", "Got completion from peer",
    "Watchdog caught collective operation timeout", "ncclRemoteError",
)  # fmt: skip
"""Words of moerl's own pushes, of gloo, NCCL and their store, on sides that only lost another one or waited for it in vain."""

_PACKAGE = f"{Path(__file__).parents[1]}/"
"""A folder above it may have the package's name too: `git clone` makes one."""
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)\n(?!\s*File ")(?P<code>[^\n]*)', re.MULTILINE)
_BEGIN = re.compile(r"^(?:Traceback \(most recent call last\):|ray::.*)$", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NOT_SHOWN = ("/site-packages/", "/dist-packages/", "/lib/python3", "<")
_NOT_SHOWN_OF_PACKAGE = ("train/rank_progress.py",)
_MAX_FRAMES = 5


def is_consequence(error: BaseException) -> bool:
    """True for a sign of a failure elsewhere, which is not its cause."""
    return any(words in str(error) for words in _CONSEQUENCES)


def headline(text: str) -> list[str]:
    """Lines: the error's own, then at most five frames of moerl and of the user's own code, innermost first. `text` as Python, or Ray,
    prints it."""
    last_part = _BEGIN.split(_COLOURS.sub("", text))[-1]
    frames = list(_FRAME.finditer(last_part))
    error = last_part[frames[-1].end() :] if frames else last_part
    lines = [line for line in error.strip().splitlines() if line.strip(" ^~")]
    own = [frame for frame in reversed(frames) if _is_shown(frame["file"])]
    places = [f"{_short(frame['file'])}:{frame['line']} in {frame['name']}: {frame['code'].strip()}" for frame in own[:_MAX_FRAMES]]
    return [f"    {line}" for line in lines] + [f"      at {place}" for place in places]


def _is_shown(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return file.removeprefix(_PACKAGE) not in _NOT_SHOWN_OF_PACKAGE
    return not any(part in file for part in _NOT_SHOWN)


def _short(file: str) -> str:
    """From the package on."""
    return f"moerl/{file.removeprefix(_PACKAGE)}" if file.startswith(_PACKAGE) else file
