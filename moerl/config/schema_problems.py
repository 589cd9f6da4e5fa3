"""pydantic's errors as `Problem`s: the path without union tags, the type in words, the field's own description, the nearest name.

Works on the JSON schema that pydantic derives from `RunConfig`, so it knows every section without naming one.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import ErrorDetails

from moerl.config.compose import NEAR
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.strict import Strict
from moerl.types.errors import NOT_SET, Problem, problem

Node = Mapping[str, Any]
"""A JSON schema, or a part of one."""

LEFT_OUT = {
    "algorithm.name": (
        "an algorithm is what configs/algorithm/NAME.yaml makes it of",
        "algorithm=NAME in the command, or /algorithm: NAME among the recipe's defaults",
    ),
    "rollout.over_sampling": (
        "the first to finish of more groups than needed are the shorter ones, and the prompts of the others are lost",
        "max_staleness=1, which starts twice as many groups as a step takes and trains them all, with rollout.partial=true; or "
        "spare_groups, which puts the others off",
    ),
}
"""Settings that people know from elsewhere: path -> why there is none, what to write instead."""


@cache
def json_schema() -> Node:
    """JSON schema of a run's settings, each with the string under it. Finding those in the sources takes a tenth of a second and more,
    which a run whose settings are right does without."""
    Strict.__pydantic_config__["use_attribute_docstrings"] = True
    return TypeAdapter(RunConfig).json_schema()


def problem_of(error: ErrorDetails) -> Problem:
    path, node, owner = _locate(error["loc"])
    match error["type"]:
        case "unexpected_keyword_argument":
            return _unknown(path, error["input"], owner)
        case "missing" if isinstance(error["loc"][-1], str):
            return _missing(path, node, "nothing sets it and it has no default")
        case "missing":  # an element of a list of fixed length
            return _wrong(path.rpartition(".")[0], owner, error)
        case "union_tag_not_found" | "union_tag_invalid":
            tag = error["ctx"]["discriminator"].strip("'")
            value = error["ctx"].get("tag", NOT_SET)
            rule = f"must be one of {error['ctx']['expected_tags']}" if "expected_tags" in error["ctx"] else "must be given"
            names = list(node["discriminator"]["mapping"])
            reason = "it decides which settings the section has"
            return problem(f"{path}.{tag}", value, rule, reason, _nearest(f"{path}.{tag}=", value, names))
    return _wrong(path, node, error)


def left_open(path: str) -> Problem:
    """Problem of a setting whose value is `???`."""
    _, node, _ = _locate(path.split("."))
    return _missing(path, node, "a file or an override leaves it open with ???")


def _missing(path: str, node: Node, reason: str) -> Problem:
    reason = ": ".join(filter(None, [reason, description(node)]))
    return problem(path, NOT_SET, "must be given", reason, f"write {path}=<{words(node)}>")


def _unknown(path: str, value: object, owner: Node) -> Problem:
    if path in LEFT_OUT:
        return problem(path, value, "is not a setting", *LEFT_OUT[path])
    head, _, name = path.rpartition(".")
    names = list(owner["properties"])
    near = difflib.get_close_matches(name, names, n=1)
    elsewhere = sorted({p for p in _paths(json_schema(), "") if p.rpartition(".")[2] == name and p != path})
    # Models beside the policy have sections of its names.
    elsewhere = [path for path in elsewhere if path.startswith("train.")] or elsewhere
    here = near if near or elsewhere else [other for other in names if other.startswith(name)][:1]
    meant = [".".join(filter(None, [head, other])) for other in here] if here else elsewhere
    fix = f"did you mean {' or '.join(meant)}?" if meant else f"leave it out (~{path} if a file sets it), or use one of those"
    where = head if head else "a run"
    return problem(path, value, "is not a setting", f"{where} has {', '.join(names)}", fix)


def _wrong(path: str, node: Node, error: ErrorDetails) -> Problem:
    value, wanted = error["input"], words(node)
    is_type = error["type"].endswith("_type")
    general = "a value of another type is refused, so that a slip is seen" if is_type else "other values have no meaning here"
    reason = description(node) or general
    choices = [str(choice) for choice in node.get("enum", ())]
    if error["type"] == "string_type" and isinstance(value, int | float) and not choices:  # YAML's, of digits, 1e3, true or 12:00:00
        fix = f'in quotes: \'{path}="..."\', in a file {path.rpartition(".")[2]}: "..."'
        return problem(path, value, f"must be {wanted}", reason, fix)
    return problem(path, value, f"must be {wanted}", reason, _nearest(f"{path}=", value, choices, wanted))


# -- walking the schema ----------------------------------------------------------------------------------------


def _locate(loc: Sequence[int | str]) -> tuple[str, Node, Node]:
    """The path as a person writes it, the schema there, and the schema of the section around it."""
    names: list[str] = []
    node = owner = resolve(json_schema())
    for part in loc:
        if "discriminator" in node and part in node["discriminator"]["mapping"]:
            node = resolve({"$ref": node["discriminator"]["mapping"][part]})
            continue
        names.append(str(part))
        owner, node = node, resolve(_child(node, part))
    return ".".join(names), node, owner


def _paths(node: Node, prefix: str) -> Iterator[str]:
    node = resolve(node)
    for option in node.get("oneOf", ()):
        yield from _paths(option, prefix)
    for name, child in node.get("properties", {}).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path
        yield from _paths(child, path)


def resolve(node: Node) -> Node:
    """`node` behind its references and as the non-null side of an optional value; its description is that of the field itself, which a
    section's own (`section`) does not replace."""
    outer = node
    while True:
        if "$ref" in node:
            node = json_schema()["$defs"][node["$ref"].rpartition("/")[2]]
        elif "anyOf" in node:
            node = next(option for option in node["anyOf"] if option.get("type") != "null")
        else:
            break
    section = node.get("description", "") if "properties" in node else ""
    return {**node, "description": outer.get("description", ""), "section": section, "optional": "anyOf" in outer}


def words(node: Node) -> str:
    """Values that a resolved node takes, for a person."""
    text = _plain_words(node)
    bounds = [f"{sign} {node[key]}" for key, sign in _BOUNDS.items() if key in node]
    text = " ".join([text, " and ".join(bounds)]) if bounds else text
    return f"{text}, or null" if node.get("optional") else text


_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_TYPE_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a section of names and values",
}


def _plain_words(node: Node) -> str:
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    if "properties" in node:
        return f"a section with {', '.join(node.get('required', node['properties']))}"
    if "discriminator" in node:
        return f"a section with {node['discriminator']['propertyName']}"
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])} values"
    if node.get("format") == "date":
        return "a day as 2026-11-30"
    return _TYPE_WORDS.get(node.get("type", ""), "another value")


def _child(node: Node, part: int | str) -> Node:
    if isinstance(part, int):
        return node["prefixItems"][part] if "prefixItems" in node else node.get("items", {})
    if part in node.get("properties", {}):
        return node["properties"][part]
    further = node.get("additionalProperties")
    return further if isinstance(further, Mapping) else {}


def description(node: Node) -> str:
    return " ".join(node.get("description", "").split())


def _nearest(prefix: str, value: object, choices: Sequence[str], otherwise: str = "") -> str:
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=NEAR)
    if near:
        return f"{prefix}{near[0]}"
    return f"{prefix}<{'one of ' + ', '.join(choices) if choices else otherwise}>"
