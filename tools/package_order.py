"""Order of moerl's packages, from what their files import: `python tools/package_order.py` draws it into docs/architecture.md.

A package is a folder or a file of moerl/ itself. Imports inside functions count, and those for types alone.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- order: begin -->", "<!-- order: end -->"

Graph = Mapping[str, set[str]]
"""name -> the names that it imports"""


def imported(file: Path, root: Path = ROOT) -> Iterator[str]:
    """Absolute dotted names, also of imports inside functions; `from moerl import run` counts as moerl.run."""
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Files of the package by their dotted names, but for its face, moerl/__init__.py."""
    files = (file.relative_to(root).with_suffix("") for file in (root / "moerl").rglob("*.py"))
    parts = (file.parts[:-1] if file.name == "__init__" else file.parts for file in files)
    named = {".".join(each): root.joinpath(*each) for each in parts if len(each) > 1}
    return {name: path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for name, path in named.items()}


def file_graph(root: Path = ROOT) -> dict[str, set[str]]:
    files = modules(root)

    def module_of(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    return {module: {module_of(name) for name in imported(file, root)} - {module, ""} for module, file in files.items()}


def grouped(graph: Graph, group: Callable[[str], str]) -> dict[str, set[str]]:
    """The graph of groups of its names."""
    together: dict[str, set[str]] = {group(name): set() for name in graph}
    for name, others in graph.items():
        together[group(name)] |= {group(other) for other in others} - {group(name)}
    return together


def folder_of(module: str) -> str:
    """The folder that the file lies in; a file of moerl/ itself is its own."""
    is_folder = ROOT.joinpath(*module.split(".")).is_dir()
    return module if is_folder or module.count(".") == 1 else module.rpartition(".")[0]


def package_of(module: str) -> str:
    return module.split(".")[1]


def floors(graph: Graph) -> list[list[str]]:
    """Names from the bottom up: each imports names of floors below its own alone. CycleError names those that import each other."""
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    found = []
    while sorter.is_active():
        found.append(sorted(sorter.get_ready()))
        sorter.done(*found[-1])
    return found


def drawn(root: Path = ROOT) -> str:
    """The order as a table, top floor first; of a package's imports, those that no other of them imports."""
    graph = grouped(file_graph(root), package_of)
    files = modules(root)
    rows = ["| floor | package | what lives there | stands on |", "| --- | --- | --- | --- |"]
    for number, floor in reversed(list(enumerate(floors(graph)))):
        for name in floor:
            text = (ast.get_docstring(ast.parse(files[f"moerl.{name}"].read_text())) or "").partition("\n\n")[0]
            nearest = ", ".join(f"`{each}`" for each in sorted(graph[name] - _below(graph, graph[name])))
            rows.append(f"| {number} | `{name}` | {' '.join(text.split())} | {nearest} |")
    return "\n".join(rows)


def _below(graph: Graph, names: Iterable[str]) -> set[str]:
    """What `names` import, directly or by way of others."""
    waiting, seen = list(names), set()
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def page(text: str) -> str:
    """The text of the page with the order of today between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{drawn()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
