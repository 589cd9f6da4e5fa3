"""Save checkpoints beside training: the ranks stage their shards and train on, a thread of each writes them, the driver commits.

save(version)   wait for the one before -> every rank stages            training stands still
in a task       every rank writes -> rank 0 finishes -> commit          training goes on; the checkpoint becomes visible last

Models beside the policy write into folders of its checkpoint, by their names: one rename completes all of them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from moerl.train.checkpoint import checkpoint_dirs
from moerl.types.errors import CheckpointError, MoerlError
from moerl.types.stats import SavedCheckpoint


class SavedPart(Protocol):
    """A model as a part of checkpoints."""

    async def stage(self, *, copies: bool) -> int:
        """Fix what `write` will write; the bytes of all ranks. With `copies` training may go on before it is written."""

    async def write(self, directory: Path) -> checkpoint_dirs.FileDigests:
        """All files, whole; the directory is there."""


class CheckpointSaver:
    def __init__(self, root: Path, *, model: Mapping[str, Any], keep: int, in_background: bool, policy: SavedPart):
        """`model`: its config.json. `in_background`: `save` returns when the shards are staged, not when they are written."""
        self._root, self._model, self._keep, self._in_background = root, model, keep, in_background
        self._policy = policy
        self.beside: dict[str, SavedPart] = {}
        """By name; files of each are in a folder of it."""
        self.make_room: Callable[[], Awaitable[int]] | None = None
        """Called when the policy is staged, before they come to its GPUs for that; None: there is room."""
        self._in_flight: asyncio.Task[SavedCheckpoint] | None = None
        self._saved: list[SavedCheckpoint] = []

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Returns when training may go on. At most one is in flight. Raises what this or the one before failed with."""
        begun = time.perf_counter()
        await self._finish()
        temporary = await asyncio.to_thread(checkpoint_dirs.begin, self._root, version)
        num_bytes = await self._policy.stage(copies=self._in_background or self.make_room is not None)
        if self.make_room is not None:
            await self.make_room()
        for part in self.beside.values():
            num_bytes += await part.stage(copies=self._in_background)
        staged = time.perf_counter()
        self._in_flight = asyncio.create_task(self._write(temporary, {"version": version, **state}, num_bytes, begun, staged))
        if not self._in_background:
            await self._finish()

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        """Those completed since the last call; with `wait` also the one in flight. Raises what one failed with, once."""
        if wait or (self._in_flight is not None and self._in_flight.done()):
            await self._finish()
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> None:
        if self._in_flight is not None:
            self._in_flight.cancel()

    async def _finish(self) -> None:
        if self._in_flight is None:
            return
        await asyncio.wait([self._in_flight])  # unlike `await`, this leaves it running when the caller is cancelled
        task, self._in_flight = self._in_flight, None
        self._saved.append(task.result())

    async def _write(self, temporary: Path, state: Mapping[str, Any], num_bytes: int, begun: float, staged: float) -> SavedCheckpoint:
        try:
            files = await self._policy.write(temporary)
            for name, part in self.beside.items():
                (temporary / name).mkdir()
                written = await part.write(temporary / name)
                await asyncio.to_thread(checkpoint_dirs.sync, temporary / name)
                files |= {f"{name}/{file}": entry for file, entry in written.items()}
            await asyncio.to_thread(checkpoint_dirs.commit, temporary, files, state, self._model, keep=self._keep)
        except (MoerlError, OSError) as error:
            raise CheckpointError(f"{self._left(temporary.with_suffix(''))}\n{error}") from error
        end = time.perf_counter()
        blocked = (staged if self._in_background else end) - begun
        return SavedCheckpoint(version=state["version"], num_bytes=num_bytes, seconds=end - begun, blocked_seconds=blocked)

    def _left(self, directory: Path) -> str:
        """State after a failure to write it, for people."""
        newest = checkpoint_dirs.newest(self._root)
        if newest == directory:
            return f"checkpoint {directory} is complete, but what it was to replace could not be deleted"
        return f"checkpoint {directory} could not be written; " + (
            f"the newest complete one is {newest}" if newest is not None else "there is no complete one"
        )
