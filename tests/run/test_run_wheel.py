"""The wheel as a user has it: installed into an environment of its own, it brings everything it needs and trains from any directory."""

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from whole_runs import SMALL, SYNC, users_environment

ROOT = Path(__file__).resolve().parents[2]

# Not behind `if __name__ == "__main__"`, and with something to clean up: no process of the run may be a copy of this one.
PROGRAM = f"""
import atexit, sys
from pathlib import Path
atexit.register(lambda: Path("ended").open("a").write("once\\n"))
import moerl
config = moerl.load({SYNC!r}, *{[*SMALL, "num_steps=2"]!r})
assert moerl.check(config) == []
print(moerl.train(config))
print(*{{module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "moerl"}})
"""
TYPED = """
# mypy: disallow-any-expr
from pathlib import Path
import moerl

config: moerl.RunConfig = moerl.load("recipe", "num_steps=2", config_dir=".")
problems: list[moerl.Problem] = moerl.check(config)
rules: list[str] = [problem.rule for problem in problems]
report: Path = moerl.train(config, ends_at=1e9)
rewards: list[float] = [result.reward.mean for result in moerl.evaluate(config, checkpoint=report)]
bound: float = moerl.plan(config, servers=2).bound_seconds
steps: str = config.num_steps
moerl.trian(config)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(directory), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (built,) = directory.glob("moerl-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Path:
    """The folder of an environment's programs. It finds moerl's dependencies where this one has them, and moerl in itself alone."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    programs = environment / "bin"
    install = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", "--no-index", "-q", str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    (site,) = environment.glob("lib/python*/site-packages")
    # Its own .pth files, the checkout's among them, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def run(*command: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in users_environment().items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def test_it_holds_every_file_of_the_package_and_every_recipe(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    for folder, target in {"moerl": "moerl", "megatron_patches": "megatron_patches", "configs": "moerl/_configs"}.items():
        files = [file.relative_to(ROOT / folder) for file in (ROOT / folder).rglob("*") if file.is_file()]
        assert {f"{target}/{file}" for file in files if "__pycache__" not in file.parts} <= held
    assert {"moerl/py.typed", "moerl/slurm/job.sbatch.j2", "moerl/observe/report.html.j2"} <= held


def test_moerl_is_nowhere_but_in_the_environment(installed, tmp_path):
    code = "import sys; from importlib.machinery import PathFinder; print(*(PathFinder.find_spec('moerl', [path]) for path in sys.path))"
    origins = re.findall(r"origin='([^']*)'", run(installed / "python", "-c", code, cwd=tmp_path).stdout)
    assert [Path(origin).is_relative_to(installed.parent) for origin in origins] == [True]


def test_its_commands_render_job_scripts_from_its_own_recipes(installed, tmp_path):
    commands = [installed / "moerl"], [installed / "python", "-m", "moerl"]
    scripts = [run(*command, "launch", "recipe=grpo-tiny-moe-1n2g-sync", "--dry-run", cwd=tmp_path) for command in commands]
    assert [(done.returncode, done.stderr, "#SBATCH" in done.stdout) for done in scripts] == [(0, "", True)] * 2


def test_a_program_trains_two_steps_from_another_directory(installed, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(installed / "python", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, report, files = done.stdout.splitlines()
    run_dir = tmp_path / "runs" / SYNC
    assert tmp_path / report == run_dir / "report.html" and (run_dir / "report.html").stat().st_size > 10_000
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert {str(Path(file).is_relative_to(installed.parent)) for file in files.split()} == {"True"}
    assert (tmp_path / "ended").read_text() == "once\n"


def test_its_functions_have_types_for_a_users_checker(installed, tmp_path):
    (tmp_path / "typed.py").write_text(TYPED)
    skipped = "[mypy-torch.*,transformers.*,ray.*,numpy.*,pydantic.*,megatron.*]\nfollow_imports = skip\n"  # 5 s instead of 28
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\n{skipped}")
    mypy = [sys.executable, "-m", "mypy", f"--python-executable={installed / 'python'}", f"--cache-dir={tmp_path}", "typed.py"]
    lines = run(*mypy, cwd=tmp_path).stdout.splitlines()
    assert [line.partition(": ")[2] for line in lines[:-1]] == [
        'error: Incompatible types in assignment (expression has type "int", variable has type "str")  [assignment]',
        'error: Module has no attribute "trian"; maybe "train"?  [attr-defined]',
    ]
