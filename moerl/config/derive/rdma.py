"""Parts of a run that ask more of the network between nodes than NCCL does: DeepEP, SHARP."""

from typing import Literal

from moerl.config.schema.run_config import RunConfig

SHARP = "NCCL_COLLNET_ENABLE"
"""With 1, sums are asked of InfiniBand switches: by NCCL, and of the trainer's data-parallel groups by Megatron."""


def crosses_nodes(config: RunConfig, role: Literal["train", "rollout"]) -> bool:
    """Whether DeepEP joins ranks, or processes of a server, that are on several nodes."""
    if role == "rollout":
        layout = config.rollout.layout
        return layout.uses_deepep and layout.nodes > 1
    megatron, layout_of_ranks, gpus = config.train.megatron, config.train.layout, config.placement.gpus_per_node
    uses = megatron.get("moe_token_dispatcher_type") == "flex" and megatron.get("moe_flex_dispatcher_backend", "deepep") == "deepep"
    return uses and config.placement.nodes > 1 and gpus is not None and layout_of_ranks.ep * layout_of_ranks.etp > gpus
