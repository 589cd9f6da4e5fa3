"""The user's process hands signals to the driver and ends as it did; a driver that ends without a word ends the command with 76."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from moerl.types.exit_codes import ExitCode

# A shell may have started the tests with signals ignored.
HEEDS = "import os, signal, sys, time; [signal.signal(n, signal.SIG_DFL) for n in (1, 2)]; "
BEFORE = HEEDS + "from moerl.cluster import user_process as u; u.fork_driver(); print(os.getpid(), flush=True); "


@pytest.fixture
def start():
    """start(program): the user's process, and the id of the driver's when that has begun, which runs the program."""
    started = []

    def begin(program):
        process = subprocess.Popen([sys.executable, "-c", BEFORE + program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process, int(process.stdout.readline())

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("code", [0, 2, 75, 143])
def test_the_code_that_the_driver_tells_is_the_commands(start, code):
    process, _ = start(f"u.tell_cause('not said'); u.tell_end({code}); sys.exit({code})")
    assert process.communicate(timeout=20)[1] == "" and process.returncode == code


def test_an_end_without_a_word_is_a_kill_and_says_who(start):
    process, driver = start("os._exit(1)")
    said = process.communicate(timeout=20)[1]
    assert said.startswith(f"moerl: Ray ended the driver (process {driver}), as it does when one of its own processes is gone")
    assert process.returncode == ExitCode.KILLED


def test_the_last_cause_that_the_driver_knew_is_what_is_said(start):
    process, _ = start("u.tell_cause('moerl: the raylet (process 7) ended\\nmore: failure.txt'); os._exit(1)")
    assert process.communicate(timeout=20)[1] == "moerl: the raylet (process 7) ended\nmore: failure.txt\n"
    assert process.returncode == ExitCode.KILLED


def test_an_end_while_the_settings_are_read_is_no_kill_and_nothing_of_rays(start):
    """76 would have the command started again, which would end as it did."""
    process, _ = start("c = u.reading_settings(); c.__enter__(); os._exit(3)")
    assert process.communicate(timeout=20)[1].startswith("moerl: the process ended while it read the settings")
    assert process.returncode == ExitCode.FAILED
    process, _ = start("c = u.reading_settings(); c.__enter__(); c.__exit__(None, None, None); os._exit(3)")
    assert "Ray ended the driver" in process.communicate(timeout=20)[1]
    assert process.returncode == ExitCode.KILLED


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGTERM])
def test_a_driver_that_somebody_kills_ends_the_command_with_76(start, number):
    process, driver = start("time.sleep(600)")
    os.kill(driver, number)
    said = process.communicate(timeout=20)[1]
    assert f"the driver (process {driver}) was ended by signal {int(number)}" in said
    assert process.returncode == ExitCode.KILLED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_the_driver_does_not_heed_ends_the_command_by_it(start, number):
    process, driver = start("time.sleep(600)")
    process.send_signal(number)
    assert process.wait(20) == -number
    assert not psutil.pid_exists(driver)


def test_a_terminals_ctrl_c_reaches_the_driver_once(start):
    heeds = "n = []; signal.signal(signal.SIGINT, lambda *_: n.append(1)); print('heeds', flush=True)\nwhile not n: time.sleep(0.01)"
    process, driver = start(f"{heeds}\ntime.sleep(0.3); print(n); u.tell_end(130); sys.exit(130)")
    process.stdout.readline()
    assert os.getpgid(driver) != os.getpgid(process.pid)  # a terminal sends it to the whole group of the latter
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "[1]\n"
    assert process.returncode == 130


def test_the_driver_is_killed_with_the_users_process(start):
    process, driver = start("time.sleep(600)")
    watched = psutil.Process(driver)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([watched], timeout=20)
    assert not alive


def test_a_command_that_is_stopped_and_continued_stops_and_continues_the_driver(start):
    process, driver = start("time.sleep(600)")
    watched = psutil.Process(driver)

    def comes(status):
        deadline = time.monotonic() + 20
        while watched.status() != status and time.monotonic() < deadline:
            time.sleep(0.01)
        return watched.status() == status

    process.send_signal(signal.SIGTSTP)
    assert comes(psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGCONT)
    assert comes(psutil.STATUS_SLEEPING)


def test_a_command_that_was_started_with_sigchld_ignored_ends_with_its_driver():
    program = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); " + BEFORE + "u.tell_end(0)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=20).returncode == 0


def test_a_driver_that_reads_the_terminal_is_not_stopped():
    """Its group is not the terminal's, which stops whoever of another one reads it."""
    program = (
        "import os, pty, sys\n"
        "pid, terminal = pty.fork()\n"
        "if pid == 0:\n"
        f"    os.execv(sys.executable, [sys.executable, '-c', {BEFORE + 'u.tell_end(7); os.read(0, 1)'!r}])\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert done.stdout.strip() == "7", done.stderr
