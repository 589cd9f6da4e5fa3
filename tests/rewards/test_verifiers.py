"""Each verifier, called directly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.config.schema.data_config import RewardTerm
from moerl.rewards.verifiers import VERIFIERS, Verdict, VerifierInput


def judge(kind: str, text: str, ground_truth: str = "", extra_info: dict | None = None, **term: str) -> Verdict:
    check = VerifierInput(text=text, data_source="test", ground_truth=ground_truth, extra_info=extra_info if extra_info is not None else {})
    return VERIFIERS[kind](RewardTerm(kind=kind, **term))(check)


@pytest.mark.parametrize(("text", "value"), [("42", 1.0), ("42 ", 0.0), ("43", 0.0), ("", 0.0)])
def test_exact_compares_every_character(text, value):
    assert judge("exact", text, "42") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("77777777", 1.0), ("7777", 0.5), ("87777777", 0.875), ("777777779", 1.0), ("", 0.0), ("7x7x7x7x", 0.5)],
)
def test_prefix_is_the_share_of_right_positions(text, value):
    assert judge("prefix", text, "77777777") == value


@given(st.text(max_size=20), st.text(min_size=1, max_size=20), st.text(max_size=5))
def test_prefix_is_a_share_and_text_beyond_the_ground_truth_changes_nothing(text, ground_truth, more):
    value = judge("prefix", text, ground_truth)
    assert 0 <= value <= 1
    assert (value == 1) == text.startswith(ground_truth)
    if len(text) >= len(ground_truth):
        assert judge("prefix", text + more, ground_truth) == value


def test_prefix_refuses_an_empty_ground_truth():
    with pytest.raises(ValueError, match="empty"):
        judge("prefix", "7")


@pytest.mark.parametrize(("text", "value"), [("<a>1\n2</a>", 1.0), ("<a></a>.", 0.0), (" <a></a>", 0.0)])
def test_format_matches_the_whole_response(text, value):
    assert judge("format", text, pattern="(?s)<a>.*</a>") == value


@pytest.mark.parametrize(
    ("ground_truth", "text", "value"),
    [
        ("72", "The answer is 72", 1.0),
        ("\\$18.90", "\\boxed{\\$18.90}", 1.0),
        ("\\text{\\$}36", "\\boxed{\\text{\\$}36}", 1.0),
        ("\\$36", "\\boxed{\\$37}", 0.0),
        ("5 dollars ($)", "\\boxed{5}", 1.0),
        ("72", "72 at first, but \\boxed{71}", 0.0),
        ("72", "no answer", 0.0),
        ("1/2", "so \\boxed{\\frac{2}{4}}", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("1,000", "\\boxed{1000}", 1.0),
        ("$x^2+2x+1$", "\\boxed{(x+1)^2}", 1.0),
        ("(1,2]", "\\boxed{(1,2]}", 1.0),
        ("(1,2]", "\\boxed{(1,2)}", 0.0),
        ("\\sqrt{2}", "$\\sqrt 2$", 1.0),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1.0),
        ("50%", "\\boxed{50\\%}", 1.0),
        ("50%", "The answer is 50%.", 1.0),
        ("50\\%", "The answer is 50%.", 1.0),
        ("12.5 %", "$12.5\\%$", 1.0),
        ("50\\%", "\\boxed{50%}", 1.0),
        ("50%", "\\boxed{51\\%}", 0.0),
        ("50%", "\\boxed{51%}", 0.0),
        ("50%", "\\boxed{50.0\\%}", 1.0),
        ("1,250%", "\\boxed{1250\\%}", 1.0),
        ("1250%", "\\boxed{1,250\\%}", 1.0),
        ("12.5%", "The answer is 12.5%.", 1.0),
        ("-3\\%", "-3%", 1.0),
        ("0.5%", "The answer is 50%.", 0.0),
        ("50%", "The answer is 5000%.", 0.0),
        ("$50\\%$", "\\boxed{50.0\\%}", 1.0),
        ("\\boxed{50\\%}", "The answer is 50%.", 1.0),
        ("$\\boxed{50\\%}$", "\\boxed{50\\%}", 1.0),
        ("\\(12.5\\%\\)", "\\boxed{12.50\\%}", 1.0),
        ("\\boxed{50\\%}", "\\boxed{51\\%}", 0.0),
        ("10\\%, 20\\%", "\\boxed{10\\%, 20\\%}", 1.0),
        ("10\\%, 20\\%", "\\boxed{20\\%, 10\\%}", 1.0),
        ("10\\%, 20\\%", "\\boxed{30\\%, 20\\%}", 0.0),
        ("\\(10\\%, 20\\%\\)", "\\boxed{10, 20}", 1.0),
        ("10% and 20%", "\\boxed{10\\%}, \\boxed{20\\%}", 1.0),
        ("33\\frac{1}{3}\\%", "\\boxed{\\frac{100}{3}\\%}", 1.0),
        ("33\\frac{1}{3}\\%", "\\boxed{\\frac{1}{3}\\%}", 0.0),
        ("$x = 25\\%$", "\\boxed{25.0\\%}", 1.0),
        ("20\\%\\text{ more}", "\\boxed{20.0\\%}", 1.0),
        ("x \\% 2", "\\boxed{2x}", 0.0),
    ],
)
def test_math_judges_the_last_answer_by_its_value(ground_truth, text, value):
    assert judge("math", text, ground_truth) == value


def test_math_refuses_a_ground_truth_without_an_answer():
    with pytest.raises(ValueError, match="ground truth"):
        judge("math", "7", "")


@pytest.mark.parametrize("dataset", ["chain_sum", "prime_factorization", "n_queens", "decimal_arithmetic"])
def test_gym_gives_the_right_answer_one_and_garbage_less(dataset):
    import reasoning_gym

    entry = reasoning_gym.create_dataset(dataset, size=1, seed=3)[0]
    extra_info = {"task": dataset, "args": {}, "entry": entry}
    assert judge("gym", f"I think <answer>{entry['answer']}</answer>", extra_info=extra_info) == 1.0
    assert judge("gym", entry["answer"], extra_info=extra_info) == 1.0
    assert judge("gym", "garbage", extra_info=extra_info) < 0.1


def test_gym_raises_when_the_entry_itself_is_damaged():
    extra_info = {"task": "prime_factorization", "args": {}, "entry": {"answer": "no number", "metadata": {}}}
    with pytest.raises(ValueError, match="no number"):
        judge("gym", "2 x 2", extra_info=extra_info)


def test_gym_refuses_rows_of_other_data():
    with pytest.raises(ValueError, match="data.kind=gym"):
        judge("gym", "7")


def test_function_is_called_with_the_arguments_of_verl(functions):
    verdict = judge("function", "abc", "abc", {"index": 5}, path=f"{functions}:seen")
    assert verdict["score"] == 0.25
    assert (verdict["length"], verdict["index"], verdict["same"], verdict["source"]) == (3, 5, True, "test")


def test_function_can_be_named_by_module(functions, monkeypatch):
    package = functions.parent / "my_rewards"
    package.mkdir()
    functions.rename(package / "lengths.py")
    monkeypatch.syspath_prepend(str(functions.parent))
    assert judge("function", "abc", path="my_rewards.lengths:length") == 3
