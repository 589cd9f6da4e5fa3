"""The order of prompts, their rendering, and the prompts that do not fit."""

import copy
import json
import logging
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.config.schema.data_config import FileData, TinyData
from moerl.models.plain_tokenizer import PlainTokenizer
from moerl.models.transformers_tokenizer import plain_form
from moerl.rollout.datasets.load_dataset import load_dataset
from moerl.rollout.prompts import PromptSource, demonstration
from moerl.types.errors import ConfigError, DataError
from moerl.types.groups import Prompt


def questions(tmp_path: Path, texts: list[str], **settings) -> FileData:
    file = tmp_path / "q.jsonl"
    rows = [{"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "1"}} for text in texts]
    file.write_text("\n".join(map(json.dumps, rows)))
    return FileData(files=(str(file),), **settings)


def source(tokenizer, config=None, *, seed=0, max_context=256, max_response_tokens=64, shown=None) -> PromptSource:
    config = config if config is not None else TinyData(task="add", size=20, max_prompt_tokens=64)
    dataset = load_dataset(config, seed=0)
    limits = {"max_context": max_context, "max_response_tokens": max_response_tokens}
    return PromptSource(dataset, tokenizer, config, seed=seed, shown=shown, **limits)


def with_template(tokenizer, template: str):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_a_prompt_is_the_rendered_chat(tokenizer):
    prompt = source(tokenizer).prompt_at(0)
    question = prompt.text.split("user\n")[1].split("<|im_end|>")[0]
    assert prompt.text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.data_source == "tiny/add"
    assert eval(question.removesuffix("=")) == int(prompt.ground_truth)


def test_without_a_template_the_contents_are_joined(tokenizer, tmp_path):
    config = questions(tmp_path, ["7="], chat_template=False)
    (tmp_path / "q.jsonl").write_text(
        json.dumps(
            {"prompt": [{"role": "system", "content": "a "}, {"role": "user", "content": "b"}], "reward_model": {"ground_truth": "1"}}
        )
    )
    prompt = source(tokenizer, config).prompt_at(0)
    assert prompt.text == "a b"
    assert tokenizer.decode(prompt.token_ids) == "a b"
    assert len(prompt.token_ids) == 3


THINKS = "{% if enable_thinking is not defined or enable_thinking %}think {% endif %}{{ messages[0].content }}{{ tools }}"


def test_a_template_gets_the_values_of_the_settings_and_refuses_those_that_it_does_not_read(tokenizer, tmp_path):
    talking = with_template(tokenizer, THINKS)
    assert source(talking, questions(tmp_path, ["7="])).prompt_at(0).text == "think 7=None"
    quiet = questions(tmp_path, ["7="], chat_template_kwargs={"enable_thinking": False, "tools": [{"name": "x"}]})
    assert source(talking, quiet).prompt_at(0).text == "7=[{'name': 'x'}]"
    assert source(PlainTokenizer(plain_form(talking)), quiet).prompt_at(0).text == "7=[{'name': 'x'}]"
    with pytest.raises(ConfigError) as raised:
        source(talking, questions(tmp_path, ["7="], chat_template_kwargs={"enable_thinkin": False, "messages": [], "budget": 1}))
    [budget, thinking, messages] = raised.value.problems
    assert (thinking.path, thinking.fix) == ("data.chat_template_kwargs.enable_thinkin", "did you mean enable_thinking?")
    assert budget.reason == "it reads enable_thinking, tools" and messages.path == "data.chat_template_kwargs.messages"


def test_a_template_writes_the_day_of_the_settings(tokenizer, tmp_path, caplog):
    dated = with_template(tokenizer, "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}")
    fixed = questions(tmp_path, ["7="], template_date=date(2024, 2, 29))
    for each in (dated, PlainTokenizer(plain_form(dated))):
        assert source(each, fixed).prompt_at(0).text == "2024-02-29 7="
    assert not caplog.records
    source(dated, questions(tmp_path, ["7="]))
    assert "tomorrow's prompts are others, unless data.template_date=20" in caplog.text
    with pytest.raises(ConfigError, match=r"data.template_date = '2024-02-29': has no effect\n.*writes no day"):
        source(tokenizer, fixed)


def test_a_template_that_is_given_its_date_writes_no_other_and_nothing_is_said_of_it(tokenizer, tmp_path, caplog):
    """As those of Llama 3, which write today's only where there is no date_string."""
    now = "{% if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
    dated = with_template(tokenizer, now + "{{ date_string }} {{ messages[0].content }}")
    given = questions(tmp_path, ["7="], chat_template_kwargs={"date_string": "1999"})
    assert source(dated, given).prompt_at(0).text == "1999 7=" and not caplog.records
    source(dated, questions(tmp_path, ["7="]))
    assert "tomorrow's prompts are others" in caplog.text


def test_a_template_sees_all_that_a_message_says(tokenizer, tmp_path):
    config = questions(tmp_path, ["7="])
    message = {"role": "user", "content": "7=", "name": "bob", "tool_calls": [{"id": 1}], "reasoning_content": None}
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": [message], "reward_model": {"ground_truth": "1"}}))
    prompt = source(with_template(tokenizer, "{{ messages[0] | tojson }}"), config).prompt_at(0)
    assert json.loads(prompt.text) == {"role": "user", "content": "7=", "name": "bob", "tool_calls": [{"id": 1}]}


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError('can only concatenate"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('begin with the system') }}", "begin with the system"),
        ("{# nothing #}", "nothing is left of it"),
    ],
)
def test_rows_that_a_template_cannot_render_are_named(tokenizer, tmp_path, template, why):
    with pytest.raises(DataError, match="the chat template refuses 1 row") as raised:
        source(with_template(tokenizer, template), questions(tmp_path, ["7="]))
    assert f"q.jsonl, row 1: {why}" in str(raised.value)


def test_a_template_that_cannot_be_read_is_one_problem(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="1 problem.*\n.*data.chat_template = True: needs a template that can be read"):
        source(with_template(tokenizer, "{% if %}"), questions(tmp_path, ["7=", "8="]))


@given(st.integers(-(2**40), 2**40), st.integers(1, 40), st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(tokenizer, seed, size, epoch):
    prompts = source(tokenizer, TinyData(task="add", size=size, max_prompt_tokens=64), seed=seed)
    order = prompts._order(epoch)
    assert sorted(order) == list(range(size))


def test_epochs_and_seeds_have_different_orders_and_the_same_rows(tokenizer):
    def texts(seed: int, epoch: int) -> list[str]:
        prompts = source(tokenizer, seed=seed)
        return [prompts.prompt_at(epoch * 20 + i).text for i in range(20)]

    assert sorted(texts(0, 0)) == sorted(texts(0, 1)) == sorted(texts(1, 0))
    assert texts(0, 0) != texts(0, 1)
    assert texts(0, 0) != texts(1, 0)
    assert texts(0, 0) == texts(0, 0)


def test_the_order_of_a_seed_does_not_change_between_versions(tokenizer):
    assert source(tokenizer, seed=7)._order(3).tolist() == [13, 17, 7, 1, 18, 9, 6, 0, 14, 16, 11, 10, 4, 15, 19, 12, 2, 8, 3, 5]


def test_without_shuffle_rows_come_in_file_order_again_and_again(tokenizer, tmp_path):
    prompts = source(tokenizer, questions(tmp_path, ["a", "b", "c"], shuffle=False, chat_template=False))
    drawn = [prompts.prompt_at(index) for index in range(7)]
    assert [prompt.text for prompt in drawn] == ["a", "b", "c", "a", "b", "c", "a"]
    assert [prompt.index for prompt in drawn] == list(range(7))


def test_a_resumed_cursor_gives_the_same_sequence(tokenizer):
    whole = source(tokenizer)
    expected = [whole.prompt_at(index) for index in range(50)]
    resumed = source(tokenizer)
    resumed.refuse_other_data({"drawn": 33, "num_rows": whole.num_rows})
    assert [resumed.prompt_at(index) for index in range(33, 50)] == expected[33:]


def test_a_far_position_is_reached_at_once(tokenizer):
    prompts = source(tokenizer)
    assert prompts.prompt_at(20 * 10**12 + 3).index == 20 * 10**12 + 3


def test_a_cursor_over_other_data_is_refused(tokenizer):
    state = {"drawn": 3, "num_rows": source(tokenizer).num_rows}
    other = source(tokenizer, TinyData(task="add", size=21, max_prompt_tokens=64))
    with pytest.raises(DataError, match="21 usable rows, and had 20"):
        other.refuse_other_data(state)


def test_overlong_prompts_stop_the_run_and_are_listed(tokenizer, tmp_path):
    config = questions(tmp_path, ["a" * 10, *["b" * 11] * 12, "c"], max_prompt_tokens=10, chat_template=False)
    with pytest.raises(DataError) as caught:
        source(tokenizer, config)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("12 of 14 prompts are longer than 10 tokens (data.max_prompt_tokens=10)")
    assert lines[1] == f"* {config.files[0]}, row 2: 11 tokens"
    assert lines[-1] == "* and 2 more"


def test_overlong_prompts_can_be_dropped_with_a_warning(tokenizer, tmp_path, caplog):
    texts = ["a", "b" * 50, "c", "d" * 50]
    config = questions(tmp_path, texts, max_prompt_tokens=10, chat_template=False, overlong_prompts="drop", shuffle=False)
    with caplog.at_level(logging.WARNING):
        prompts = source(tokenizer, config)
    assert "2 of 4 prompts" in caplog.text
    assert "row 2: 50 tokens" in caplog.text
    assert prompts.num_rows == 2
    assert [prompts.prompt_at(index).text for index in range(3)] == ["a", "c", "a"]


def test_dropping_every_prompt_is_an_error(tokenizer, tmp_path):
    config = questions(tmp_path, ["a" * 20], max_prompt_tokens=10, overlong_prompts="drop")
    with pytest.raises(DataError, match="none is left"):
        source(tokenizer, config)


def test_room_for_the_response_bounds_the_prompt_too(tokenizer, tmp_path):
    config = questions(tmp_path, ["a" * 20], max_prompt_tokens=100, chat_template=False)
    source(tokenizer, config, max_context=84, max_response_tokens=64)
    with pytest.raises(DataError, match="model.max_context=83 minus rollout.max_response_tokens=64"):
        source(tokenizer, config, max_context=83, max_response_tokens=64)


def test_a_prompt_comes_with_its_answer_where_one_is_shown_and_both_must_fit(tokenizer, tmp_path):
    config = questions(tmp_path, ["a" * 20], chat_template=False)
    assert source(tokenizer, config).prompt_at(0).shown_ids == ()
    prompt = source(tokenizer, config, shown=" ({answer})", max_context=88).prompt_at(0)
    assert tokenizer.decode(prompt.shown_ids) == "a" * 20 + " (1)"
    assert prompt.text == "a" * 20
    with pytest.raises(DataError, match=r"24 tokens with the answer \(distillation.shown\), more than 23"):
        source(tokenizer, config, shown=" ({answer})", max_context=87)


def test_the_limit_counts_tokens_not_bytes(tokenizer, tmp_path):
    """Each of these characters has three bytes and one token."""
    config = questions(tmp_path, ["\u65e5" * 10], max_prompt_tokens=10, chat_template=False)
    assert len(source(tokenizer, config).prompt_at(0).token_ids) == 10


def test_a_sign_that_a_tokenizer_puts_before_a_text_counts(tmp_path):
    """Four bytes, and five tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"\u2581": 0, "a": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    config = questions(tmp_path, ["aaaa"], max_prompt_tokens=4, chat_template=False)
    with pytest.raises(DataError, match="row 1: 5 tokens"):
        source(PreTrainedTokenizerFast(tokenizer_object=backend), config)


def test_a_tokenizer_without_a_template_is_a_problem(checkpoint):
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(checkpoint)
    bare.chat_template = None
    with pytest.raises(ConfigError) as caught:
        source(bare)
    assert caught.value.problems[0].path == "data.chat_template"
    source(bare, TinyData(task="add", size=3, chat_template=False))


def test_rows_the_template_refuses_are_named(checkpoint, tmp_path):
    from transformers import AutoTokenizer

    picky = AutoTokenizer.from_pretrained(checkpoint)
    picky.chat_template = "{% if messages[0]['content'] == 'b' %}{{ raise_exception('no b here') }}{% endif %}{{ messages[0]['content'] }}"
    with pytest.raises(DataError, match=r"q\.jsonl, row 2: no b here"):
        source(picky, questions(tmp_path, ["a", "b"]))


@pytest.mark.parametrize(("extra_info", "said"), [({"answer": "1+3=4"}, "1+3=4"), ({}, "4"), ({"answer": None}, "4")])
def test_the_demonstration_is_the_answer_of_the_row_or_else_the_ground_truth(extra_info, said):
    assert demonstration(Prompt(index=0, token_ids=(1,), text="", data_source="", ground_truth="4", extra_info=extra_info)) == said
