"""Where the nodes of a job meet: the first one listens, and says in a file of the run's directory where.

    other node --facts--> first node --{"ray": address}, {"ended": true}--> other nodes

Both have proven before that they know the secret in that file. The connections stay open for as long as the job lasts: their end is how a
node learns that another is gone. Both sides of a connection also tell which addresses the nodes reach each other at, which no name service
needs to know.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.secret_listener import SecretListener, connect_proven
from moerl.hardware.network_settings import find_interfaces
from moerl.slurm.allocation import AllocatedNode
from moerl.types.errors import MoerlError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Between two looks at a file: shared storage tells nobody of changes."""
_CONNECT_SECONDS = 5.0
"""To an address of the first node, which may be one that is not reachable from here."""
_FACTS = TypeAdapter(AllocatedNode)


class NodeLink:
    """One connection between the first and another node: messages are JSON objects, one a line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @property
    def own_address(self) -> str:
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        return str(self._writer.get_extra_info("peername")[0])

    async def tell(self, **message: Any) -> None:
        """Nothing if the other side is gone: whoever reads from it learns of that."""
        with contextlib.suppress(OSError):
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def hear(self) -> dict[str, Any] | None:
        """None: the other side is gone."""
        try:
            line = await self._reader.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A node that has come to the first one."""

    facts: AllocatedNode
    link: NodeLink


class Meeting:
    """The first node's side; made by `hold_meeting`."""

    def __init__(self) -> None:
        self.secret = RunSecret.new()
        self._loop = asyncio.get_running_loop()
        self._guests: asyncio.Queue[Guest] = asyncio.Queue()
        self._links: list[NodeLink] = []

    async def gather(self, names: Sequence[str], seconds: float) -> list[Guest]:
        """Those of `names`, in that order. MoerlError names the ones that did not come in time."""
        here: dict[str, Guest] = {}
        try:
            async with asyncio.timeout(seconds):
                while set(names) - set(here):
                    guest = await self._guests.get()
                    here[guest.facts.name] = guest
                    logger.info("%s is here (%d of %d)", guest.facts.name, len(here), len(names))
        except TimeoutError as error:
            missing = [name for name in names if name not in here]
            raise MoerlError(
                f"{', '.join(missing)} did not come within slurm.start_seconds = {seconds:g}; slurm.exclude= leaves nodes out"
            ) from error
        return [here[name] for name in names]

    def admit(self, connection: socket.socket) -> None:
        """From the listener's thread: of a node that has proven itself."""
        asyncio.run_coroutine_threadsafe(self._welcome(connection), self._loop)

    async def _welcome(self, connection: socket.socket) -> None:
        link = NodeLink(*await asyncio.open_connection(sock=connection))
        self._links.append(link)
        try:
            if (hello := await link.hear()) is not None:
                self._guests.put_nowait(Guest(facts=_FACTS.validate_python(hello), link=link))
        except ValueError as error:
            logger.warning("a node at %s tells what this one cannot read, as of another moerl: %s", link.peer_address, error)
            link.close()

    def close(self) -> None:
        for link in self._links:
            link.close()


@asynccontextmanager
async def hold_meeting(file: Path, interface: str | None) -> AsyncIterator[Meeting]:
    """Listens, and writes `file`, readable by this user alone, which is gone afterwards."""
    meeting, addresses = Meeting(), addresses_of(interface)
    listener = SecretListener("0.0.0.0" if interface is None else addresses[0], meeting.secret, meeting.admit, name="meeting")
    try:
        _write_private(file, json.dumps({"addresses": addresses, "port": listener.port, "token": meeting.secret.key}))
        yield meeting
    finally:
        os.unlink(file)
        listener.close()
        meeting.close()


async def join_meeting(file: Path, facts: AllocatedNode, seconds: float) -> tuple[NodeLink, str]:
    """(the connection to the first node, the job's token). MoerlError if there is none in time."""
    try:
        async with asyncio.timeout(seconds):
            place = json.loads(await appeared(file))
            link = await _connect(place["addresses"], place["port"], RunSecret(key=place["token"]))
    except TimeoutError as error:
        reason = "the first node is not there yet, or the directory is not on storage that all nodes share"
        raise MoerlError(f"no {file} after slurm.start_seconds = {seconds:g}: {reason}") from error
    await link.tell(**_FACTS.dump_python(facts, mode="json"))
    return link, place["token"]


async def appeared(file: Path) -> str:
    """The text of a file that somebody writes, once there is any. The caller bounds the time."""
    while not (text := await asyncio.to_thread(_text, file)):  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    return text


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def _connect(addresses: Sequence[str], port: int, secret: RunSecret) -> NodeLink:
    reasons = []
    for address in addresses:
        try:
            connection = await asyncio.to_thread(connect_proven, address, port, secret, _CONNECT_SECONDS)
        except TimeoutError:
            reasons.append(f"{address}: no answer within {_CONNECT_SECONDS:g} s")
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
        else:
            return NodeLink(*await asyncio.open_connection(sock=connection))
    raise MoerlError(f"the first node is not reachable at port {port} ({'; '.join(reasons)}); network.interface= names the network to use")


def addresses_of(interface: str | None) -> list[str]:
    """IPv4 addresses of this node, those of a loopback last; the interface's alone if one is named."""
    found = {name: [address for address in addresses if ":" not in address] for name, addresses in find_interfaces().items()}
    if interface is not None:
        if not found.get(interface):
            names = ", ".join(sorted(name for name, addresses in found.items() if addresses))
            raise MoerlError(f"network.interface = {interface!r}: no such network interface with an IPv4 address here; there are {names}")
        return found[interface][:1]
    every = [address for addresses in found.values() for address in addresses]
    launched_at = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    return sorted(every, key=lambda address: (address.startswith("127."), address != launched_at))


def common_address(guests: Sequence[Guest]) -> str:
    """Address of the first node: where most of the others reached it."""
    return Counter(guest.link.own_address for guest in guests).most_common(1)[0][0]


def _write_private(file: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = file.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    temporary.replace(file)
