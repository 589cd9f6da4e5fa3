"""The steps of a push in the process that holds an engine's model. They come through the engine's own channel, as a name and the JSON of
moerl.rollout.server.wire."""

from dataclasses import replace

from moerl.rollout.server import wire
from moerl.weights.receive import WeightSession


def run_step(session: WeightSession, step: str, body: str, *, process: int) -> None:
    """`step`: connect, begin, install or finish. `process`: number of this one among those of its server that hold parts of the model."""
    if step == "connect":
        offer = wire.OFFER.validate_json(body)
        session.connect(replace(offer, reader=offer.reader + process))
    elif step == "begin":
        session.begin(wire.MANIFEST.validate_json(body))
    elif step == "install":
        session.install()
    else:
        session.finish(wire.FINISH.validate_json(body).version)
