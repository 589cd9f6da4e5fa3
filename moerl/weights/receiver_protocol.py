"""Server's side of a weight push: the verbs that the driver calls, and how an engine's process takes tensors. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moerl.types.push import Manifest, Needs, TransportOffer

if TYPE_CHECKING:
    from torch import Tensor

    from moerl.weights.verify.places import Place, Start


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How tensors get into a model."""

    load: "Callable[[str, Start, Tensor], Sequence[Place] | None]"
    """(name of a tensor in checkpoints, where a piece of it begins, the piece): copies into the model what this process holds of it, and
    returns where that lies, possibly with all else that it holds of the tensor. The piece's memory is the sender's or the network's: it
    must not be kept. A tensor that is taken whole is one piece, in memory that may be kept; None: it is, and is copied later, after which
    WeightSession.verify must be called."""
    takes_whole: Callable[[str], bool] = lambda name: False
    """Whether `load` takes no pieces of a tensor."""
    settle: Callable[[], None] = lambda: None
    """Called when everything has come, before the push is finished."""
