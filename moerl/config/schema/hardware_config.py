"""Settings of the machines: `placement.gpu`, of which configs/hardware has some to choose from."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from moerl.config.schema.strict import Positive, Size, Strict


@dataclass(frozen=True, kw_only=True)
class GpuConfig(Strict):
    """GPU of every node."""

    name: Annotated[str, Field(min_length=1)]
    """As messages call it."""
    memory_mib: Positive
    """MiB in all, as `nvidia-smi --query-gpu=memory.total` prints them."""
    capability: Annotated[float, Field(ge=7, lt=100)]
    """Compute capability, such as 9.0: which FP8 formats there are."""
    gpus_per_domain: Size
    """GPUs that NVLink joins: those of a node, or of a rack."""
    host_memory_gib: Positive | None = None
    """Memory of a node for its processes, in GiB. None: not judged."""
    bf16_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak of dense products in bfloat16, in 1e12 operations per second; as the next one for plans of time to come."""
    fp8_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak of dense products in FP8. None: it has none."""
    memory_gb_per_second: Annotated[float, Field(gt=0)] | None = None
    """Bandwidth of the GPU's memory, in 1e9 bytes per second."""
    nvlink_gb_per_second: Annotated[float, Field(gt=0)] | None = None
    """Rate of a GPU's links to its domain, in each direction."""
    host_gb_per_second: Annotated[float, Field(gt=0)] | None = None
    """Between a GPU and host memory (PCIe, or NVLink-C2C), in each direction."""
    cards_per_node: Positive | None = None
    """Network cards for the GPUs of a node."""
    card_gbit: Annotated[float, Field(gt=0)] | None = None
    """Rate of a card, in 1e9 bits per second: `moerl plan` costs a push with it."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 2**20
