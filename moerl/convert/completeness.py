"""Does a Hugging Face folder hold every tensor of its model, each in the shape of its like? From names and headers alone.

Layers of one kind (dense or with experts) hold the same tensors, and those have the same shapes: a tensor that one layer has and
another of its kind lacks is missing, and the odd one out is of another shape. The first axis of the embeddings is config.json's.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from moerl.config.problems import problem
from moerl.convert.parameters import num_experts
from moerl.convert.source import HFSource
from moerl.models.family import Family, Sizes, is_tied, num_mtp_layers
from moerl.types import Problem

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_FETCH = "fetch the checkpoint again; its config.json must be of the same model"


def missing(source: HFSource, family: Family, held: set[str], sizes: Sizes) -> Iterator[Problem]:
    """Every tensor, by name."""
    tied = is_tied(source.config)
    needed = {
        name for rule in family.rules for name in rule.hf if "{" not in name and not (tied and rule.megatron == "output_layer.weight")
    }
    layers = range(sizes.num_layers + num_mtp_layers(source.config))
    parts: dict[int, set[str]] = {layer: set() for layer in layers}
    for name in held:
        match = _LAYER.fullmatch(name)
        if match and int(match[1]) in parts:
            parts[int(match[1])].add(match[2])
    of_kind: dict[str, set[str]] = defaultdict(set)
    for layer in layers:
        of_kind[_kind(layer, parts[layer], sizes)] |= {_EXPERT.sub(r"\1{}\3", part) for part in parts[layer]}
    for layer in layers:
        for part in of_kind[_kind(layer, parts[layer], sizes)]:
            experts = range(num_experts(family, source.config)) if "{}" in part else range(1)
            needed |= {f"model.layers.{layer}.{part.format(expert)}" for expert in experts}
    for name in sorted(needed - held):
        yield problem("SRC", f"{source.directory}: {name}", "is missing", "no file holds it", _FETCH)


def _kind(layer: int, parts: set[str], sizes: Sizes) -> str:
    if layer >= sizes.num_layers:
        return "multi-token prediction"
    return "experts" if any(_EXPERT.fullmatch(part) for part in parts) else "dense"


def misshapen(source: HFSource, names: Sequence[str]) -> Iterator[Problem]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"\.\d+\.", ".N.", name)].append(name)
    for group in groups.values():
        shapes = Counter(source.tensors[name].shape for name in group)
        expected = shapes.most_common(1)[0][0]
        if group[0] in ("model.embed_tokens.weight", "lm_head.weight"):
            expected = (source.config["vocab_size"], source.config["hidden_size"])
        for name in group:
            stored = source.tensors[name]
            if stored.shape != expected:
                rule = f"must have shape {expected}"
                yield problem("SRC", f"{stored.file}: {name}", rule, f"found {stored.shape}, unlike others of its kind", _FETCH)
            if not stored.dtype.is_floating_point:
                rule = "must hold floating-point numbers"
                yield problem("SRC", f"{stored.file}: {name}", rule, f"found {stored.dtype}; {_QUANTIZED}", "the unquantized checkpoint")


_QUANTIZED = "weights quantized to integers need their own method to be read"


def unknown(source: HFSource, names: Sequence[str], copies: Sequence[str]) -> Iterator[Problem]:
    """Tensors that no parameter is made of, except copies of other tensors and rotary frequencies."""
    patterns = [re.compile(re.escape(copy).replace(r"\{mtp\}", r"\d+")) for copy in copies]
    for name in names:
        if name.endswith("rotary_emb.inv_freq") or any(pattern.fullmatch(name) for pattern in patterns):
            continue
        if name == "lm_head.weight" and is_tied(source.config):
            continue
        reason = "no parameter of its family is made of it, so that it would be lost"
        yield problem("SRC", f"{source.tensors[name].file}: {name}", "is no tensor of this model", reason, "the config.json of this model")
