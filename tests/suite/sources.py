"""Tests and their markers as their sources state them: reading them costs no import of torch, as collecting them would."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent

Cases = list[frozenset[str]]
"""The sets of markers that the cases of a test have: one set, or one more for each marker that only some cases have."""


@cache
def markers_by_test(file: Path) -> dict[str, Cases]:
    """Name of each test of a file, `Class::test` within a class, and the markers of its cases."""
    tree = ast.parse(file.read_text())
    named = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    module = _markers(named.get("pytestmark"), named)
    return {name: _cases(module, decorators, named) for name, decorators in _test_functions(tree.body, "", [])}


def is_test(node_id: str, root: Path = ROOT) -> bool:
    """Whether a file of the tests defines this test; parameters in brackets are left to the collection."""
    path, _, name = node_id.partition("[")[0].partition("::")
    file = root / path
    return file.is_file() and name in markers_by_test(file)


def _test_functions(body: list[ast.stmt], prefix: str, above: list[ast.expr]) -> Iterator[tuple[str, list[ast.expr]]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _test_functions(node.body, f"{prefix}{node.name}::", above + node.decorator_list)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield prefix + node.name, above + node.decorator_list


def _cases(module: frozenset[str], decorators: list[ast.expr], named: dict[str, ast.expr]) -> Cases:
    parametrized = [decorator for decorator in decorators if _is_parametrize(decorator)]
    every = module.union(*(_markers(decorator, named) for decorator in decorators if decorator not in parametrized))
    some = {markers for decorator in parametrized for markers in _of_parameters(decorator, named)}
    return sorted({every, *(every | markers for markers in some)}, key=sorted)


def _is_parametrize(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize"


def _of_parameters(decorator: ast.Call, named: dict[str, ast.expr]) -> Iterator[frozenset[str]]:
    """Markers of single parameters: `pytest.param(..., marks=...)` in the decorator or in a list that the module names."""
    for argument in decorator.args[1:]:
        value = named.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
        for node in ast.walk(value):
            if isinstance(node, ast.keyword) and node.arg == "marks":
                yield _markers(node.value, named)


def _markers(node: ast.expr | None, named: dict[str, ast.expr]) -> frozenset[str]:
    """Every `pytest.mark.NAME` of an expression, through names of the module."""
    if node is None:
        return frozenset()
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "pytest.mark":
            found.add(part.attr)
        elif isinstance(part, ast.Name) and part.id in named:
            found |= _markers(named[part.id], {name: value for name, value in named.items() if name != part.id})
    return frozenset(found)
