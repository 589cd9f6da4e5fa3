"""`import moerl` in a program: load, check and plan without a process, and what importing it and asking for help load. Training and
evaluating through it: tests/run/test_run_evaluation.py and test_run_wheel.py."""

import asyncio
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import hydra
import numpy
import pytest
from ray import cloudpickle

import moerl
from moerl import run_stop
from moerl.cluster.forks.local_ray import local_ray
from moerl.types.exit_codes import ExitCode

DEMO = "grpo-tiny-moe-1n2g-sync"
HEAVY = {"numpy", "pydantic", "rich", "hydra", "omegaconf", "yaml", "torch", "ray", "transformers", "asyncio"}
ROOT = Path(moerl.__file__).resolve().parents[1]


def test_load_gives_the_settings_and_refuses_all_that_is_wrong():
    assert moerl.load(DEMO, "num_steps=7").num_steps == 7
    with pytest.raises(moerl.ConfigError, match="2 problems") as refused:
        moerl.load(DEMO, "num_stesp=7", "group_size=-1")
    assert {problem.path for problem in refused.value.problems} == {"num_stesp", "group_size"}


def test_recipes_of_an_own_directory_are_loaded(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\ndefaults: [{DEMO}, _self_]\nname: mine\n")
    assert moerl.load("mine", config_dir=tmp_path).name == "mine"
    assert moerl.check("mine", config_dir=str(tmp_path)) == []


def test_threads_load_at_once_and_each_gets_its_own(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}" / "recipe").mkdir(parents=True)
        recipe = f"# @package _global_\ndefaults: [{DEMO}, _self_]\nname: mine{number}\n"
        (tmp_path / f"{number}" / "recipe" / "mine.yaml").write_text(recipe)
    with ThreadPoolExecutor(4) as threads:
        loaded = threads.map(lambda seed: moerl.load("mine", f"seed={seed}", config_dir=tmp_path / f"{seed % 2}"), range(16))
        assert [(config.name, config.seed) for config in loaded] == [(f"mine{seed % 2}", seed) for seed in range(16)]


def test_a_program_of_hydras_loads_a_recipe_and_stays_hydras(tmp_path):
    (tmp_path / "program.yaml").write_text("mine: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        assert moerl.load(DEMO).name == DEMO
        assert hydra.compose("program") == {"mine": 1}


def test_check_says_what_train_would_refuse_of_a_recipe_and_of_an_object():
    config = moerl.load(DEMO)
    assert moerl.check(config) == moerl.check(DEMO) == []
    assert [problem.path for problem in moerl.check(DEMO, "group_size=1", "data.task=no")] == ["data.task"]
    assert [problem.path for problem in moerl.check(replace(config, num_steps="7"))] == ["num_steps"]
    assert "model.path" in [problem.path for problem in moerl.check("grpo-deepseek-v3-32n8g-sync")]


@pytest.mark.parametrize("value", [numpy.int64(3), numpy.float32(2), object(), b"\xff"])
def test_a_value_that_no_file_could_hold_is_a_problem_of_its_setting(value):
    config = replace(moerl.load(DEMO), num_steps=value)
    assert [(problem.path, problem.value) for problem in moerl.check(config)] == [("num_steps", value)]
    with pytest.raises(moerl.ConfigError, match=f"it is of the type {type(value).__name__}"):
        moerl.train(config)


def test_check_names_a_damaged_checkpoint(tmp_path):
    directory = tmp_path / DEMO / "checkpoints" / "step-000001"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text("{")
    (problem,) = moerl.check(DEMO, f"output_dir={tmp_path}")
    assert (problem.path, problem.rule) == ("checkpoints", "must be whole")
    assert str(directory) in problem.value and f"delete {directory}" in problem.fix


def test_train_refuses_what_check_names_before_it_starts_anything(tmp_path):
    config = replace(moerl.load(DEMO), output_dir=str(tmp_path), group_size=0)
    with pytest.raises(moerl.ConfigError, match="group_size = 0"):
        moerl.train(config)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_has_the_numbers_that_the_command_prints():
    planned = moerl.plan(moerl.load(DEMO), servers=2, gpus_per_server=4, gpus_per_node=4)
    assert planned.rollout.num_gpus == 8 and planned.trainer_gpus == 2
    assert 0 < planned.bound_seconds <= planned.schedule_seconds
    assert "rollout          2 servers of 4 GPUs on 2 nodes" in str(planned)
    with pytest.raises(moerl.ConfigError, match="must divide the model's 8 experts"):
        moerl.plan(moerl.load(DEMO), gpus_per_server=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("servers", 0), ("servers", -1), ("servers", 2.5), ("gpus_per_server", 0), ("gpus_per_node", 0), ("bucket_bytes", 0),
        ("bucket_bytes", -5), ("card_gbit", 0), ("card_gbit", math.nan), ("card_gbit", math.inf), ("card_gbit", "400"),
    ],
)  # fmt: skip
def test_a_plan_refuses_numbers_that_none_can_be_made_of(name, value):
    """They ended in ZeroDivisionError or IndexError, or in a plan of buckets of -5 bytes."""
    with pytest.raises(moerl.ConfigError, match=re.escape(f"{name} = {value!r}: must be ")):
        moerl.plan(moerl.load(DEMO), **{name: value})


def test_a_plan_takes_the_numbers_of_numpy():
    config = moerl.load(DEMO)
    found = moerl.plan(config, servers=numpy.int64(2), card_gbit=numpy.float32(200))
    assert str(found) == str(moerl.plan(config, servers=2, card_gbit=200))


@pytest.mark.parametrize("function", [moerl.train, moerl.evaluate, moerl.plan, moerl.memory])
def test_a_recipes_name_where_a_configuration_belongs_is_told_as_that(function):
    with pytest.raises(TypeError, match=re.escape(f"moerl.load({DEMO!r}) makes one of it")):
        function(DEMO)


def test_the_memory_has_the_numbers_that_the_command_prints():
    planned = moerl.memory(moerl.load("grpo-qwen3-235b-16n8g-sync"))
    assert planned.worst.most == max(rank.device(phase) for rank in planned.ranks for phase in rank.phases) < planned.gpu_bytes
    assert f"{planned.worst.most / 2**30:.2f}" in str(planned)


def test_functions_stay_callable_and_modules_stay_modules_when_modules_of_their_names_are_imported():
    import moerl.check
    import moerl.train.group

    assert moerl.check(DEMO) == []
    assert moerl.train.group.TrainGroup
    assert pickle.loads(cloudpickle.dumps((moerl, moerl.train))) == (moerl, moerl.train)
    with pytest.raises(AttributeError, match="trian"):
        _ = moerl.trian


def test_everything_that_is_offered_is_there():
    assert {name for name in moerl.__all__ if not hasattr(moerl, name)} == set()
    assert set(moerl.__all__) <= set(dir(moerl))


@pytest.mark.parametrize("words", [["--help"], ["--version"], None])
def test_import_and_help_and_version_load_nothing_heavy(words):
    call = "import moerl" if words is None else f"from moerl.__main__ import app; app({words!r}, standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", f"{call}; import sys; print(*sys.modules)"], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert loaded & HEAVY == set()
    if words is None:
        assert {name for name in loaded if name.startswith("moerl")} == {"moerl"}
    if words == ["--version"]:
        assert done.stdout.splitlines()[0] == f"moerl {moerl.__version__}"


def test_the_readmes_program_runs(monkeypatch, capsys):
    """All but training and evaluating."""
    asked = []
    monkeypatch.setattr("moerl.api.train", asked.append)
    monkeypatch.setattr("moerl.api.evaluate", asked.append)
    section = (ROOT / "README.md").read_text().partition("\n## In Python\n")[2].partition("\n## ")[0]
    exec("\n".join(line.removeprefix("    ") for line in section.splitlines() if line.startswith("    ")), {})
    assert [config.output_dir for config in asked] == ["elsewhere"] * 2
    assert float(capsys.readouterr().out) > 0


def test_the_readme_has_every_exit_code_that_a_user_meets():
    paragraph = re.search(r"(?s)\nExit codes: .*?\n\n", (ROOT / "README.md").read_text())[0]
    assert {int(code) for code in re.findall(r"(?:^|[ ,:])(\d+) ", paragraph)} == {*ExitCode} - {ExitCode.QUEUE_AGAIN}


def test_a_process_that_is_in_a_ray_cluster_is_told_to_leave_it(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(moerl.MoerlError, match=r"ray\.shutdown\(\) first"), local_ray(60.0):
        pass


# -- a loop that runs already, as a notebook's -----------------------------------------------------------------


def in_a_running_loop(main):
    async def cell():
        return run_stop.run_until_done(main)

    loop = asyncio.new_event_loop()  # asyncio.run would take Ctrl-C for itself, which a notebook does not
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def test_a_run_in_a_running_loop_has_one_of_its_own():
    async def main():
        return asyncio.get_running_loop()

    assert in_a_running_loop(main()).is_closed()


def test_an_error_in_a_running_loop_is_the_callers():
    async def main():
        raise moerl.ConfigError([])

    with pytest.raises(moerl.ConfigError):
        in_a_running_loop(main())


@pytest.fixture
def pythons_own_handler():
    """Tests of other files may have left another, which Ctrl-C then belongs to."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)  # None: one of C's


def test_ctrl_c_in_a_running_loop_waits_for_what_the_run_ends(pythons_own_handler):
    ended = []

    async def main():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(5)
        finally:
            await asyncio.sleep(0.01)
            ended.append("heard" if asyncio.current_task().cancelling() else "slept")

    for _ in range(10):  # one that comes as the waiting thread lies down was not heard, in a quarter of the attempts
        with pytest.raises(KeyboardInterrupt):
            in_a_running_loop(main())
    assert ended == ["heard"] * 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def as_a_command(main):
    return run_stop.run_until_done(main)


def test_signals_are_the_callers_again_when_a_run_has_ended():
    def own(number, frame): ...

    async def main():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)

    before = {number: signal.signal(number, own) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        as_a_command(main())
        assert [signal.getsignal(number) for number in before] == [own, own]
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@pytest.mark.parametrize("run", [as_a_command, in_a_running_loop])
def test_ctrl_c_again_does_not_break_off_what_the_first_one_ends(pythons_own_handler, run):
    ended = []

    async def main():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.1)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_again_is_heard_where_the_first_has_not_reached_the_run(pythons_own_handler):
    heard = []

    async def main():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            heard.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        as_a_command(main())
    assert heard


class Interrupting:
    """Ctrl-C in a destructor, where an exception is printed and forgotten."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_that_meets_a_destructor_is_heard(pythons_own_handler, monkeypatch):
    waited = []

    def wait(futures, timeout):
        if not waited:
            waited.append(Interrupting())
            waited[0] = None
        upstream(futures, timeout=timeout)

    upstream = run_stop.wait
    monkeypatch.setattr(run_stop, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        in_a_running_loop(asyncio.sleep(60))
