"""Tokenizer for processes that hold no model, without transformers: the backend that transformers made of a checkpoint's files, and its
chat template. transformers_tokenizer.py writes the form that it is made of.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Literal, Protocol

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

_CLEAN_UPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"),
    (" 're", "'re"),
)  # fmt: skip


class Tokenizer(Protocol):
    """Tokenizer as the driver and collectors use it. Implementations: PlainTokenizer, and those of transformers."""

    chat_template: str | None
    eos_token_id: int | None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], add_generation_prompt: bool, **values: Any
    ) -> str:
        """Text of a conversation. `values`: more names for the template. Raises jinja2.TemplateError for one that the template refuses, and
        whatever else the template's own code does."""

    def encode(self, text: str, *, add_special_tokens: Literal[False], verbose: bool = False) -> list[int]:
        """`verbose`: of transformers, which says that a text is long."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForm:
    """Contents of a PlainTokenizer, plain enough for JSON."""

    backend: str
    """Text that the library tokenizers reads, as its to_str writes it."""
    splits_special_tokens: bool
    cleans_up: bool
    """Spaces before punctuation are taken out of decoded text."""
    chat_template: str | None
    special_tokens: Mapping[str, str]
    """Names of transformers and texts; the template sees them."""
    eos_token_id: int | None


class PlainTokenizer:
    """Tokenizer made of its plain form; it can be pickled."""

    def __init__(self, form: PlainForm):
        self._form, self.chat_template, self.eos_token_id = form, form.chat_template, form.eos_token_id
        self._backend = Backend.from_str(form.backend)
        self._backend.encode_special_tokens = form.splits_special_tokens

    def __reduce__(self) -> tuple[type["PlainTokenizer"], tuple[PlainForm]]:
        """By its form: the library's own pickle leaves out whether special tokens are split."""
        return PlainTokenizer, (self._form,)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], add_generation_prompt: bool, **values: Any
    ) -> str:
        assert self.chat_template is not None, "this tokenizer has no chat template"
        names = {"tools": None, "documents": None, **self._form.special_tokens, **values}
        return _compiled(self.chat_template).render(names, messages=messages, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str, *, add_special_tokens: Literal[False], verbose: bool = False) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if self._form.cleans_up:
            for found, instead in _CLEAN_UPS:
                text = text.replace(found, instead)
        return text


def names_read(template: str) -> set[str]:
    """Values beside the conversation that a chat template reads. Raises jinja2.TemplateError."""
    environment = _environment()
    return meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys() - {"messages", "add_generation_prompt"}


@cache
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> Environment:
    """As transformers renders templates of chats: in a sandbox, with these functions and extensions."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, around what an assistant wrote: its text, as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> Any:
        return caller()


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
