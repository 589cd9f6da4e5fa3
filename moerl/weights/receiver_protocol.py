"""Server's side of a weight push: the verbs that the driver calls. Imports no torch."""

from typing import Protocol

from moerl.types.push import Manifest, Needs, TransportOffer


class WeightSink(Protocol):
    """Steps of a push up to the bytes that lie in the model.

    Every method raises WeightError with the engine's own reason; the engine is then STALE."""

    async def needs(self) -> Needs:
        """Tensors that a push must bring to each of its model processes: all but the experts that others of them have."""

    async def connect(self, offer: TransportOffer) -> None: ...

    async def begin(self, manifest: Manifest) -> None:
        """Refuses a manifest that does not name exactly the model's tensors, shapes and dtypes. From here on the engine is STALE."""

    async def install(self) -> None:
        """Returns when its processes have fetched the buckets of the offer, copied them into the model, and compared digests of the
        *installed* bytes."""


class WeightReceiver(WeightSink, Protocol):
    """A server, as the driver sees it: rollout/server/client.py sends each verb over HTTP (wire.py, app.py) and ServerState answers it;
    in the processes that hold the model, WeightSession does."""

    async def finish(self, version: int, push_id: str) -> None:
        """Every tensor that a process needs must have been installed once; then the engine serves `version`, and every completion says
        with which `push_id` its weights came: a nonce of this push to this receiver."""
