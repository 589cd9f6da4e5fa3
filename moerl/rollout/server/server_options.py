"""What a server process is told: its model, its limits, its place among the nodes of its server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moerl.config.schema.rollout_config import ServerLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What moerl decides about a server; the names are those of the hf server."""

    model: Path
    dtype: str
    max_context: int
    max_running: int
    """Of the whole server."""
    prefill_chunk: int
    """Of each data-parallel group."""
    returns_routes: bool
    shares_gpus: bool
    """It must be able to give its memory back."""
    engine_args: Mapping[str, Any]
    layout: ServerLayout = field(default_factory=ServerLayout)
    node_rank: int = 0
    head: str = "127.0.0.1"
    """Host of node 0 of this server."""
    host: str = "127.0.0.1"
    """Address of this node, at which the other nodes of this server reach it."""
