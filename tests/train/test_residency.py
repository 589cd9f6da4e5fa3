"""The state machine of a trainer's memory: which calls are legal when, what is on the device then, what is measured."""

import asyncio
from itertools import pairwise
from typing import get_args

import pytest
from awake import awake
from fake_group import FakeTrainGroup
from hypothesis import given
from hypothesis import strategies as st

from moerl.algorithms.mini_batch_loss import SUPERVISED
from moerl.train.batching.build_batch import sft_batch
from moerl.train.memory.memory_states import KINDS, ON_DEVICE, Bytes, Call, MemoryStates, Offload
from moerl.types.errors import ResidencyError
from moerl.types.push import TensorSpec

CALLS = get_args(Call)
STATE_OF = dict.fromkeys(("logprobs", "reference_logprobs", "values", "export"), "scoring")
STATE_OF |= dict.fromkeys(("update", "save", "load"), "training")


class Places:
    """Moves kinds as told and remembers the moves."""

    def __init__(self, offload):
        self.offload, self.moves, self.on_device = offload, [], set(KINDS)

    def move(self, before, after):
        self.moves.append((before, after))
        self.on_device = set(ON_DEVICE[self.offload][after])

    def measure(self):
        return {kind: Bytes(device=10 * (kind in self.on_device), host=10 * (kind not in self.on_device)) for kind in KINDS}


def machine(offload):
    places = Places(offload)
    return places, MemoryStates(offload, places.move, places.measure)


@given(st.sampled_from(get_args(Offload)), st.lists(st.sampled_from(["wake", "shed", "sleep", *CALLS])))
def test_whatever_is_called_in_whatever_order_legal_calls_find_what_they_need_and_others_change_nothing(offload, calls):
    places, residency = machine(offload)
    for call in calls:
        before, legal = residency.state, call in residency.legal_calls()
        assert legal == ((before == "asleep") == (call == "wake"))
        if not legal:
            with pytest.raises(ResidencyError, match=f"^{call}: the trainer is {before}; legal now: {', '.join(residency.legal_calls())}$"):
                getattr(residency, call)() if call in ("wake", "shed", "sleep") else residency.running(call).__enter__()
            assert residency.state == before
        elif call in STATE_OF:
            with residency.running(call):
                assert residency.state == STATE_OF[call]
                assert places.on_device == ON_DEVICE[offload][residency.state]
                assert {"parameters"} <= places.on_device
                assert STATE_OF[call] == "scoring" or places.on_device == set(KINDS)
        else:
            held = sum(each.device for each in places.measure().values())
            num_bytes = getattr(residency, call)()
            assert residency.state == {"wake": "scoring", "shed": "scoring", "sleep": "asleep"}[call]
            assert abs(sum(each.device for each in places.measure().values()) - held) == num_bytes
        assert places.on_device == ON_DEVICE[offload][residency.state]
    assert all(first[1] == second[0] or offload != "all" for first, second in pairwise(places.moves))


def test_what_is_asleep_at_each_level():
    assert ON_DEVICE["none"]["asleep"] == set(KINDS)
    assert ON_DEVICE["optimizer"]["asleep"] == {"parameters", "reference"}
    assert ON_DEVICE["all"]["asleep"] == set()


def test_nothing_moves_where_nothing_is_offloaded():
    places, residency = machine("none")
    residency.sleep()
    residency.wake()
    with residency.running("update"):
        pass
    assert places.moves == []
    assert residency.stats().transition_seconds == {}


def test_no_call_begins_while_another_runs_and_one_that_fails_has_ended():
    _, residency = machine("all")
    with pytest.raises(ZeroDivisionError), residency.running("export"):
        for call in ("sleep", "wake"):
            with pytest.raises(ResidencyError, match=f"^{call}: the trainer is scoring, running export; no call is legal before"):
                getattr(residency, call)()
        with pytest.raises(ResidencyError, match="^update: the trainer is scoring, running export"), residency.running("update"):
            pass
        _ = 1 / 0
    residency.sleep()


def test_statistics_hold_the_bytes_of_every_state_and_the_seconds_since_the_last_ones():
    _, residency = machine("all")
    residency.sleep()
    residency.wake()
    with residency.running("update"):
        stats = residency.stats()
    assert {state: sum(kinds.values()) for state, kinds in stats.device_bytes.items()} == {"asleep": 0, "scoring": 20, "training": 40}
    assert stats.host_bytes == dict.fromkeys(KINDS, 0)
    assert stats.transition_seconds.keys() == {"training_to_asleep", "asleep_to_scoring", "scoring_to_training"}
    residency.sleep()
    assert residency.stats().transition_seconds.keys() == {"training_to_asleep"}


def test_a_trainer_without_a_model_refuses_the_same_calls(tmp_path):
    spec = TensorSpec(name="weight", shape=(2,), dtype="float32")
    group = FakeTrainGroup(vocab_size=10, tensors=(spec,), checkpoint_dir=tmp_path)
    batch = sft_batch([((1, 2), (3,))])

    async def scenario():
        async with awake(group):
            await group.update(batch, SUPERVISED, lr=1e-3)
            await group.save(1, {})
        for call in (group.update(batch, SUPERVISED, lr=1e-3), group.logprobs(batch), group.save(2, {}), group.load()):
            with pytest.raises(ResidencyError, match="the trainer is asleep; legal now: wake"):
                await call
        async with awake(group):
            assert await group.load() == (1, {"version": 1})

    asyncio.run(scenario())
