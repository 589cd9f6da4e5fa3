"""The steps of a push in the process that holds an engine's model. They come through the engine's own channel, as a name and the JSON of
moerl.rollout.wire."""

from moerl.rollout import wire
from moerl.types import WeightError
from moerl.weights.receive import WeightSession


def run_step(session: WeightSession, step: str, body: str, *, num_workers: int) -> None:
    """`step`: connect, begin, install or finish. `num_workers`: processes of this server that hold parts of the model."""
    if step == "connect":
        offer = wire.OFFER.validate_json(body)
        if offer.transport == "gloo" and num_workers > 1:
            raise WeightError("weights.transport = gloo: reaches one process of a server only; a server with several workers needs shm")
        session.connect(offer)
    elif step == "begin":
        session.begin(wire.MANIFEST.validate_json(body))
    elif step == "install":
        session.install(wire.BUCKET.validate_json(body))
    else:
        session.finish(wire.FINISH.validate_json(body).version)
