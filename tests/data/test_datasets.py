"""Rows from files, reasoning-gym and tiny tasks; damaged data is named by file and row before a run starts."""

import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from moerl.config.schema.data_config import FileData, GymData, TinyData
from moerl.rewards.verifiers import VERIFIERS, VerifierInput
from moerl.rollout.datasets.dataset import Dataset
from moerl.rollout.datasets.load_dataset import check_data, load_dataset
from moerl.types.errors import DataError


def row(question: str, answer: str = "4", **columns: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": answer}, "data_source": "sums"} | columns


def write(file: Path, rows: list[Any]) -> str:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def load(*files: str) -> Dataset:
    return load_dataset(FileData(files=files), seed=0)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_come_in_order_over_several_files(tmp_path, suffix):
    first = write(tmp_path / f"a{suffix}", [row("1+3=", extra_info={"index": 0, "answer": "1+3=4"}), row("2+2=", "four")])
    second = write(tmp_path / f"b{suffix}", [row("5-1=")])
    dataset = load(first, second)
    assert [dataset[i].messages for i in range(len(dataset))] == [({"role": "user", "content": q},) for q in ("1+3=", "2+2=", "5-1=")]
    assert (dataset[0].data_source, dataset[0].extra_info) == ("sums", {"index": 0, "answer": "1+3=4"})
    assert dataset[1].ground_truth == "four"
    assert dataset.name_of(2) == f"{second}, row 1"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_call_of_a_tool_has_its_own_arguments_alone(tmp_path, suffix):
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}, {"function": {"name": "root", "arguments": {"of": 4}}}]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert load(write(tmp_path / f"a{suffix}", [row("") | {"prompt": messages}]))[0].messages == tuple(messages)


def test_the_data_source_is_the_name_of_the_file_where_rows_have_none(tmp_path):
    plain = {key: value for key, value in row("2+2=").items() if key != "data_source"}
    dataset = load(write(tmp_path / "sums_2.jsonl", [plain]))
    assert (dataset[0].data_source, dataset[0].extra_info) == ("sums_2", {})


DAMAGED = [
    ({"reward_model": {"ground_truth": "4"}}, "has no prompt"),
    (row("") | {"prompt": []}, "prompt is empty"),
    (row(""), "prompt is empty"),
    (row("2") | {"prompt": "2+2="}, "must be a list of messages"),
    (row("2") | {"prompt": [{"role": "user"}]}, "role and content"),
    (row("2") | {"reward_model": {"style": "rule"}}, "has no reward_model.ground_truth"),
    (row("2") | {"reward_model": None}, "has no reward_model.ground_truth"),
    (row("2") | {"reward_model": {"ground_truth": 4}}, "must be text, not 4"),
    (row("2") | {"extra_info": [1]}, "extra_info must be an object"),
    (row("2") | {"data_source": 3}, "data_source must be text"),
    (["2+2="], "is no object"),
]


@pytest.mark.parametrize(("damaged", "said"), DAMAGED)
def test_an_unusable_row_is_named(tmp_path, damaged, said):
    file = write(tmp_path / "a.jsonl", [row("fine"), damaged])
    with pytest.raises(DataError) as caught:
        load(file)
    assert f"{file}, row 2: " in str(caught.value)
    assert said in str(caught.value)
    assert "1 problem" in str(caught.value)


@pytest.mark.parametrize("damage", [{"prompt": []}, {"prompt": None}, {"reward_model": {"style": "rule", "ground_truth": None}}])
def test_an_unusable_row_of_a_parquet_file_is_named(tmp_path, damage):
    file = write(tmp_path / "a.parquet", [row("fine"), row("fine"), row("2") | damage])
    with pytest.raises(DataError, match=r"a\.parquet, row 3: "):
        load(file)


@pytest.mark.parametrize(
    ("kind", "place", "said"),
    [
        (pyarrow.timestamp("us"), 2, "a date, a time or a duration beyond those of Python"),
        (pyarrow.duration("s"), 2, "a date, a time or a duration beyond those of Python"),
        (pyarrow.timestamp("us", "Mars/Olympus"), 1, "a time of a zone that this system does not know: .*Mars/Olympus"),
    ],
)
def test_a_time_of_a_parquet_file_that_python_cannot_hold_is_named_by_its_row(tmp_path, kind, place, said):
    table = pyarrow.Table.from_pylist([row("fine"), row("2")])
    times = pyarrow.StructArray.from_arrays([pyarrow.array([0, 10**18], kind)], names=["made"])
    pyarrow.parquet.write_table(table.append_column("extra_info", times), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet, row {place}: holds {said}"):
        load_dataset(FileData(files=(str(tmp_path / "a.parquet"),)), seed=0)


def test_a_row_of_a_parquet_file_is_found_as_fast_in_many_row_groups_as_in_one(tmp_path):
    table = pyarrow.Table.from_pylist([row(f"{number}=") for number in range(12_000)])

    def seconds(row_group_size):
        file = tmp_path / f"{row_group_size}.parquet"
        pyarrow.parquet.write_table(table, file, row_group_size=row_group_size)
        data = load(str(file))
        assert [data[index].messages[0]["content"] for index in (0, 4_097, 11_999)] == ["0=", "4097=", "11999="]
        begin = time.process_time()
        for index in range(0, 12_000, 6):
            data[index]
        return time.process_time() - begin

    assert seconds(2) < 5 * seconds(12_000)


def test_a_parquet_file_with_two_columns_of_one_name_is_named(tmp_path):
    [column] = pyarrow.Table.from_pylist([{"prompt": row("2+2=")["prompt"]}]).columns
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([column, column], names=["prompt", "prompt"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: has several columns of the name prompt"):
        load(str(tmp_path / "a.parquet"))


def test_a_parquet_file_without_prompts_is_named_once_with_all_its_columns(tmp_path):
    rows = [{"problem": "2+2=", "expected_answer": "4", "reward_model": {"ground_truth": "4"}}] * 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError) as raised:
        load(str(tmp_path / "a.parquet"))
    assert "1 problem(s)" in str(raised.value)
    assert "a.parquet: cannot be read: has no column prompt, but problem, expected_answer, reward_model" in str(raised.value)


def test_rows_of_jsonl_are_counted_by_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row("fine")) + "\n\n" + '{"prompt": [' + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, row 3: is no JSON"):
        load(str(file))


def test_every_problem_of_every_file_is_counted_and_the_first_are_shown(tmp_path):
    bad = write(tmp_path / "bad.jsonl", [row("fine"), *([{}] * 30)])
    empty = write(tmp_path / "empty.jsonl", [])
    corrupt = tmp_path / "corrupt.parquet"
    corrupt.write_bytes(b"PAR1 this is no parquet file")
    with pytest.raises(DataError) as caught:
        load(empty, str(corrupt), str(tmp_path / "absent.jsonl"), str(tmp_path / "a.csv"), bad)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("the data has 34 problem")
    assert lines[1] == f"* {empty}: has no rows"
    assert lines[2].startswith(f"* {corrupt}: cannot be read: ")
    assert "No such file" in lines[3]
    assert "must end in .parquet or .jsonl" in lines[4]
    assert lines[-1] == "* and 24 more"


def test_a_file_of_another_kind_is_a_problem_before_it_is_read(tmp_path):
    fine = write(tmp_path / "a.jsonl", [{}])
    problems = list(check_data(FileData(files=(fine, "a.json", "a.csv", str(tmp_path / "absent.parquet")))))
    assert [problem.path for problem in problems] == ["data.files.1", "data.files.2", "data.files.3"]
    assert "a.jsonl" in problems[0].fix
    assert problems[2].rule == "is not a file"
    assert [problem.path for problem in check_data(FileData(files=()))] == ["data.files"]


def test_values_for_a_template_that_is_not_used_are_refused():
    [problem] = check_data(TinyData(task="add", chat_template=False, chat_template_kwargs={"enable_thinking": False}))
    assert (problem.path, problem.rule) == ("data.chat_template_kwargs", "needs data.chat_template=true")
    [problem] = check_data(TinyData(task="add", chat_template=False, template_date=date(2024, 2, 29)))
    assert str(problem).startswith("data.template_date = '2024-02-29': needs data.chat_template=true")


def test_tiny_repeat_asks_for_a_digit_eight_times():
    dataset = load_dataset(TinyData(task="repeat", size=200), seed=1)
    rows = [dataset[i] for i in range(len(dataset))]
    assert {row.messages[0]["content"] for row in rows} == {f"{digit}=" for digit in range(10)}
    assert all(row.ground_truth == row.messages[0]["content"][0] * 8 == row.extra_info["answer"] for row in rows)
    assert rows[0].data_source == "tiny/repeat"


def test_tiny_add_asks_for_sums_of_numbers_below_100():
    dataset = load_dataset(TinyData(task="add", size=500), seed=1)
    for i in range(len(dataset)):
        left, right = dataset[i].messages[0]["content"].removesuffix("=").split("+")
        assert 0 <= int(left) < 100
        assert 0 <= int(right) < 100
        assert dataset[i].ground_truth == str(int(left) + int(right))


@pytest.mark.parametrize("config", [TinyData(task="add", size=50), GymData(task="chain_sum", size=50)])
def test_made_rows_are_a_function_of_the_seed(config):
    def questions(seed: int) -> list[str]:
        dataset = load_dataset(config, seed=seed)
        return [dataset[i].messages[0]["content"] for i in range(len(dataset))]

    assert questions(-3) == questions(-3) != questions(4)


def test_gym_rows_of_neighbouring_seeds_have_nothing_in_common():
    """An evaluation's seed is the run's and one by default: its rows would be those that the run trains on."""
    first, second = (
        load_dataset(GymData(task="chain_sum", args={"min_digits": 4, "max_digits": 6}, size=100), seed=seed) for seed in (0, 1)
    )
    asked = [{rows[i].messages[0]["content"] for i in range(100)} for rows in (first, second)]
    assert not asked[0] & asked[1]


_ROWS_OF_TASKS = """
from moerl.config.schema.data_config import GymData
from moerl.rollout.datasets.load_dataset import load_dataset
for task in ("isomorphic_strings", "ransom_note", "list_functions", "word_ladder"):
    rows = load_dataset(GymData(task=task, size=10), seed=3)
    print([rows[i] for i in range(10)])
"""


def test_gym_rows_are_the_same_in_every_process():
    """Of tasks that take elements of sets, and one that takes numbers of the process: a resumed run asks again."""
    told = [
        subprocess.run(
            [sys.executable, "-c", _ROWS_OF_TASKS], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]


def test_a_task_that_fails_while_it_makes_its_entries_is_told_as_data_with_its_reason():
    config = GymData(task="word_ladder", args={"min_chain_length": 99, "max_chain_length": 99}, size=1)
    with pytest.raises(DataError, match="reasoning-gym could not make the entries of task word_ladder"):
        load_dataset(config, seed=0)


def test_gym_rows_carry_what_their_scorer_needs():
    dataset = load_dataset(GymData(task="decimal_arithmetic", args={"max_num_decimal_places": 3}, size=3), seed=0)
    assert len(dataset) == 3
    for i in range(3):
        row = dataset[i]
        check = VerifierInput(text=row.ground_truth, data_source=row.data_source, ground_truth=row.ground_truth, extra_info=row.extra_info)
        assert VERIFIERS["gym"](None)(check) == 1.0


def test_a_task_that_names_no_answer_has_an_empty_ground_truth():
    assert load_dataset(GymData(task="graph_color", size=1), seed=0)[0].ground_truth == ""


def test_an_unknown_task_is_a_problem_with_the_nearest_names():
    [problem] = check_data(GymData(task="chainsum"))
    assert (problem.path, problem.value) == ("data.task", "chainsum")
    assert "chain_sum" in problem.fix


@pytest.mark.parametrize(
    ("args", "path", "fix"),
    [
        ({"min_term": 2}, "data.args.min_term", "data.args.min_terms"),
        ({"size": 5}, "data.args.size", "data.size"),
        ({"min_terms": 9, "max_terms": 3}, "data.args", "ChainSumConfig"),
    ],
)
def test_settings_a_task_does_not_take_are_problems(args, path, fix):
    [problem] = check_data(GymData(task="chain_sum", args=args))
    assert problem.path == path
    assert fix in problem.fix


def test_settings_of_a_task_are_checked_without_importing_the_others_and_by_its_own_rules():
    """Of tasks in a folder, in a folder's folder and in one whose module needs the others."""
    code = """
import sys
from moerl.config.schema.data_config import GymData
from moerl.rollout.datasets.load_dataset import check_data
problems = [*check_data(GymData(task="chain_sum", args={"min_terms": 9, "max_terms": 3})), *check_data(GymData(task="gcd"))]
print(len(problems), {"reasoning_gym", "sympy", "matplotlib"} & set(sys.modules))
from moerl.rollout.datasets.gym_tasks import _quick_config_class
tasks = ["chain_sum", "game_of_life", "zebra_puzzles", "list_functions"]
quick = [_quick_config_class(task) for task in tasks]
from reasoning_gym.factory import DATASETS
assert quick[-1] is None and [repr(each) for each in quick[:-1]] == [repr(DATASETS[task][1]) for task in tasks[:-1]]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1 set()\n"), done.stderr


def test_sound_settings_of_made_data_have_no_problem():
    assert list(check_data(GymData(task="chain_sum", args={"min_terms": 2, "max_terms": 3}))) == []
    assert list(check_data(TinyData(task="add"))) == []
