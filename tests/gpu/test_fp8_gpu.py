"""FP8 that a GPU makes for a push is, bit for bit, what `moerl convert` makes on CPUs. Not run on a GPU so far."""

import pytest
import torch

from moerl.models import fp8_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("start", [(0, 0), (88, 0), (0, 300)])
def test_a_gpu_makes_the_bytes_of_a_cpu(start):
    box = torch.randn(700, 900, generator=torch.Generator().manual_seed(0)).bfloat16()
    shape = (start[0] + 700, start[1] + 900)

    def made(box):
        maxima = fp8_blocks.block_maxima(box, start, shape)
        scales = fp8_blocks.scales_of(maxima, "float32")
        return maxima, scales, fp8_blocks.quantized_box(box, start, scales).view(torch.uint8)

    for ours, theirs in zip(made(box.cuda()), made(box), strict=True):
        assert torch.equal(ours.cpu(), theirs)
