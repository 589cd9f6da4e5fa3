"""Families that the native table lacks, opened by Megatron-Bridge: declared by it, proven on a tiny model, and kept in a file.

Who proves needs torch, Megatron and transformers, and runs in a process of its own (moerl/train/prove_family.py); who asks
for a family, as `moerl check` does, reads what was found. A file belongs to one config.json and to the versions that found it.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from moerl.models.bridge_packages import BRIDGES, knows
from moerl.models.families.parts.family import Family, Rule, Served
from moerl.models.user_cache import cache_file, keep_file, read_kept
from moerl.types.errors import CheckpointError

PROOF_SECONDS = 300.0
"""Limit of a proof; it takes about 20 s."""
_PROVER = "moerl.train.prove_family"
_MOERL = Path(__file__).parents[1]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Result of a proof, of one config.json."""

    refusal: str | None = None
    """Why moerl cannot train it; the rest is empty then."""
    fields: dict[str, Any] | None = None
    """Arguments of Megatron's configuration."""
    rotary: dict[str, Any] | None = None
    """Arguments of GPTModel."""
    rules: tuple[Rule, ...] = ()
    served: Served = field(default_factory=Served)
    distance: float = 0.0
    """Largest difference of a log-prob from transformers', on the tiny model."""
    versions: dict[str, str] = field(default_factory=dict)
    """Packages that this was found with."""

    @cached_property
    def family(self) -> Family:
        """The family, of this config.json alone."""
        fields, rotary = self.fields or {}, self.rotary or {}
        return Family(
            rules=self.rules,
            transformer_config=lambda _: dict(fields),
            broken_rules=lambda _: iter(()),
            rotary=lambda _: dict(rotary),
            served=self.served,
        )


_FILE = TypeAdapter(Opened)
_known: dict[str, Opened | None] = {}
"""By the text of config.json."""


def opened(hf: Mapping[str, Any]) -> Opened | None:
    """The result for a config.json, found now if these versions of packages have not found it before: some 20 s. None: it
    does not know this architecture, or is not installed here and nothing was kept (the servers' environments have what was)."""
    try:
        text = _text(hf)
    except RecursionError:  # nested more deeply than any model's
        return None
    if text not in _known:
        _known[text] = _found(hf, text)
    return _known[text]


def remember(hf: Mapping[str, Any], found: Opened) -> None:
    """Keep a result, in this process alone."""
    _known[_text(hf)] = found


def _text(hf: Mapping[str, Any]) -> str:
    return json.dumps(hf, sort_keys=True)


def _found(hf: Mapping[str, Any], text: str) -> Opened | None:
    file, kept = cache_file("families", f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"), None
    with suppress(ValidationError):
        kept = _FILE.validate_json(read_kept(file))
    if not knows(BRIDGES["megatron_bridge"], hf) or (kept is not None and kept.versions == _versions()):
        return kept
    try:
        found = replace(_prove(text), versions=_versions())
    except CheckpointError as error:  # not kept in a file: another time it may end well
        return Opened(refusal=str(error))
    keep_file(file, _FILE.dump_json(found, indent=1))
    return found


def _prove(text: str) -> Opened:
    logger.warning("no family in moerl/models for this config.json: comparing Megatron-Bridge's with transformers, some 20 s")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        command = [sys.executable, "-m", _PROVER]
        ended = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=PROOF_SECONDS, check=True, env=environment
        )  # fmt: skip
        return _FILE.validate_json(ended.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = error.stderr.splitlines()[-1].removeprefix("[rank0]: ") if error.stderr else "no word"
        raise CheckpointError(f"the proof of its family ended with {last[:300]}") from error
    except (OSError, subprocess.TimeoutExpired, ValidationError, IndexError) as error:
        raise CheckpointError(f"the proof of its family did not end well: {error}") from error


def _versions() -> dict[str, str]:
    """Versions of the packages that a proof follows from, of those installed; of moerl's part the sources, which change within one."""
    found = {}
    for name in ("megatron-bridge", "megatron-core", "transformers", "torch"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    own = b"".join((_MOERL / file).read_bytes() for file in ("train/prove_family.py", "models/bridge/bridge_family.py"))
    return found | {"moerl": hashlib.sha256(own).hexdigest()[:16]}
