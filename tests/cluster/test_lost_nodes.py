"""Lost nodes: remembered over the tries of a job, up to a number; and what its script makes of them, with stand-ins for Slurm."""

import shlex
import subprocess
from pathlib import Path

import pytest

from moerl.config.load import load
from moerl.slurm.job_node import lost_file, mark_again, remember
from moerl.slurm.job_script import render_train

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"


def test_nodes_are_remembered_once_and_up_to_a_number(tmp_path: Path):
    file = tmp_path / "lost"
    assert remember(file, "n3", at_most=2) == "n3 is to be excluded (1 of slurm.max_excluded = 2)"
    assert remember(file, "n3", at_most=2) == "n3 was lost before"
    assert remember(file, "n1", at_most=2) == "n1 is to be excluded (2 of slurm.max_excluded = 2)"
    assert remember(file, "n7", at_most=2) == "n7 is not excluded, beside n3, n1: slurm.max_excluded = 2"
    assert file.read_text() == "n3\nn1\n"


def test_none_are_excluded_where_none_may_be(tmp_path: Path):
    assert remember(tmp_path / "lost", "n3", at_most=0) == "n3 is not excluded: slurm.max_excluded = 0"
    assert not (tmp_path / "lost").exists()


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path):
    assert "cannot be written (No such file or directory)" in remember(tmp_path / "none" / "lost", "n3", at_most=1)


def test_the_marks_are_where_the_script_looks(tmp_path: Path):
    mark_again(tmp_path / ".moerl-7")
    assert (tmp_path / ".moerl-7.again").exists()
    assert lost_file(tmp_path / ".moerl-7") == tmp_path / ".moerl-7.lost"
    mark_again(tmp_path / "none" / "x")  # said in the log


class Script:
    """The job's script with stand-ins for srun, squeue, sinfo, sleep and scontrol; the last writes down what it is asked to change."""

    def __init__(
        self, directory: Path, *, nodes: list[str], excluded: str = "(null)", required: str = "(null)", array: str = "", restarts: int = 0
    ):  # fmt: skip
        """`nodes`: that answer; NAME STATE of those that are not idle. `array`: what Slurm says of a task of one."""
        self.directory, self.is_array = directory, bool(array)
        shown = f"JobId=7 {array}JobName=x Restarts={restarts} ReqNodeList={required} ExcNodeList={excluded} NodeList=n0"
        answering = shlex.join(node if " " in node else f"{node} idle" for node in nodes)
        hostnames = f"{{ echo '{excluded}' | tr , '\\n'; }}"
        programs = {
            "srun": 'for word; do case "$word" in --marks=*) file="${word#*=}.lost" ;; esac; done; . ./step',
            "squeue": 'case "$*" in *"--noheader --jobs=7 "*) printf "%s" "$ALL" ;; esac; echo RUNNING',
            "sleep": "",
            "sinfo": f"printf '%s\\n' {answering}",
            "scontrol": f'case "$1 $2" in "show job") echo "{shown}" ;; "show hostnames") {hostnames} ;; *) echo "$@" >> asked ;; esac',
        }
        for name, body in programs.items():
            (directory / name).write_text(f"#!/bin/sh\n{body}\n")
            (directory / name).chmod(0o755)

    def run(self, step: str) -> "subprocess.CompletedProcess[str]":
        """`step`: shell lines of the step; $file is where lost nodes are written."""
        (self.directory / "step").write_text(step)
        slurm = {"SLURM_JOB_ID": "7", "ALL": "RUNNING\n" if self.is_array else "", "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_NUM_NODES": "2"}
        environment = {"PATH": f"{self.directory}:/usr/bin:/bin", **slurm}
        script = render_train(load((DEMO,)), (DEMO,))
        return subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, env=environment, cwd=self.directory)

    @property
    def asked(self) -> list[str]:
        return (self.directory / "asked").read_text().splitlines()


def test_a_lost_node_is_excluded_once_the_job_waits_again(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"])
    done = script.run('echo n1 >> "$file"; exit 203')
    assert done.returncode == 203
    assert script.asked == ["requeue 7", "update JobId=7 ExcNodeList=n1"]
    assert done.stderr == "excluded from now on: n1\n"


def test_what_was_excluded_before_stays_so(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2", "n3", "n4"], excluded="n3,n4")
    script.run('printf "n1\\n" >> "$file"; exit 203')
    assert script.asked[-1] == "update JobId=7 ExcNodeList=n3,n4,n1"


@pytest.mark.parametrize(("excluded", "nodes"), [("(null)", ["n0", "n1"]), ("n2", ["n0", "n1", "n2"])])
def test_a_node_that_cannot_be_spared_is_not_excluded(tmp_path: Path, excluded: str, nodes: list[str]):
    script = Script(tmp_path, nodes=nodes, excluded=excluded)
    done = script.run('echo n1 >> "$file"; exit 203')
    assert script.asked == ["requeue 7"]
    assert done.stderr == "n1 not excluded: 1 nodes of the partition would be left, and the job needs 2\n"


@pytest.mark.parametrize("state", ["drain", "drng", "maint", "resv", "down*"])
def test_a_node_that_takes_no_jobs_is_none_to_go_to(tmp_path: Path, state: str):
    script = Script(tmp_path, nodes=["n0 comp", "n1", f"n2 {state}"])
    done = script.run('echo n1 >> "$file"; exit 203')
    assert script.asked == ["requeue 7"]
    assert "n1 not excluded: 1 nodes of the partition would be left" in done.stderr


@pytest.mark.parametrize("state", ["alloc", "mix-", "idle~", "plnd"])
def test_a_node_that_is_busy_or_asleep_is_one_to_wait_for(tmp_path: Path, state: str):
    script = Script(tmp_path, nodes=["n0 comp", "n1", f"n2 {state}"])
    script.run('echo n1 >> "$file"; exit 203')
    assert script.asked[-1] == "update JobId=7 ExcNodeList=n1"


def test_a_job_that_asks_for_nodes_by_name_keeps_them_all(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"], required="n[0-1]")
    done = script.run('echo n1 >> "$file"; exit 203')
    assert script.asked == ["requeue 7"]
    assert done.stderr == "n1 not excluded: the job asks for nodes by name\n"


def test_a_try_that_lost_none_changes_nothing_and_the_end_removes_the_file(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"])
    script.run("exit 203")
    assert script.asked == ["requeue 7"]
    script.run('echo n1 >> "$file"; exit 203')
    assert (tmp_path / ".moerl-7.lost").exists(), "the next try goes on from it"
    script.run("exit 0")
    assert not (tmp_path / ".moerl-7.lost").exists()


def test_a_job_whose_killed_task_hides_the_first_nodes_exit_code_is_queued_again(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"])
    done = script.run('echo n1 >> "$file"; touch "${file%.lost}.again"; exit 137')
    assert (done.returncode, script.asked) == (137, ["requeue 7", "update JobId=7 ExcNodeList=n1"])
    done = script.run("exit 137")
    assert len(script.asked) == 2, "the word of an earlier try does not count"
    assert not list(tmp_path.glob(".moerl-*"))


def test_the_last_task_of_an_array_which_has_the_arrays_number_is_queued_again_alone(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"], array="ArrayJobId=7 ArrayTaskId=2 ")
    script.run('echo n1 >> "$file"; exit 203')
    assert script.asked == ["requeue 7_2", "update JobId=7_2 ExcNodeList=n1"]


def test_a_job_waits_for_a_controller_that_is_starting_to_be_queued_again(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"])
    for name in ("squeue", "scontrol"):
        there = (tmp_path / name).read_text().removeprefix("#!/bin/sh\n")
        refused = f"echo x >> {name}.tries; [ $(wc -l < {name}.tries) -gt 4 ] || {{ echo 'Unable to contact' >&2; exit 1; }}"
        (tmp_path / name).write_text(f"#!/bin/sh\n{refused}\n{there}")
    done = script.run("exit 203")
    assert (done.returncode, script.asked) == (203, ["requeue 7"]), done.stderr


def test_a_job_does_not_wait_for_ever_for_a_controller(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"])
    (tmp_path / "squeue").write_text("#!/bin/sh\necho x >> tries\nexit 1\n")
    assert script.run("exit 203").returncode == 203
    assert len((tmp_path / "tries").read_text().split()) == 30


def test_a_job_that_is_cancelled_while_it_waits_for_a_controller_is_not_queued_again(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"])
    (tmp_path / "scontrol").write_text("#!/bin/sh\n[ $1 != requeue ] || { touch refused; exit 1; }\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho x >> tries; if [ -e refused ]; then echo COMPLETING; else echo RUNNING; fi\n")
    assert script.run("exit 203").returncode == 203
    assert len((tmp_path / "tries").read_text().split()) == 2


def test_a_job_without_the_commands_of_slurm_ends_at_once(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"])
    (tmp_path / "squeue").write_text("#!/bin/sh\necho x >> tries\nexit 127\n")
    assert script.run("exit 203").returncode == 203
    assert len((tmp_path / "tries").read_text().split()) == 1


def test_a_job_that_is_asked_to_end_before_its_node_listens_is_queued_again_once(tmp_path: Path):
    script = Script(tmp_path, nodes=["n0", "n1", "n2"])
    done = script.run("exit 138")
    assert (done.returncode, script.asked) == (138, ["requeue 7"])
    Script(tmp_path, nodes=["n0", "n1", "n2"], restarts=1).run("exit 138")
    assert script.asked == ["requeue 7"], "a job whose time is always over by then would come back for ever"
