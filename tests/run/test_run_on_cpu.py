"""placement.device=cpu hides the GPUs of its node from whatever a run starts. Nothing is started here: Ray would be the first."""

import os
from contextlib import contextmanager

import pytest
from whole_runs import train

from moerl import run
from moerl.types.errors import MoerlError


@pytest.mark.parametrize(("device", "seen"), [("cpu", ""), ("auto", "0,1")])
def test_what_a_run_starts_sees_the_gpus_unless_it_is_on_cpu(device, seen, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    @contextmanager
    def looking(_):
        raise MoerlError(f"Ray would see {os.environ['CUDA_VISIBLE_DEVICES']!r}")
        yield

    monkeypatch.setattr(run, "local_ray", looking)
    with pytest.raises(MoerlError, match=f"Ray would see '{seen}'"):
        train(tmp_path, f"placement.device={device}")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
