"""Settings of the machines: `placement.gpu`, of which configs/hardware has some to choose from."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from moerl.config.schema.strict import Positive, Size, Strict


@dataclass(frozen=True, kw_only=True)
class GpuConfig(Strict):
    """GPU of every node."""

    name: str
    """As messages call it."""
    memory_mib: Positive
    """MiB in all, as `nvidia-smi --query-gpu=memory.total` prints them."""
    capability: Annotated[float, Field(ge=7, lt=100)]
    """Compute capability, such as 9.0: which FP8 formats there are."""
    gpus_per_domain: Size
    """GPUs that NVLink joins: those of a node, or of a rack."""
