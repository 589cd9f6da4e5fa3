"""What of finished samples is alive in a run, and when: payloads fill the object store as long as the driver refers to them."""

import asyncio
import gc
import weakref

import pytest
from in_process_run import InProcessRun, make_config


class Reference:
    """As InStore: the payload is there as long as this is."""

    def __init__(self, payload):
        self._payload = payload

    def get(self):
        return self._payload


class Forgetful(dict):
    """In place of the groups that the test's observer would keep."""

    def __setitem__(self, version, groups):
        pass


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_samples_of_a_trained_step_are_gone_when_the_first_of_a_new_one_arrives(tmp_path, max_staleness):
    alive, counts, num_kept = weakref.WeakSet(), [], [0]

    config = make_config(tmp_path, max_staleness=max_staleness, num_steps=4)
    of_a_step = config.groups_per_step * config.group_size

    def keep(payload):
        if num_kept[0] % of_a_step == 0:
            gc.collect()
            counts.append(len(alive))
        num_kept[0] += 1
        reference = Reference(payload)
        alive.add(reference)
        return reference

    run = InProcessRun(config, keep=keep)
    run.groups = Forgetful()
    asyncio.run(run.play())
    assert len(counts) >= 4
    assert max(counts) < (max_staleness + 1) * of_a_step
    if max_staleness == 0:
        assert counts == [0] * 4
