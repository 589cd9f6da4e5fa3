import json

import numpy as np
import pytest

from moerl.observe.dumps import SampleDumps, dumped_steps


@pytest.fixture
def group(make_group, make_sample):
    sample = make_sample(1.0, text="7 7", versions=[(2, 1), (3, 2)], math=1.0)
    return make_group(sample, prompt="say", ground_truth="77", errors=("timed out",))


def test_the_first_the_last_and_every_kth_step_are_dumped(tmp_path, group):
    dumps = SampleDumps(tmp_path, every=3, num_groups=1)
    for step in range(1, 9):
        dumps.step(step, [group])
    assert list(dumped_steps(tmp_path)) == [1, 3, 6]
    dumps.dump_last()
    assert list(dumped_steps(tmp_path)) == [1, 3, 6, 8]


def test_zero_dumps_nothing(tmp_path, group):
    dumps = SampleDumps(tmp_path / "samples", every=0, num_groups=1)
    dumps.step(1, [group])
    dumps.dump_last()
    assert not (tmp_path / "samples").exists()


def test_resuming_removes_dumps_of_steps_that_will_be_trained_again(tmp_path, group):
    dumps = SampleDumps(tmp_path, every=1, num_groups=1)
    for step in range(1, 5):
        dumps.step(step, [group])
    dumps.truncate_after(2)
    assert list(dumped_steps(tmp_path)) == [1, 2]


def test_steps_are_in_the_order_of_numbers_past_six_digits(tmp_path, group):
    dumps = SampleDumps(tmp_path, every=1, num_groups=1)
    for step in (1_000_000, 999_999):
        dumps.step(step, [group])
    assert list(dumped_steps(tmp_path)) == [999_999, 1_000_000]


def test_a_copy_that_somebody_made_of_a_dump_is_left_alone(tmp_path, group):
    """A run that went on ended with it, after its first step."""
    dumps = SampleDumps(tmp_path, every=1, num_groups=1)
    dumps.step(2, [group])
    copy = tmp_path / "step-000002 (copy).jsonl"
    copy.write_bytes((tmp_path / "step-000002.jsonl").read_bytes())
    assert list(dumped_steps(tmp_path)) == [2]
    SampleDumps(tmp_path, every=1, num_groups=1).truncate_after(1)
    assert list(tmp_path.iterdir()) == [copy]


def test_a_dump_says_everything_about_a_sample(tmp_path, group, make_group, make_sample):
    SampleDumps(tmp_path, every=1, num_groups=1).step(10, [group, make_group(make_sample(text="beyond num_groups"))])
    scored, failed = map(json.loads, (tmp_path / "step-000010.jsonl").read_text().splitlines())
    about = {"step": 10, "prompt_index": 0, "data_source": "tiny/repeat", "prompt": "say", "ground_truth": "77"}
    assert scored == {
        **about,
        "request_id": "r",
        "response": "7 7",
        "reward": 1.0,
        "length": 3,
        "finish_reason": "stop",
        "parts": {"math": 1.0},
        "versions": [[2, 1], [3, 2]],
        "error": None,
    }
    assert failed == {
        **about,
        "request_id": None,
        "response": None,
        "reward": None,
        "length": None,
        "finish_reason": None,
        "parts": {},
        "versions": [],
        "error": "timed out",
    }


def test_routes_are_dumped_beside_the_samples_and_go_with_them(tmp_path, make_group, make_sample):
    routes = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    plain, routed = make_sample(), make_sample(name="0-1", routes=routes)
    dumps = SampleDumps(tmp_path, every=1, num_groups=1)
    for step in (1, 2):
        dumps.step(step, [make_group(plain, routed)])
    with np.load(tmp_path / "step-000002.routes.npz") as stored:
        assert list(stored) == ["0-1"]
        np.testing.assert_array_equal(stored["0-1"], routes)
    dumps.truncate_after(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001.jsonl", "step-000001.routes.npz"]
