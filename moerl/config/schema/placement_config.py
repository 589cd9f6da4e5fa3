"""Settings of where trainer and rollout servers are: `placement`."""

from dataclasses import dataclass
from typing import Literal

from moerl.config.schema.strict import Positive, Size, Strict


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Strict):
    mode: Literal["separate", "colocated", "group_colocated"] = "separate"
    """separate: rollout servers have GPUs of their own. colocated: all of them are on the trainer's; the two have these in turn, hence
    max_staleness=0. group_colocated: the first num_shared servers are on the trainer's GPUs and sleep while it trains; the others have
    their own and go on, also with requests the first ones had begun. What shares GPUs needs train.offload=all."""
    num_shared: Positive | None = None
    """Servers on the trainer's GPUs, for group_colocated: at least 1, and not all of them."""
    nodes: Size = 1
    """A job of Slurm or Kubernetes has as many."""
    gpus_per_node: Size | None = None
    """GPUs the run may use on every node. Where there are none: training ranks and servers that a node takes. None: one node, which takes
    all."""
    nodes_per_domain: Size = 1
    """Nodes, one after the other in the topology's order, whose GPUs NVLink joins: groups that fit stay inside."""
    topology: str | None = None
    """File in the format of Slurm's topology.conf: nodes under one switch become neighbours. None: in the order of their names."""
