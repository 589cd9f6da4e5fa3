"""YAML that somebody wrote, looked at before Hydra or anybody else builds what it says: text, of a bounded size however its aliases are
counted, and of names that are text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from moerl.types.errors import Problem, problem

_MOST_NODES, _MOST_LEVELS = 100_000, 100


def parse_yaml(text: str | bytes) -> Any:
    """Its value. Raises ValueError for text that cannot be read, or whose aliases would grow without bounds."""
    if (fault := yaml_fault(text)) is not None:
        raise ValueError(fault)
    return yaml.safe_load(text)


def yaml_fault(text: str | bytes) -> str | None:
    """Why it cannot be read; None if it can."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        root = yaml.compose(decoded, Loader=yaml.SafeLoader)
        if root is not None:
            _count(root, {}, ())
        yaml.safe_load(decoded)
    except RecursionError:
        return "nested too deeply"
    except (yaml.YAMLError, ValueError, TypeError) as error:  # TypeError: a list as a name
        return str(error) or type(error).__name__
    return None


def _count(node: yaml.Node, counted: dict[int, int], above: tuple[int, ...]) -> int:
    """Nodes in it, each alias with all it stands for. Raises ValueError."""
    if id(node) in above:
        raise ValueError("an alias stands inside of what it stands for")
    if len(above) > _MOST_LEVELS:
        raise ValueError(f"nested in more than {_MOST_LEVELS} levels")
    if id(node) not in counted:
        children = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        inside = (*above, id(node))
        counted[id(node)] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_count(each, counted, inside) for each in children))
        if counted[id(node)] > _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES} values, each alias counted with all that it stands for")
    return counted[id(node)]


def unreadable_files(config_dir: Path, names: Sequence[str]) -> Iterator[Problem]:
    """Files of `config_dir` that these names, or files of these names, may ask for, and that cannot be read."""
    files = {file: file.stem for file in sorted(config_dir.glob("*/*.yaml"))}
    wanted, seen = set(names), set[Path]()
    while new := [file for file, name in files.items() if name in wanted and file not in seen]:
        for file in new:
            seen.add(file)
            try:
                text = file.read_bytes()
                fault = yaml_fault(text)
            except OSError as error:
                text, fault = b"", str(error)
            if fault is not None:
                reason = fault.replace("<unicode string>", str(file))
                yield problem(str(file), "its text", "must be YAML that can be read", reason, "mend the file there, or save it as UTF-8")
            else:
                wanted |= {name for name in files.values() if name.encode(errors="replace") in text}
