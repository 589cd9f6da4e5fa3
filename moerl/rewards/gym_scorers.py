"""Scorers of reasoning-gym that evaluate a response as Python, by `eval` or by sympy's parser, and what they are given in place of both.

A list is read as a literal, and an expression only if it has nothing but numbers, operators, variables and functions of mathematics. For
any other text the scorer is told, by an exception that it catches, that there is nothing to read.
"""

import ast
import builtins
import keyword
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

LITERAL_TASKS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
EXPRESSION_TASKS = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
_TOKEN = re.compile(r"\s+|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|\*\*|[-+*/^(),!]")
_MATHEMATICS = frozenset((
    "E", "I", "pi", "exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan",
    "acot", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "erf", "erfi", "gamma",
))  # fmt: skip


def disarm_scorers() -> None:
    """Replace in the modules of these tasks what would evaluate responses. Imports the package; safe to call twice."""
    import sympy
    from reasoning_gym.factory import DATASETS

    parse = _mathematics_alone(sympy.parse_expr, vars(sympy))
    for task in (*LITERAL_TASKS, *EXPRESSION_TASKS):
        names = vars(sys.modules[DATASETS[task][0].__module__])
        if task in LITERAL_TASKS:
            names["eval"] = ast.literal_eval  # a module's own name goes before the builtin
        for name, value in list(names.items()):
            if value is sympy:
                names[name] = _with_parser(sympy, parse)
            elif value is sympy.parse_expr:
                names[name] = parse


def _with_parser(sympy: ModuleType, parse: Callable[..., Any]) -> ModuleType:
    """A view of the package for one module, since others of the process may want the parser as it is."""
    view = ModuleType(sympy.__name__)
    vars(view).update(vars(sympy))
    vars(view)["parse_expr"] = parse
    return view


def _mathematics_alone(parse: Callable[..., Any], namespace: dict[str, Any]) -> Callable[..., Any]:
    def parse_mathematics(text: str, *arguments: Any, **named: Any) -> Any:
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None or not _is_harmless(token["name"], namespace):
                raise ValueError(f"not an expression of mathematics from character {at} on: {text[at : at + 20]!r}")
            at = token.end()
        return parse(text, *arguments, **named)

    return parse_mathematics


def _is_harmless(name: str | None, namespace: dict[str, Any]) -> bool:
    """No name, a function of mathematics, or a variable: no word of Python or sympy, among which are some that run code."""
    if name is None or name in _MATHEMATICS:
        return True
    is_word = keyword.iskeyword(name) or hasattr(builtins, name) or callable(namespace.get(name))
    return not is_word and "__" not in name
