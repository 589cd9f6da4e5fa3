import io
import os
import sys

import pytest
from rich.console import Console

from moerl.observe.terminal import HEADER_EVERY, Terminal, duration, number
from moerl.types.errors import MoerlError

ROW = {"reward/mean": 0.5, "length/mean": 120.25, "mismatch/mean": 1.5e-6, "time/step": 3.0, "time/rollout": 2.0, "time/other": 0.5}


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def plain():
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def test_a_log_file_gets_no_control_codes_even_where_colour_is_forced(monkeypatch, capsys):
    """Standard output under pytest is no terminal; CI systems set FORCE_COLOR, which rich would follow."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    terminal = Terminal(100)
    terminal.phase("rollout")
    terminal.row(1, ROW)
    terminal.notice("a warning\x1b[2J with codes of its own\r", "warning")
    terminal.summary("finished", {"steps": "1"})
    terminal.close()
    output = capsys.readouterr().out
    assert "0.500" in output and "warning: a warning[2J with codes of its own\n" in output
    assert not {code for code in map(ord, output) if code < 32 and chr(code) != "\n"}


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "京 \\ud83d"), ("ascii", "\\u4eac \\ud83d")])
def test_what_a_terminal_cannot_be_sent_becomes_an_escape(encoding, shown):
    sent = io.BytesIO()
    Terminal(1, console=Console(file=io.TextIOWrapper(sent, encoding, write_through=True))).notice("京 \ud83d")
    assert sent.getvalue().decode(encoding) == shown + "\n"


def test_one_line_per_step_and_a_header_every_twenty(plain):
    terminal = Terminal(100, console=plain)
    for step in range(1, 2 * HEADER_EVERY + 2):
        terminal.row(step, ROW)
    lines = printed(plain).splitlines()
    assert len(lines) == 2 * HEADER_EVERY + 1 + 3
    assert [number for number, line in enumerate(lines) if "reward" in line] == [0, HEADER_EVERY + 1, 2 * HEADER_EVERY + 2]


def test_columns_are_aligned_and_not_cut_at_the_width_of_a_log(plain):
    terminal = Terminal(100, console=plain)
    terminal.row(1, ROW)
    header, row = printed(plain).splitlines()
    assert len(header) == len(row) > 40
    assert header.split() == ["step", "reward", "length", "stale", "mismatch", "entropy", "tokens/s", "step", "s", "rollout"]
    assert row.split() == ["1/100", "0.500", "120.2", "-", "1.5e-06", "-", "-", "3.00", "2.00"]


def test_a_new_phase_brings_a_new_header(plain):
    terminal = Terminal(100, console=plain)
    terminal.row(1, ROW)
    terminal.row(2, {**ROW, "time/logprobs": 0.25})
    lines = printed(plain).splitlines()
    assert [line.split()[-1] for line in lines] == ["rollout", "2.00", "logprobs", "0.25"]


def test_a_terminal_shows_progress_and_rows_that_fit():
    console = Console(file=io.StringIO(), force_terminal=True, width=60, legacy_windows=False)
    terminal = Terminal(100, console=console)
    terminal.phase("rollout")
    terminal.row(1, ROW)
    terminal.close()
    output = printed(console)
    assert "\x1b[" in output and "1/100" in output
    assert all(len(line) <= 60 for line in output.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines() if "reward" in line)
    assert output.rstrip().endswith("\x1b[?25h"), "the cursor is given back"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (12.0, "12"), (0.123456, "0.1235"), (1234.5, "1,234"), (3.2e-7, "3.2e-07"), (2e12, "2e+12")]
)
def test_numbers_have_four_digits_that_count(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.25, "0.2 s"), (59.0, "59.0 s"), (61.0, "1 min 01 s"), (7260.0, "2 h 01 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_reader_of_the_output_who_has_gone_is_an_error_with_that_cause(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        terminal = Terminal(100)
        with pytest.raises(MoerlError, match="nobody reads it any more"):
            terminal.row(1, ROW)
        terminal.summary("failed", {"steps": "1"})
