"""What the tensors of a push are by the ranks that hold them: digests made before anything is gathered on rank 0."""

import torch
import torch.distributed as dist

from moerl.models.weight_bridge import WeightBridge
from moerl.push_types import Origin
from moerl.weights.digest import tensor_digest


def find_origins(bridge: WeightBridge, dtype: torch.dtype) -> dict[str, Origin]:
    """Collective: of the tensors of `bridge.export(dtype, with_mtp=False)`, by name, on rank 0; empty on the others.

    Every rank digests what it holds, independently of the export, so that a server finds whatever happens to a tensor in between.
    """
    mine = {name: Origin(digest=tensor_digest(tensor), ranks=ranks) for name, tensor, ranks in bridge.originals(dtype)}
    held: list[dict[str, Origin]] = [{} for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else []
    dist.gather_object(mine, held if dist.get_rank() == 0 else None)
    return {name: origin for origins in held for name, origin in origins.items()}
