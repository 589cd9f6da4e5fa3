"""Where the nodes of a job meet: the first one listens, and says in a file of the run's directory where.

    first node --challenge--> other node --proof that it knows the token, facts--> first node
    first node --{"ray": address}, {"refused": reason} or {"ended": code}--> other nodes

The connections stay open for as long as the job lasts: their end is how a node learns that another is gone. Both sides of a connection
also tell which addresses the nodes reach each other at, which no name service needs to know.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from moerl.cluster.sockets import keep_alive
from moerl.hardware.network_settings import find_interfaces
from moerl.slurm.allocation import AllocatedNode
from moerl.types.errors import MoerlError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Between two looks at a file: shared storage tells nobody of changes."""
_CONNECT_SECONDS = 5.0
"""To an address of the first node, which may be one that is not reachable from here."""
_PROOF_SECONDS, _MOST_STRANGERS = 5.0, 64
"""A connection that has not proved by then that it knows the token is closed, and so is the oldest of more than so many."""
_FACTS = TypeAdapter(AllocatedNode)


class NodeLink:
    """One connection between the first and another node: messages are JSON objects, one a line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        keep_alive(writer.get_extra_info("socket"))

    @property
    def own_address(self) -> str:
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        return str((self._writer.get_extra_info("peername") or ("nobody",))[0])

    async def tell(self, **message: Any) -> None:
        """Nothing if the other side is gone: whoever reads from it learns of that."""
        with contextlib.suppress(OSError):
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def hear(self) -> dict[str, Any] | None:
        """None: the other side is gone. Raises ValueError or RecursionError for what is no message."""
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

    def __init__(self, token: str):
        self.token = token
        self._guests: asyncio.Queue[Guest] = asyncio.Queue()
        self._links: list[NodeLink] = []
        self._strangers: list[NodeLink] = []

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

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = NodeLink(reader, writer)
        self._strangers.append(link)
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers[0].close()
        try:
            async with asyncio.timeout(_PROOF_SECONDS):
                guest = await self._proved(link)
        except (ValueError, KeyError, TypeError, RecursionError, TimeoutError) as error:
            logger.warning("a connection from %s was refused: %s", link.peer_address, str(error)[:200] or "it proved nothing in time")
            link.close()
            return
        finally:
            self._strangers.remove(link)
        self._links.append(link)
        self._guests.put_nowait(guest)

    async def _proved(self, link: NodeLink) -> Guest:
        """Raises ValueError, KeyError, TypeError or RecursionError for whoever is no node of this job."""
        challenge = secrets.token_hex(32)
        await link.tell(challenge=challenge)
        hello = await link.hear()
        if hello is None or not hmac.compare_digest(hello["proof"], _proof(self.token, challenge)):
            raise ValueError("no node of this job")
        return Guest(facts=_FACTS.validate_python(hello["facts"]), link=link)

    def close(self) -> None:
        for link in (*self._links, *self._strangers):
            link.close()


def _proof(token: str, challenge: str) -> str:
    return hmac.new(token.encode(), challenge.encode(), "sha256").hexdigest()


@asynccontextmanager
async def hold_meeting(file: Path, interface: str | None) -> AsyncIterator[Meeting]:
    """Listens, and writes `file`, readable by this user alone, which is gone afterwards."""
    meeting = Meeting(secrets.token_hex(32))
    addresses = addresses_of(interface)
    server = await asyncio.start_server(meeting.welcome, "0.0.0.0" if interface is None else addresses[0], 0)
    try:
        port = server.sockets[0].getsockname()[1]
        _write_private(file, json.dumps({"addresses": addresses, "port": port, "token": meeting.token}))
        yield meeting
    finally:
        os.unlink(file)
        server.close()
        meeting.close()


async def join_meeting(file: Path, facts: AllocatedNode, seconds: float) -> tuple[NodeLink, str]:
    """(the connection to the first node, the job's token). MoerlError if there is none in time."""
    try:
        async with asyncio.timeout(seconds):
            place = json.loads(await appeared(file))
            link = await _connect(place["addresses"], place["port"])
            asked = await link.hear()
    except TimeoutError as error:
        reason = "the first node is not there yet, or the directory is not on storage that all nodes share"
        raise MoerlError(f"no {file} after slurm.start_seconds = {seconds:g}: {reason}") from error
    if asked is None:
        raise MoerlError(f"the first node, which {file} names, closed the connection: it had too many at once, or has ended")
    await link.tell(proof=_proof(place["token"], asked["challenge"]), facts=_FACTS.dump_python(facts, mode="json"))
    return link, place["token"]


async def appeared(file: Path) -> str:
    """The text of a file that somebody writes, once there is any. The caller bounds the time."""
    while not (text := await asyncio.to_thread(_text, file)):  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    return text


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def _connect(addresses: Sequence[str], port: int) -> NodeLink:
    reasons = []
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return NodeLink(*await asyncio.open_connection(address, port))
        except TimeoutError:
            reasons.append(f"{address}: no answer within {_CONNECT_SECONDS:g} s")
        except OSError as error:
            reasons.append(f"{address}: {error.strerror}")
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
