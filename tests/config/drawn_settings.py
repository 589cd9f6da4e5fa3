"""Hypothesis strategies over the whole schema of a run: overrides of every type, mostly of the right one, often of absurd size.

Values are drawn by the JSON schema that pydantic derives, so that a new setting is drawn as soon as there is one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st
from pydantic import TypeAdapter

from moerl.config.rules.megatron_rules import megatron_fields
from moerl.config.schema.run_config import RunConfig

Node = Mapping[str, Any]

SCHEMA: Node = TypeAdapter(RunConfig).json_schema()

SIZES = [*range(1, 13), 16, 24, 32, 36, 48, 61, 64, 94, 96, 100, 128, 160, 192, 256, 257, 512, 1000, 1024, 4096, 7168, 8192, 131072]
ABSURD = [0, -1, -(2**70), 2**20, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 10**400]
NUMBERS = [0.0, -0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.5, 2.0, 10.0, 30, 600.0, -1.0, 1]
NUMBERS += [1e-8, 5e-324, 1e308, float("inf"), float("-inf"), float("nan"), 10**400]
TEXTS = [
    "", " ", ".", "..", "/", "~", "\0", "a\0b", "x" * 300, "x" * 5000, "???", "null", "nan", "1", "a/b", "a:b", "sum", "\n", "${name}",
    "\ud800", "a\udcffb", "é", "日本", "\u202e", "\U0001f600", "a(", "(?P<a>)(?P<a>)", "a{99999999999}", "((a*)*)*", "[z-a]", "file.py:f",
    "json:loads", "json.decoder:JSONDecoder", "numpy:array", "..:f", ".:f", "math:sqrt", "a.b.c:d", ":", "::", "/dev/null", "/dev/null:f",
    "/dev/null/a", "x.parquet", "x.jsonl", "/data", "/data:/data:ro", "wandb/key", "hf", "deepseek-v3", "kimi-k2", "glm-4.5",
    "qwen3-235b-a22b", "chain_sum", "countdown", "UNLIMITED", "10", "0", "1-0", "1:2:3:4", "-", "99999999999999999999", "00:10:00",
    "1-00:00:00",
]  # fmt: skip

texts = st.sampled_from(TEXTS) | st.text(max_size=8)
scalars = st.none() | st.booleans() | st.sampled_from(SIZES + ABSURD) | st.sampled_from(NUMBERS) | texts
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.integers(-2, 2), inner, max_size=3), max_leaves=6
)


def resolved(node: Node) -> Node:
    while "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def of_type(node: Node) -> st.SearchStrategy[Any]:
    """Values that the schema has a place for there, if not always in the right range."""
    node = resolved(node)
    for choice in ("anyOf", "oneOf"):
        if choice in node:
            return st.one_of([of_type(option) for option in node[choice]])
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    return _of_kind(node)


def _of_kind(node: Node) -> st.SearchStrategy[Any]:
    match node.get("type"):
        case "integer":
            return st.sampled_from(SIZES * 4 + ABSURD)
        case "number":
            return st.sampled_from(NUMBERS)
        case "string":
            return texts
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array" if "prefixItems" in node:
            return st.tuples(*(of_type(item) for item in node["prefixItems"])).map(list)
        case "array":
            return st.lists(of_type(node["items"]), max_size=3)
        case "object" if "properties" in node:
            return st.deferred(lambda: _section(node))
        case "object" if isinstance(node.get("additionalProperties"), dict):
            return st.dictionaries(texts, of_type(node["additionalProperties"]), max_size=2)
        case "object":
            return st.dictionaries(texts | st.sampled_from(sorted(megatron_fields())), junk, max_size=3)
    return junk


def _section(node: Node) -> st.SearchStrategy[dict[str, Any]]:
    properties, required = node["properties"], node.get("required", ())
    fields = {name: of_type(child) for name, child in properties.items()}
    always = {name: fields[name] for name in (*required, *(name for name in ("kind", "name") if name in fields))}
    return st.fixed_dictionaries(always, optional={name: field for name, field in fields.items() if name not in always})


def paths(node: Node = SCHEMA, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Every setting and section, with its schema; entries of mappings under the name `sum`."""
    if path:
        yield path, node
    node = resolved(node)
    for choice in ("anyOf", "oneOf"):
        for option in node.get(choice, ()):
            yield from (found for found in paths(option, path) if found[0] != path)
    for name, child in node.get("properties", {}).items():
        yield from paths(child, (*path, name))
    if isinstance(node.get("additionalProperties"), dict):
        yield from paths(node["additionalProperties"], (*path, "sum"))


PATHS = sorted(paths(), key=lambda found: found[0])
LEAVES = [(path, node) for path, node in PATHS if "properties" not in resolved(node)]


SECTIONS = sorted({path[:-1] for path, _ in LEAVES})


@st.composite
def overrides(draw: st.DrawFn) -> list[tuple[tuple[str, ...], Any]]:
    """One to five settings with values, often of one section, some of them of no type or of no name that the schema knows."""
    section = draw(st.sampled_from(SECTIONS))
    near = [(path, node) for path, node in LEAVES if path[:-1] == section]
    anywhere = draw(st.sampled_from([near, near, LEAVES, LEAVES, PATHS]))
    return [_change(draw, *draw(st.sampled_from(anywhere))) for _ in range(draw(st.sampled_from([1, 1, 2, 2, 3, 5])))]


def _change(draw: st.DrawFn, path: tuple[str, ...], node: Node) -> tuple[tuple[str, ...], Any]:
    kind = draw(st.integers(0, 39))
    if kind == 0:
        path = (*path[:-1], draw(texts))
    elif kind == 1:
        path = (*path, draw(texts))
    elif kind == 2 and len(path) > 1:
        path = path[1:]
    return path, draw(junk if kind < 4 else of_type(node))


GROUPS = ["recipe", "algorithm", "data", "eval", "model", "layout"]


def words() -> st.SearchStrategy[str]:
    """Of a command line, in Hydra's grammar or almost."""
    names = st.sampled_from([".".join(path) for path, _ in PATHS]) | st.sampled_from(GROUPS) | texts
    return st.builds("{}{}{}{}".format, st.sampled_from(["", "", "", "+", "~"]), names, st.sampled_from(["=", "=", "=", "@"]), scalars)
