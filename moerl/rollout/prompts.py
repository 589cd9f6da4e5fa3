"""Prompts in a resumable order: the k-th draw of a run is a pure function of the data, the seed and k.

When the run starts, every row is rendered and its length checked, so that no prompt fails later. A text with fewer UTF-8 bytes than the
limit allows tokens is not tokenized for that: a token covers at least one byte, but for a sign that some tokenizers put before a text.
Rendering costs about 40 microseconds a row.
"""

import difflib
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import lru_cache

import numpy as np
from jinja2 import TemplateError

from moerl.config.schema.data_config import DataConfig
from moerl.models.plain_tokenizer import Tokenizer, names_read
from moerl.rollout.datasets.dataset import Complaints, Dataset, Row
from moerl.types.errors import ConfigError, DataError, Problem, problem
from moerl.types.groups import Prompt

logger = logging.getLogger(__name__)


class PromptSource:
    """Endless: one epoch after the other, each in its own order."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        seed: int,
        max_context: int,
        max_response_tokens: int,
        shown: str | None = None,
        section: str = "data",
    ):
        """Raises DataError that lists overlong prompts and rows the chat template refuses, ConfigError if there is no template, or if it
        does not read what it is given. `shown`: distillation.shown; prompts then come with the answer too, which must fit into the context
        likewise. `section`: of the settings, for messages."""
        self._shown, self._context = shown, max_context - max_response_tokens
        self._dataset, self._tokenizer, self._config, self._seed, self._section = dataset, tokenizer, config, seed, section
        if config.chat_template and (problems := list(_template_problems(section, config, tokenizer.chat_template))):
            raise ConfigError(problems)
        self._limit = min(config.max_prompt_tokens, max_context - max_response_tokens)
        self._limit_rule = (
            f"{section}.max_prompt_tokens={config.max_prompt_tokens}"
            if config.max_prompt_tokens <= max_context - max_response_tokens
            else f"model.max_context={max_context} minus rollout.max_response_tokens={max_response_tokens}"
        )
        self.data_sources: set[str] = set()
        self._rows = self._usable_rows()
        if config.template_date is None and self._writes_day():
            logger.warning(
                "the chat template writes the day: tomorrow's prompts are others, unless %s.template_date=%s", section, date.today()
            )
        self._order = lru_cache(maxsize=2)(self._order_of)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, without the dropped ones."""
        return len(self._rows)

    def prompt_at(self, index: int) -> Prompt:
        """The prompt of draw `index`, counted from 0 over all epochs."""
        epoch, position = divmod(index, self.num_rows)
        number = int(self._order(epoch)[position])
        row = self._dataset[number]
        text = self._render(row)
        token_ids = tuple(self._encode(text))
        if len(token_ids) > self._limit:  # only where a tokenizer's normalizer turns a character into several
            raise DataError(f"{self._dataset.name_of(number)}: {len(token_ids)} tokens, more than {self._limit} ({self._limit_rule})")
        return Prompt(
            index=index,
            token_ids=token_ids,
            text=text,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            shown_ids=() if self._shown is None else tuple(self._encode(self._render(self._with_answer(row, self._shown)))),
        )

    def refuse_other_data(self, state: dict[str, int]) -> None:
        """Raises DataError if a checkpoint's `state` was saved over other data."""
        if state["num_rows"] != self.num_rows:
            raise DataError(
                f"the data has {self.num_rows} usable rows, and had {state['num_rows']} when the checkpoint was saved: its order cannot be "
                "continued, since prompts would be lost or drawn twice. Restore the data, or start a run under another name"
            )

    def _order_of(self, epoch: int) -> np.ndarray:
        """Row numbers in the epoch's order."""
        if not self._config.shuffle:
            return self._rows
        # Sorting raw bits gives the same order under every version of numpy; `permutation` may change.
        keys = np.random.Philox(np.random.SeedSequence([self._seed % 2**64, epoch])).random_raw(len(self._rows))
        return self._rows[np.argsort(keys, kind="stable")]

    def _usable_rows(self) -> np.ndarray:
        """Row numbers of the prompts that fit."""
        usable, overlong, refused = [], Complaints(), Complaints()
        for index in range(len(self._dataset)):
            try:
                row = self._dataset[index]
                text = self._render(row)
            except Exception as error:  # a template is code of the model's authors, and does with a row what it likes
                refused.add(self._dataset.name_of(index), str(error) if isinstance(error, TemplateError) else repr(error))
                continue
            if not text:
                refused.add(self._dataset.name_of(index), "nothing is left of it")
                continue
            if too_long := self._too_long(row, text):
                overlong.add(self._dataset.name_of(index), too_long)
            else:
                usable.append(index)
                self.data_sources.add(row.data_source)
        refused.raise_if_any("the chat template refuses {count} row(s)")
        self._report(overlong)
        return np.array(usable, dtype=np.int64)

    def _report(self, overlong: Complaints) -> None:
        if not overlong.count:
            return
        heading = f"{overlong.count} of {len(self._dataset)} prompts are longer than {self._limit} tokens ({self._limit_rule})"
        if self._config.overlong_prompts == "error":
            raise DataError(f"{heading}; raise the limit, shorten them, or write {self._section}.overlong_prompts=drop\n{overlong}")
        if overlong.count == len(self._dataset):
            raise DataError(f"{heading}, so none is left\n{overlong}")
        logger.warning("%s and are left out\n%s", heading, overlong)

    def _too_long(self, row: Row, text: str) -> str:
        """Its tokens, in words; empty if it fits, also with the answer where that is shown."""
        if count := self._count_above(self._limit, text):
            return f"{count} tokens"
        if self._shown is not None and (count := self._count_above(self._context, self._render(self._with_answer(row, self._shown)))):
            return f"{count} tokens with the answer (distillation.shown), more than {self._context}"
        return ""

    def _count_above(self, limit: int, text: str) -> int:
        """Tokens of the text; 0 if they are at most `limit`."""
        if len(text.encode(errors="surrogatepass")) < limit:
            return 0
        count = len(self._encode(text))
        return count if count > limit else 0

    @staticmethod
    def _with_answer(row: Row, shown: str) -> Row:
        *before, last = row.messages
        text = shown.replace("{answer}", demonstration(row))
        return replace(row, messages=(*before, {**last, "content": last["content"] + text}))

    def _writes_day(self) -> bool:
        """Whether the first prompt is another one on another day: where the settings give a template the date itself, it asks for none."""
        row = self._dataset[int(self._rows[0])]
        return self._render(row, date(2001, 1, 1)) != self._render(row, date(2032, 12, 31))

    def _render(self, row: Row, day: date | None = None) -> str:
        if not self._config.chat_template:
            return "".join(message["content"] for message in row.messages)
        values, day = self._config.chat_template_kwargs, day or self._config.template_date
        values = values if day is None else {**values, _DAY: day.strftime}
        return self._tokenizer.apply_chat_template(list(row.messages), tokenize=False, add_generation_prompt=True, **values)

    def _encode(self, text: str) -> list[int]:
        """A template writes the special tokens it wants into the text itself."""
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)


_DAY = "strftime_now"
"""Function of templates, by which they write the present day."""


def _template_problems(section: str, config: DataConfig, template: str | None) -> Iterator[Problem]:
    if not template:
        reason, fix = "the tokenizer of this model has no chat template", f"{section}.chat_template=false, or a model with one"
        yield problem(f"{section}.chat_template", True, "needs a template", reason, fix)
        return
    try:
        read = names_read(template)
    except TemplateError as error:
        fix = f"the file as the model's authors publish it, or {section}.chat_template=false"
        yield problem(f"{section}.chat_template", True, "needs a template that can be read", str(error), fix)
        return
    path, day, values = f"{section}.template_date", config.template_date, config.chat_template_kwargs
    if day is not None and _DAY not in template:
        yield problem(path, str(day), "has no effect", "the model's chat template writes no day", "leave it out")
    reason = f"it reads {', '.join(sorted(read))}" if read else "it reads the conversation alone"
    for name in sorted(values.keys() - read):
        near = difflib.get_close_matches(name, read, n=1)
        fix = f"did you mean {near[0]}?" if near else "leave it out"
        yield problem(f"{section}.chat_template_kwargs.{name}", values[name], "is not read by the model's chat template", reason, fix)


def demonstration(asked: Prompt | Row) -> str:
    """extra_info["answer"], as verl's converters store it, or else the ground truth: what a supervised warm start learns, and distillation
    shows."""
    answer = asked.extra_info.get("answer")
    return answer if isinstance(answer, str) else asked.ground_truth
