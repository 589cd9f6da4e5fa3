"""Dense to mixture of experts: every expert is a copy of the dense MLP, and a small random router chooses among them
(Komatsuzaki et al. 2022, arXiv:2212.05055).

The weights of a token's experts add up to 1, so that a layer of equal experts computes what the dense MLP did, up to rounding. From there
training tells the experts apart: each sees the tokens that the router gives it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from moerl.convert.sharded.parameters import described_family
from moerl.convert.tensors.entry import Entry, computed
from moerl.models.families.family_table import FAMILIES
from moerl.types.errors import ConvertError, Problem, problem

ROUTER_STD = 0.02
"""Standard deviation of the router's weights, as in the paper: scores differ between tokens, and the softmax over them is nearly flat."""

_MLP = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycling:
    num_experts: int
    top_k: int
    """Experts of a token."""
    router_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counterpart:
    """Architecture that a dense model_type becomes."""

    model_type: str
    architecture: str
    fields: Callable[[Mapping[str, Any], Upcycling], dict[str, Any]]
    """Fields of config.json beside the dense model's settings."""
    dropped: tuple[str, ...] = ()
    """Settings that transformers' class of the result does not have."""
    written: tuple[str, ...] = ()
    """Settings that config.json must have, because transformers' defaults for the two classes differ."""


def _mixtral_fields(dense: Mapping[str, Any], chosen: Upcycling) -> dict[str, Any]:
    groups = dense.get("num_key_value_heads")
    return {
        "num_local_experts": chosen.num_experts,
        "num_experts_per_tok": chosen.top_k,
        "num_key_value_heads": dense["num_attention_heads"] if groups is None else groups,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


def _qwen3_moe_fields(dense: Mapping[str, Any], chosen: Upcycling) -> dict[str, Any]:
    return {
        "num_experts": chosen.num_experts,
        "num_experts_per_tok": chosen.top_k,
        "moe_intermediate_size": dense["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


_COUNTERPARTS = {
    "llama": _Counterpart(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        fields=_mixtral_fields,
        dropped=("attention_bias", "mlp_bias", "pretraining_tp"),
        written=("max_position_embeddings", "rms_norm_eps"),
    ),
    "qwen3": _Counterpart(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fields=_qwen3_moe_fields,
        dropped=("layer_types",),
        written=("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    ),
}
_NO_COUNTERPART = {"qwen2": "qwen2_moe has a shared expert beside the routed ones, which would count twice"}


def upcycling_problems(num_experts: int | None, top_k: int | None, dtype: str) -> Iterator[Problem]:
    """Problems of the options of the command line."""
    if dtype == "fp8":
        reason = "every expert would be quantized anew from the same matrix"
        fix = "--dtype bfloat16 first, then moerl convert of that folder with --dtype fp8"
        yield problem("--dtype", dtype, "must not be fp8 with --to moe", reason, fix)
    for option, value in (("--experts", num_experts), ("--top-k", top_k)):
        if value is None:
            reason = "a mixture of experts has both numbers"
            yield problem(option, value, "is needed with --to moe", reason, f"{option} {8 if option == '--experts' else 2}")
        elif value < 2:
            reason = "with a single expert for a token its weight is always 1, and the router would learn nothing"
            yield problem(option, value, "must be at least 2", reason, f"{option} 2 or more")
    if num_experts is not None and top_k is not None and top_k > num_experts:
        yield problem("--top-k", top_k, f"must be at most --experts={num_experts}", "no expert is chosen twice", f"--top-k {num_experts}")


def upcycled_config(dense: Mapping[str, Any], chosen: Upcycling) -> dict[str, Any]:
    """config.json of the mixture. Raises ConvertError with everything that keeps the model from becoming one."""
    counterpart = _counterpart(dense)
    if missing := [name for name in counterpart.written if name not in dense] + _missing_rope(dense):
        fix = "the value the model was trained with, in SRC/config.json"
        reason = f"transformers has other defaults for {counterpart.model_type} than for {dense['model_type']}"
        raise ConvertError([problem(f"SRC/config.json: {name}", None, "must be written", reason, fix) for name in missing])
    described_family(dense)
    kept = {name: value for name, value in dense.items() if name not in counterpart.dropped}
    named = {"model_type": counterpart.model_type, "architectures": [counterpart.architecture]}
    config = kept | counterpart.fields(dense, chosen) | named
    if broken := list(FAMILIES[counterpart.model_type].broken_rules(config)):
        path = f"SRC/config.json as {counterpart.model_type}"
        raise ConvertError([problem(path, dense["model_type"], rule, reason, fix) for rule, reason, fix in broken])
    return config


def upcycled(entries: Sequence[Entry], dense: Mapping[str, Any], chosen: Upcycling) -> list[Entry]:
    """The tensors of the mixture, in the order of the dense model's: expert by expert where that has a matrix of the MLP."""
    served = FAMILIES[_counterpart(dense).model_type].served
    projections = dict(zip(("gate", "up", "down"), served.projections, strict=True))
    tensors: list[Entry] = []
    for entry in entries:
        match = _MLP.fullmatch(entry.name)
        if match is None:
            tensors.append(entry)
            continue
        block = f"{match[1]}.{served.block}"
        if match[2] == "gate":
            tensors.append(_router(f"{block}.gate.weight", entry.dtype, (chosen.num_experts, entry.shape[1]), chosen.router_seed))
        names = [f"{block}.experts.{expert}.{projections[match[2]]}.weight" for expert in range(chosen.num_experts)]
        tensors += [replace(entry, name=name) for name in names]
    return tensors


def _counterpart(dense: Mapping[str, Any]) -> _Counterpart:
    kind = dense.get("model_type")
    if isinstance(kind, str) and kind in _COUNTERPARTS:
        return _COUNTERPARTS[kind]
    reason = _NO_COUNTERPART.get(str(kind), "no family of moerl/models has its attention and weights of experts that add up to 1")
    fix = f"a dense model whose model_type is one of {', '.join(_COUNTERPARTS)}"
    raise ConvertError([problem("SRC/config.json: model_type", kind, "must have a counterpart with experts", reason, fix)])


def _missing_rope(dense: Mapping[str, Any]) -> list[str]:
    return [] if "rope_theta" in dense or "rope_theta" in (dense.get("rope_parameters") or ()) else ["rope_theta"]


def _router(name: str, dtype: torch.dtype, shape: tuple[int, int], seed: int) -> Entry:
    return computed(name, dtype, shape, partial(_router_weight, name, dtype, shape, seed))


def _router_weight(name: str, dtype: torch.dtype, shape: tuple[int, int], seed: int) -> Tensor:
    """A function of seed and name alone, whichever thread or run computes it."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
    return (torch.randn(shape, generator=generator) * ROUTER_STD).to(dtype)
