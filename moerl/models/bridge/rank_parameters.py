"""Part of a model that a rank holds: its parameters and buffers, under names that count layers and experts over the whole model."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from moerl.models.families.parts.family import Family, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameter:
    """A parameter or buffer this rank holds, under its global name."""

    name: str
    rule: Rule
    numbers: dict[str, int]
    tensor: Tensor


def owned_by(chunk: nn.Module, family: Family, *, expert_rank: int) -> Iterator[RankParameter]:
    """Parameters of a GPTModel on the rank that is `expert_rank` of its expert parallel group. KeyError for a name no rule maps."""
    state = chunk.state_dict().keys()
    buffers = ((local, buffer) for local, buffer in chunk.named_buffers() if local in state)
    tensors = [*chunk.named_parameters(), *buffers]
    num_local_experts = Counter(_without_expert(local) for local, _ in tensors)
    for local, tensor in tensors:
        name = _global_name(chunk, local, first_expert=expert_rank * num_local_experts[_without_expert(local)])
        rule, numbers = family.find(name)
        yield RankParameter(name=name, rule=rule, numbers=numbers, tensor=tensor)


def hf_names(rule: Rule, numbers: Mapping[str, int], *, num_layers: int, tied: bool) -> list[str]:
    """The Hugging Face tensors of a parameter of a model of `num_layers`, without the rule's copies."""
    if tied and rule.megatron == "output_layer.weight":
        return ["model.embed_tokens.weight"]
    return list(rule.hf_names(numbers, num_layers))


def _global_name(chunk: nn.Module, local: str, *, first_expert: int) -> str:
    """Megatron counts layers from 0 in each stage and experts from 0 on each rank; names are those of version 0.16."""
    parts = local.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)  # type: ignore[union-attr,index]
    if parts[:2] == ["mtp", "layers"] and parts[3] == "mtp_model_layer":  # Megatron 0.19's name for 0.16's
        parts[3] = "transformer_layer"
    if "experts" in parts:
        kind = _without_expert(parts[-1])
        parts[-1] = f"{kind}{int(parts[-1][len(kind) :]) + first_expert}"
    return ".".join(parts)


def _without_expert(local: str) -> str:
    """Names of experts' parameters end with the expert's number."""
    return local.rstrip("0123456789")
