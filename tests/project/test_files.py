"""Sizes and headers of the project's own Python files."""

import ast
from pathlib import Path

import moerl

ROOT = Path(moerl.__file__).resolve().parent.parent
SOURCES = sorted(file for folder in ("moerl", "megatron_patches") for file in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_no_file_is_too_long():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_too_long():
    long = {}
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{file.relative_to(ROOT)}:{node.name}"] = lines
    assert long == {}


def test_every_module_says_what_it_does():
    silent = [str(file.relative_to(ROOT)) for file in SOURCES if not ast.get_docstring(ast.parse(file.read_text()))]
    assert silent == []


def test_no_two_test_files_share_a_name():
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
