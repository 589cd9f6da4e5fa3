"""Reference of every setting, from the JSON schema that pydantic derives: the text of `moerl explain` and of the site's page are one."""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from moerl.config.schema_problems import LEFT_OUT, Node, description, json_schema, resolve, words
from moerl.types.errors import ConfigError, Problem, problem


@dataclass(frozen=True, kw_only=True)
class ReferenceEntry:
    """A setting, or a section of them."""

    path: str
    """Dotted; NAME stands for a name of the user's choice, INDEX for a place in a list."""
    takes: str
    """Type, bounds and default in words."""
    text: str
    """The string under the field in the schema."""
    only: tuple[str, ...] = ()
    """Choices with which there is this setting, e.g. data.kind=files; empty: with all."""
    is_section: bool = False
    is_open: bool = False
    """Entries beneath it are named by the user, or numbered, and have no text of their own."""

    @property
    def lines(self) -> list[str]:
        """One line of facts, then the text: the same on the terminal and on the page."""
        only = f"; only with {' or '.join(self.only)}" if self.only else ""
        return [f"{self.takes}{only}", *([self.text] if self.text else [])]


def explanation(key: str) -> str:
    """The text of the setting or section; of a section also every field; of what is beneath an open one, that one's. Empty key: the
    sections of a run. Raises ConfigError."""
    found = [setting for setting in settings() if re.fullmatch(_pattern(setting.path) + (r"(\..+)?" if setting.is_open else ""), key)]
    if key and not found:
        raise ConfigError([_unknown(key)])
    fields = [setting for setting in settings() if re.fullmatch(_pattern(parent_of(setting.path)), key)]
    blocks = [*found, *(field for field in fields if field not in found)]
    return "".join("\n".join([block.path, *(f"    {line}" for line in block.lines)]) + "\n" for block in blocks)


@cache
def settings() -> tuple[ReferenceEntry, ...]:
    """Every setting, a section before its fields."""
    merged: dict[ReferenceEntry, list[str]] = {}
    for setting in _fields(json_schema(), "", ()):
        merged.setdefault(replace(setting, only=()), []).extend(setting.only)
    return tuple(replace(setting, only=tuple(dict.fromkeys(only))) for setting, only in merged.items())


def _fields(section: Node, prefix: str, only: tuple[str, ...]) -> Iterator[ReferenceEntry]:
    for name, node in section.get("properties", {}).items():
        yield from _setting(node, f"{prefix}{name}", only, is_required=name in section.get("required", ()))


def _setting(field: Node, path: str, only: tuple[str, ...], *, is_required: bool) -> Iterator[ReferenceEntry]:
    node = resolve(field)
    named = node.get("additionalProperties")
    named = named if isinstance(named, dict) and "$ref" in named else None
    listed = node.get("items", {})
    listed = listed if "$ref" in listed or "discriminator" in listed else None
    has_fields = named is not None or "properties" in node or "discriminator" in node
    text = " ".join(filter(None, [description(node), " ".join(node["section"].split())]))
    yield ReferenceEntry(
        path=path, takes=_takes(field, node, is_required, has_fields), text=text, only=only, is_section=has_fields or listed is not None,
        is_open=not has_fields and listed is None and node.get("type") in ("object", "array"),
    )  # fmt: skip
    if named is not None:
        yield from _setting(named, f"{path}.NAME", only, is_required=False)
    elif listed is not None:
        yield from _setting(listed, f"{path}.INDEX", only, is_required=False)
    elif "discriminator" in node:
        yield from _chosen(node, path, only)
    else:
        yield from _fields(node, f"{path}.", only)


def _chosen(node: Node, path: str, only: tuple[str, ...]) -> Iterator[ReferenceEntry]:
    """The fields of a section that one of them, the tag, decides about."""
    tag, kinds = node["discriminator"]["propertyName"], node["discriminator"]["mapping"]
    options = {kind: resolve({"$ref": reference}) for kind, reference in kinds.items()}
    text = " ".join(f"{kind}: {' '.join(option['section'].split())}" for kind, option in options.items() if option["section"])
    yield ReferenceEntry(path=f"{path}.{tag}", takes=f"one of {', '.join(kinds)}; must be given with the section", text=text, only=only)
    found = {
        kind: [setting for setting in _fields(option, f"{path}.", ()) if setting.path != f"{path}.{tag}"]
        for kind, option in options.items()
    }
    for kind, fields in found.items():
        for setting in fields:
            is_in_all = all(setting in others for others in found.values())
            yield replace(setting, only=only if is_in_all else (f"{path}.{tag}={kind}",))


def _takes(field: Node, node: Node, is_required: bool, is_section: bool) -> str:
    takes = ("a section, or null" if node["optional"] else "a section") if is_section else words(node)
    if is_required and not is_section:
        return f"{takes}; must be given"
    return f"{takes}; default {json.dumps(field['default'])}" if "default" in field else takes


def _unknown(key: str) -> Problem:
    if key in LEFT_OUT:
        return problem("KEY", key, "is not a setting", *LEFT_OUT[key])
    paths = [setting.path for setting in settings()]
    parent = next(start for start in _parents(key) if not start or start in paths)
    beside = [path for path in paths if parent_of(path) == parent]
    same_name = [path for path in paths if path.rpartition(".")[2] == key.rpartition(".")[2]]
    near = list(dict.fromkeys([*difflib.get_close_matches(key, beside, n=1), *same_name[:3], *difflib.get_close_matches(key, paths, n=1)]))
    has = f"{parent if parent else 'a run'} has {', '.join(path.rpartition('.')[2] for path in beside) if beside else 'a value of its own'}"
    return problem(
        "KEY",
        key,
        "is not a setting",
        has,
        f"did you mean {' or '.join(near)}?" if near else "name one of those" if beside else f"moerl explain {parent}",
    )


def _parents(path: str) -> Iterator[str]:
    while path:
        path = parent_of(path)
        yield path


def parent_of(path: str) -> str:
    """Path of the section that has it; empty: the run."""
    return path.rpartition(".")[0]


def _pattern(path: str) -> str:
    """A regular expression for the path, and for what a user wrote in place of NAME and INDEX."""
    return re.escape(path).replace("NAME", r"[^.]+").replace("INDEX", r"(\d+|INDEX)")
