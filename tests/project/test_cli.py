"""The command line as a person meets it: output, exit codes, and that checking loads no torch."""

import os
import subprocess
import sys

import pytest
import yaml

from moerl.config.load import build, load
from moerl.types.errors import CheckpointError
from moerl.types.system_errors import told_of_system

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"


@pytest.mark.parametrize(("words", "code"), [((), 0), (("num_stesp=7",), 2)])
def test_a_process_ends_with_the_exit_code(words, code):
    done = subprocess.run([sys.executable, "-m", "moerl", "check", DEMO, *words], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "num_steps" in (done.stderr if code else done.stdout)) == (code, True)


def test_check_prints_every_setting_as_yaml_that_can_be_read_again(moerl):
    done = moerl("check", DEMO, "num_steps=7")
    assert (done.returncode, done.stderr) == (0, "")
    assert build(yaml.safe_load(done.stdout)) == load([DEMO, "num_steps=7"])
    assert "# train ranks     2: data parallel 2, expert data parallel 1" in done.stdout
    assert "32 prompts * 8 = 256 samples" in done.stdout


def test_check_of_a_wrong_configuration_prints_every_problem_and_exits_2(moerl):
    done = moerl("check", DEMO, "num_stesp=7", "data.task=no")
    assert (done.returncode, done.stdout) == (2, "")
    assert "2 problems in the configuration" in done.stderr
    assert "did you mean num_steps?" in done.stderr
    assert "Traceback" not in done.stderr


def test_problems_of_settings_data_and_reward_come_together(moerl):
    done = moerl(
        "check", DEMO, "~data", "data={kind:files,files:[gone.jsonl],max_prompt_tokens:16}", "group_size=1", "reward.terms.x.kind=format"
    )
    assert done.returncode == 2
    assert "3 problems in the configuration" in done.stderr
    assert [path in done.stderr for path in ("* group_size =", "* data.files.0 =", "* reward.terms.x.pattern =")] == [True] * 3


def test_explain_prints_a_setting_and_exits_2_for_one_that_is_none(moerl):
    done = moerl("explain", "train.layout.tp")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "train.layout.tp")
    done = moerl("explain", "train.layuot")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean train.layout?" in done.stderr


@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_verb_without_a_recipe_lists_the_recipes(moerl, verb: str):
    done = moerl(verb)
    assert done.returncode == 2
    assert "grpo-tiny-moe-1n2g-sync" in done.stderr


def test_no_verb_prints_the_help(moerl):
    done = moerl()
    assert (done.returncode, "train" in done.stderr, "check" in done.stderr) == (2, True, True)


@pytest.mark.parametrize("words", [("end", ".", "--seconds"), ("doctor", "--deadline")])
def test_seconds_without_an_end_are_refused(moerl, words):
    """They ended in OverflowError: of `end`, after the run had been asked."""
    done = moerl(*words, "inf")
    assert done.returncode == 2
    assert f"Invalid value for '{words[-1]}': Input should be less than or equal to 1000000" in done.stderr


def test_recipes_of_an_own_directory_are_found(moerl, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\ndefaults: [grpo-tiny-moe-1n2g-sync, _self_]\nname: mine\n")
    done = moerl("check", "--config-dir", str(tmp_path), "recipe=mine")
    assert done.returncode == 0
    assert "\nname: mine\n" in done.stdout


def test_a_report_of_a_directory_that_is_no_run_is_an_error_without_a_traceback(moerl, tmp_path):
    done = moerl("report", str(tmp_path))
    assert done.returncode == 1
    assert "metrics.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_machine_that_refuses_memory_or_files_is_told_in_one_message_with_exit_code_76(is_wrapped):
    """Where an import fails by it too, as numpy wraps what its modules raise."""
    program = (
        "import resource, sys\n"
        "import moerl.__main__ as command\n"
        f"wraps = {is_wrapped}\n"
        "def verb(**_):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "    try:\n"
        "        import socket; socket.socketpair()\n"
        "    except OSError as error:\n"
        "        if not wraps: raise\n"
        "        raise ImportError('a module of C') from error\n"
        "import traceback, socket; from moerl.types import errors\n"  # no file can be opened afterwards
        "command.app = verb\n"
        "command.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 76
    assert done.stderr.startswith("moerl: ImportError: a module" if is_wrapped else "moerl: OSError: [Errno 24] Too many open files\n  at ")
    assert "Traceback" not in done.stderr


def test_check_loads_neither_torch_nor_megatron_nor_ray():
    """Neither of a model from scratch nor of a published one, whose family's rules are checked too."""
    code = (
        "import sys; from moerl.__main__ import app\n"
        f"app(['check', '{DEMO}'], standalone_mode=False)\n"
        "app(['check', 'recipe=grpo-glm-4.5-8n8g-sync'], standalone_mode=False)\n"
        "app(['explain', 'train.layout'], standalone_mode=False)\n"
        "print('loaded:', {'torch', 'megatron', 'ray', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.endswith("loaded: set()\n")


def test_plan_prints_what_a_push_moves(moerl):
    done = moerl("plan", DEMO, "--servers", "2", "--gpus-per-server", "4", "--gpus-per-node", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "rollout          2 servers of 4 GPUs on 2 nodes" in done.stdout
    assert "bound " in done.stdout


def test_plan_of_a_fleet_that_cannot_hold_the_model_says_every_reason(moerl):
    done = moerl("plan", DEMO, "--gpus-per-server", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "* --gpus-per-server = 3: must divide the model's 8 experts" in done.stderr
    assert "* --gpus-per-node = 8: must divide --gpus-per-server=3" in done.stderr


def test_an_error_that_is_told_already_keeps_its_text_and_code_whatever_it_quotes():
    error = CheckpointError("a rank failed: Error while serializing: I/O error: No space left on device (os error 28)")
    assert told_of_system(error) is error


CLOSED = """
import os
from moerl.__main__ import _open_standard_streams

_open_standard_streams()
assert min(os.pipe()) > 2
print("heard", flush=True)
"""


def test_what_the_terminals_encoding_lacks_is_printed_as_its_escape():
    code = "from moerl.__main__ import _open_standard_streams; _open_standard_streams(); print('0.5 \u00b1 0.1')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("0.5 \\xb1 0.1\n", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_command_runs_where_its_caller_has_closed_a_standard_stream(closed):
    for words in ("-m moerl explain num_steps", '-c "$1"'):
        done = subprocess.run(["sh", "-c", f'"$0" {words} {closed}', sys.executable, CLOSED], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
