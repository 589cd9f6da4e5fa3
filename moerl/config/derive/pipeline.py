"""Layers of each pipeline stage and interleaved chunk."""

from moerl.config.schema.layout import Layout


def stage_layers(layout: Layout, num_layers: int) -> list[int]:
    """Layers of each stage, in order, by a layout without problems; the embedding and the loss where they count as one."""
    pp, first, last = layout.pp, layout.first_stage_layers, layout.last_stage_layers
    if first is None and last is None:
        return [(num_layers + layout.embedding_as_layer + layout.loss_as_layer) // pp] * pp
    given = [count for count in (first, last) if count is not None]
    middle = (num_layers - sum(given)) // max(pp - len(given), 1)
    return [middle if first is None else first, *[middle] * (pp - 2), middle if last is None else last]


def chunk_layers(layout: Layout, num_layers: int) -> list[list[int]]:
    """Transformer layers of [stage][chunk]; chunk c of stage s runs at place c * pp + s."""
    chunks = [[layers // layout.vpp] * layout.vpp for layers in stage_layers(layout, num_layers)]
    chunks[0][0] -= layout.embedding_as_layer
    chunks[-1][-1] -= layout.loss_as_layer
    return chunks


def layer_ranges(layout: Layout, num_layers: int) -> list[list[range]]:
    """Layers, from 0 over the whole model, of [stage][chunk]."""
    counts, start = chunk_layers(layout, num_layers), 0
    found: list[list[range]] = [[] for _ in counts]
    for chunk in range(layout.vpp):
        for stage in range(layout.pp):
            found[stage].append(range(start, start := start + counts[stage][chunk]))
    return found
