"""Rules of how a model's layers are cut into pipeline stages and interleaved chunks.

Megatron's: megatron/core/transformer/transformer_block.py, get_num_layers_to_build.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moerl.types.errors import Problem

if TYPE_CHECKING:
    from moerl.config.schema.layout import Layout
from moerl.config.derive.pipeline import chunk_layers, stage_layers


def pipeline_problems(layout: "Layout", num_layers: int) -> Iterator[Problem]:
    """Every rule the cut of a model of `num_layers` breaks, if the layout does not contradict itself."""
    if any(contradictions(layout)):
        return
    if layout.first_stage_layers is None and layout.last_stage_layers is None:
        yield from _even_problems(layout, num_layers)
    else:
        yield from _uneven_problems(layout, num_layers)


def contradictions(layout: "Layout") -> Iterator[Problem]:
    """What is wrong with the cut whatever the model."""
    if layout.vpp > 1 and layout.pp == 1:
        yield _problem(
            "vpp", layout.vpp, "needs pp > 1", "chunks are interleaved over pipeline stages, and there is one stage", "vpp=1, or pp >= 2"
        )
    sizes = {name: getattr(layout, name) for name in ("first_stage_layers", "last_stage_layers")}
    counted = {name: getattr(layout, name) for name in ("embedding_as_layer", "loss_as_layer")}
    chosen = {name: value for name, value in (sizes | counted).items() if value not in (None, False)}
    if layout.pp == 1:
        for name, value in chosen.items():
            yield _problem(name, value, "needs pp > 1", "it moves layers between pipeline stages, and there is one stage", "leave it out")
    elif any(sizes[name] is not None for name in sizes) and any(counted.values()):
        name = next(name for name, value in counted.items() if value)
        reason = "Megatron takes either the sizes of the outer stages or the extra layers that stand for embedding and loss"
        yield _problem(name, True, "cannot be combined with first_stage_layers or last_stage_layers", reason, f"{name}=false")


def _even_problems(layout: "Layout", num_layers: int) -> Iterator[Problem]:
    counted = num_layers + layout.embedding_as_layer + layout.loss_as_layer
    if counted % (layout.pp * layout.vpp):
        extra = "" if counted == num_layers else f" and {counted - num_layers} for embedding and loss"
        rule = f"pp * vpp = {layout.pp * layout.vpp} must divide the model's {num_layers} layers{extra}"
        yield _problem("pp", layout.pp, rule, "every chunk holds the same number of layers", _even_fix(layout, num_layers))
    elif min(min(stage) for stage in chunk_layers(layout, num_layers)) < 1:
        rule = f"{counted // (layout.pp * layout.vpp)} layer per chunk leaves a chunk without one of the model's"
        reason = "the embedding or the loss takes the place of its only layer"
        yield _problem("vpp", layout.vpp, rule, reason, "a smaller vpp, or embedding_as_layer=false and loss_as_layer=false")


def _uneven_problems(layout: "Layout", num_layers: int) -> Iterator[Problem]:
    given = {n: getattr(layout, n) for n in ("first_stage_layers", "last_stage_layers") if getattr(layout, n) is not None}
    rest, stages = num_layers - sum(given.values()), layout.pp - len(given)
    name, value = next(iter(given.items()))
    said = " and ".join(f"{key}={count}" for key, count in given.items())
    if rest < stages or (stages == 0 and rest) or (stages and rest % stages):
        left = f"{rest} layers for {stages} other stages" if rest >= 0 else f"{-rest} layers too few"
        rule = f"{said} of {num_layers} layers leave {left}, which must be a whole number of layers each, at least 1"
        yield _problem(name, value, rule, "every layer runs on exactly one stage", _uneven_fix(layout, num_layers))
    elif layout.vpp > 1 and any(count % layout.vpp for count in stage_layers(layout, num_layers)):
        counts = sorted(set(stage_layers(layout, num_layers)))
        rule = f"stages of {' and '.join(map(str, counts))} layers must each be a multiple of vpp={layout.vpp}"
        yield _problem(name, value, rule, "a stage's layers are cut evenly into its chunks", "vpp=1, or stages that are multiples of it")


def _even_fix(layout: "Layout", num_layers: int) -> str:
    """pp must also divide the ranks, so only those values are named."""
    fits = [pp for pp in range(1, num_layers + 1) if num_layers % (pp * layout.vpp) == 0 and layout.ranks % pp == 0]
    options = [f"pp={pp}" for pp in fits] if layout.vpp == 1 else [f"pp={pp} with vpp={layout.vpp}" for pp in fits if pp > 1]
    if layout.pp > 1:
        if (num_layers + 2) % (layout.pp * layout.vpp) == 0 and num_layers + 2 >= 2 * layout.pp * layout.vpp:
            options.append("embedding_as_layer=true and loss_as_layer=true")
        options.append(_uneven_fix(layout, num_layers))
    return "one of: " + "; ".join(options)


def _uneven_fix(layout: "Layout", num_layers: int) -> str:
    """First and last stage that make the whole most even: the outer stages hold embedding and loss, so the remainder is theirs."""
    pp, vpp = layout.pp, layout.vpp
    if num_layers % vpp or num_layers < pp * vpp:
        return f"fewer chunks or stages: every one of the pp * vpp chunks needs a layer of the model's {num_layers}"
    units, middle = num_layers // vpp, -(-num_layers // vpp // pp)
    while pp > 2 and units - middle * (pp - 2) < 2:
        middle -= 1
    outer = units - middle * (pp - 2)
    first, last = outer - outer // 2, outer // 2
    return f"first_stage_layers={first * vpp} and last_stage_layers={last * vpp}" + (f" ({middle * vpp} each between)" if pp > 2 else "")


def _problem(field: str, value: object, rule: str, reason: str, fix: str) -> Problem:
    return Problem(path=f"train.layout.{field}", value=value, rule=rule, reason=reason, fix=fix)
