"""CPU seconds of commands and of tests: of whole process trees, orphans included."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_cost import new_counter
from ratchet import Ratchet

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "cpu_cost.py"

BURN = """
import os, time

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def burn_as_orphan(seconds):
    \"\"\"A daemon: it has a session of its own and its parent ends at once.\"\"\"
    done, end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            burn(seconds)
        os._exit(0)
    os.close(end)
    os.wait()
    os.read(done, 1)  # until the last that could write has ended
    os.close(done)

def burn_as_child(seconds):
    done, end = os.pipe()
    if os.fork() == 0:
        burn(seconds)
        os._exit(0)
    os.close(end)
    os.read(done, 1)
"""

TINY = (
    BURN
    + """
import pytest

@pytest.fixture(scope="module")
def shared():
    burn(0.3)
    yield
    burn(0.3)

@pytest.fixture
def own():
    burn(0.2)

def test_leaves_an_orphan():
    burn_as_orphan(0.5)

def test_asks_first(shared, own): ...

@pytest.mark.parametrize("case", [1, 2])
def test_asks_later(shared, case): ...
"""
)


def available(kind: str) -> str:
    try:
        new_counter(kind).close()
    except OSError as error:
        pytest.skip(str(error))
    return kind


@pytest.fixture(params=["cgroup2", "cgroup1", "subreaper"])
def kind(request: pytest.FixtureRequest) -> str:
    return "subreaper" if request.param == "subreaper" else available(request.param)


def measured(*command: str, counter: str = "auto", stdin: int = subprocess.DEVNULL) -> tuple[int, str]:
    tool = [sys.executable, TOOL, "--counter", counter, "--", *command]
    done = subprocess.run(tool, stdin=stdin, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines()[-1]


def test_seconds_of_a_command_include_those_of_an_orphan_that_has_ended(kind):
    code, line = measured(sys.executable, "-c", f"{BURN}\nburn(0.2)\nburn_as_orphan(0.4)\nraise SystemExit(3)", counter=kind)
    assert code == 3
    assert f"({kind})" in line
    assert 0.55 < float(line.split()[1]) < 1.5


STAYS = """
burnt, end = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.close(2)  # the test reads it to its end
    burn(0.4)
    os.write(end, b"x")
    os.read(0, 1)  # until the test closes it
    os._exit(0)
os.read(burnt, 1)
"""


def test_seconds_of_a_command_include_those_of_an_orphan_that_still_runs(kind):
    stdin, end = os.pipe()
    code, line = measured(sys.executable, "-c", BURN + STAYS, counter=kind, stdin=stdin)
    os.close(stdin)
    os.close(end)
    assert (code, "1 processes still run" in line) == (0, True), line
    assert 0.35 < float(line.split()[1]) < 1.5


def test_seconds_of_a_child_that_nobody_waits_for_are_counted(kind):
    """Its parent ignores SIGCHLD, so its times are added to nobody's; a subreaper that looks four times a second misses the end."""
    script = f"{BURN}\nimport signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nburn_as_child(1)"
    code, line = measured(sys.executable, "-c", script, counter=kind)
    assert code == 0
    assert 0.6 < float(line.split()[1]) < 2


@pytest.mark.parametrize(("command", "status"), [(["sh", "-c", "kill -9 $$"], 137), (["/no/such/command"], 127)])
def test_the_status_is_the_command_s_also_when_it_did_not_end_by_itself(command, status):
    assert measured(*command)[0] == status


def counted(directory: Path, *options: str, limits: str = "") -> tuple[subprocess.CompletedProcess, dict]:
    """A run of the tiny tests with the plugin, and the file that it wrote."""
    tests = directory / "tests"
    tests.mkdir()
    (tests / "test_tiny.py").write_text(TINY)
    if limits:
        (tests / "costly.toml").write_text(limits)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(directory), "-c", os.devnull, "-p", "no:cacheprovider", "-p", "costs"]
    path = os.pathsep.join([str(TOOL.parent), str(Path(__file__).parent)])
    env = os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "--costs=tiny", *options, str(tests)], cwd=directory, env=env, capture_output=True, text=True, timeout=120
    )
    return done, json.loads((directory / "build" / "costs" / "tiny.json").read_text())


XDIST = ["-p", "xdist", "-n", "2", "--dist", "loadfile"]


@pytest.mark.parametrize("options", [[], XDIST, [*XDIST, "--costs-counter=subreaper"]], ids=" ".join)
def test_a_test_is_charged_its_orphans_and_shared_fixtures_are_listed_apart(tmp_path, options):
    done, report = counted(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = {name.partition("::")[2]: sum(phases.values()) for name, phases in report["tests"].items()}
    assert set(tests) == {"test_leaves_an_orphan", "test_asks_first", "test_asks_later[1]", "test_asks_later[2]"}
    assert 0.45 < tests["test_leaves_an_orphan"] < 1
    assert report["tests"]["tests/test_tiny.py::test_asks_first"]["setup"] == pytest.approx(tests["test_asks_first"], abs=0.1)
    assert 0.15 < tests["test_asks_first"] < 0.45, "its own fixture alone"
    assert tests["test_asks_later[1]"] + tests["test_asks_later[2]"] < 0.3, "no part of the shared fixture's teardown"
    shared = report["fixtures"]["tests/test_tiny.py::shared"]
    assert 0.55 < shared["cpu_seconds"] < 1.2
    assert (shared["scope"], shared["setups"]) == ("module", 1)
    assert report["cpu_seconds"] > sum(tests.values()) + shared["cpu_seconds"]
    lines = done.stdout.splitlines()
    # Lines of figures, without what Python 3.12 warns of: a fork beside threads.
    dearest = [line.split("::")[1] for line in lines if re.match(r" +\d.*::test", line)]
    assert dearest[:2] == ["test_leaves_an_orphan", "test_asks_first"]


def test_a_dear_test_without_a_reason_and_a_reason_without_a_test_fail_the_run(tmp_path):
    limits = """
[limits]
named_above_cpu_seconds = 0.1
refused_above_cpu_seconds = 0.35
[tests]
"tests/test_tiny.py::test_asks_later" = "cheap by now"
"tests/test_tiny.py::test_renamed" = "gone"
"tests/test_tiny.py::test_asks_later[3]" = "a case that is gone"
[fixtures]
"tests/test_tiny.py::shared" = "waits in vain"
"""
    done, report = counted(tmp_path, limits=limits)
    assert done.returncode == 1
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3, done.stdout
    assert report["failures"] == [line.removeprefix("error: ") for line in errors]
    assert "test_leaves_an_orphan: 1 CPU seconds and no reason in tests/costly.toml" in errors[0].replace(" 0 CPU", " 1 CPU")
    assert "test_asks_later[3]: there is no such test" in errors[1]
    assert "test_renamed: there is no such test" in errors[2]
    assert "warning: tests/test_tiny.py::test_asks_first" in done.stdout


def test_limits_leave_room_for_a_busy_machine_and_a_reason_covers_every_case():
    ratchet = Ratchet(45, 60, tests={"t.py::named": "why", "t.py::one[a]": "why"})
    seconds = {"t.py::named[x]": 90.0, "t.py::one[a]": 90.0, "t.py::one[b]": 61.0, "t.py::new": 59.0, "t.py::cheap": 44.0}
    verdict = ratchet.judge(seconds)
    assert [line.split(":")[2] for line in verdict.failures] == ["one[b]"]
    assert [line.split(":")[2] for line in verdict.warnings] == ["new"]
    assert "t.py::one[b]: 61 CPU seconds and no reason in tests/costly.toml [tests] (limit 60)" in verdict.failures[0]


def test_an_entry_that_has_become_cheap_is_named():
    assert "can go" in Ratchet(45, 60, tests={"t.py::a": "why"}).judge({"t.py::a": 20.0}).warnings[0]
