"""A trainer of one process as the source of a push: it holds every tensor, whole."""

from collections.abc import Callable, Mapping, Sequence

import torch

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.layout import Layout
from moerl.types.push import Transport
from moerl.weights.plan.buckets import Job
from moerl.weights.plan.run_plan import Outline
from moerl.weights.plan.spec_tensors import box_of, spec_of
from moerl.weights.plan.tensor_specs import expert_of
from moerl.weights.plan.transfer_plan import PlannedTensor
from moerl.weights.push_calls import in_thread
from moerl.weights.send import WeightSender


class LocalSource:
    """Implements weights.sync.WeightSource."""

    def __init__(self, tensors: Callable[[], Mapping[str, torch.Tensor]], *, bucket_bytes: int, **sender: object):
        """`tensors` is asked once for every push, when its digests are made. `sender`: options of WeightSender."""
        self._tensors, self._bucket_bytes, self._options = tensors, bucket_bytes, sender
        self._held: Mapping[str, torch.Tensor] = {}
        self._sender: WeightSender | None = None

    @property
    def sender(self) -> WeightSender:
        assert self._sender is not None, "listen comes first"
        return self._sender

    async def outline(self) -> Outline:
        items = self._tensors().items()
        planned = [PlannedTensor(spec=spec_of(*item), stage=0, expert=expert_of(item[0]), cut_dim=None) for item in items]
        return Outline(tensors=planned, layout=Layout(), bucket_bytes=self._bucket_bytes)

    async def listen(self, transport: Transport, jobs: Mapping[int, Job], seconds: float, secret: RunSecret) -> str:
        self.close()
        self._sender = WeightSender(
            transport, jobs[0], self.read, seconds=seconds, secret=secret, **self._options,  # type: ignore[arg-type]
        )  # fmt: skip
        return self.sender.listen(is_first=True)

    async def connect(self, address: str, num_readers: int) -> None:
        await in_thread(self.sender.connect, address, senders=(0,), num_readers=num_readers)

    async def digests(self) -> Mapping[int, Sequence[str]]:
        self._held = self._tensors()
        return {0: self.sender.digests()}

    async def send(self) -> int:
        return await in_thread(self.sender.send)

    async def finish(self) -> None:
        self._held = {}
        self.sender.finish()

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return box_of(self._held[name], start, shape)

    def close(self) -> None:
        """Safe to call twice."""
        if self._sender is not None:
            self._sender.close()
