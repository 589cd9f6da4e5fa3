"""Parts of an algorithm: what any may need, the base of those of the package, and one from outside of it."""

import importlib
import importlib.util
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from moerl.config.schema.strict import Strict

Need = Literal["reference", "old_logprobs", "whole_minibatch", "values", "process_rewards", "greedy_sample", "tokens"]
"""reference: log-probs of the frozen initial model. old_logprobs: those of the old policy, before the update begins. whole_minibatch: the
policy's own of a whole mini-batch, before each of its updates. values: of a critic. process_rewards: of a model of outcomes.
greedy_sample: one more completion of every prompt, at temperature 0. tokens: an advantage's, ids and log-probs of the server, which the
driver then fetches."""


class AlgorithmPart(Strict):
    """A part of an algorithm that the package has and whose needs follow from no setting: an advantage, an objective, a correction."""

    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class CustomPart(Strict):
    """A class of one's own."""

    kind: Literal["custom"]
    path: str
    """`file.py:Class` or `package.module:Class` of a dataclass, whose fields are its settings."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[Need]:
        """The class's own `needs`."""
        needs = getattr(load_class(self.path), "needs", ())
        return frozenset(needs) if isinstance(needs, set | frozenset | tuple | list) else frozenset()

    def build(self) -> Any:
        """The object. pydantic.ValidationError for settings that the class does not take; it is no error here to give more."""
        return TypeAdapter(load_class(self.path)).validate_python(self.settings)


def split_path(path: str) -> tuple[str, str]:
    """("file.py" or "package.module", "name")."""
    source, colon, name = path.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise ValueError(f"{path!r} is neither `file.py:name` nor `package.module:name`")
    return source, name


def load_class(path: str) -> type:
    """Class at `file.py:Class` or `package.module:Class`. A file is run once, as a module that can import its neighbours. ValueError for
    another form; ImportError, AttributeError, or what the module itself raises."""
    source, name = split_path(path)
    module = _module_of_file(Path(source).resolve()) if source.endswith(".py") else importlib.import_module(source)
    found = getattr(module, name)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no class")
    return found


def reread_if_changed(path: str) -> None:
    """A file that was mended since it was run is run anew when it is next asked for. For checks: a run keeps what it has."""
    file = Path(split_path(path)[0]).resolve()
    name = f"{_PREFIX}{file.stem}"
    if name in sys.modules and _CHANGED.get(str(file)) != file.stat().st_mtime_ns:
        del sys.modules[name]


_PREFIX = "moerl_custom_"
_CHANGED: dict[str, int] = {}
"""Times of the last change of files, as they were run."""
_NEIGHBOURS: dict[str, ModuleType] = {}
_FOLDERS: list[str] = []


def modules_of_files() -> list[ModuleType]:
    """Modules that were run from files, and those beside them which they imported: other processes cannot import them by their names."""
    if not _FOLDERS:  # each update asks, and there are thousands of modules
        return []
    return [module for name, module in sys.modules.items() if name.startswith(_PREFIX) or name in _NEIGHBOURS]


def folders_of_files() -> list[str]:
    """Folders of files that were run, from which they may import more later, in other processes too."""
    return list(_FOLDERS)


def _module_of_file(file: Path) -> ModuleType:
    name = f"{_PREFIX}{file.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle and dataclasses look for it
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    if str(file.parent) not in _FOLDERS:
        _FOLDERS.append(str(file.parent))
    before = set(sys.modules)
    _CHANGED[str(file)] = file.stat().st_mtime_ns
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    for other in set(sys.modules) - before:
        if _is_neighbour(sys.modules[other], file.parent):
            _NEIGHBOURS[other] = sys.modules[other]
    return module


def _is_neighbour(module: ModuleType, folder: Path) -> bool:
    """Whether it lies beneath the folder and is no installed one: a home or a checkout has environments beneath it, and files of Python and
    moerl, which every process imports for itself."""
    file = Path(getattr(module, "__file__", None) or "/")
    if not file.is_relative_to(folder) or file.is_relative_to(sysconfig.get_path("stdlib")):
        return False
    own = {__name__.partition(".")[0], "megatron_patches"}
    return {"site-packages", "dist-packages"}.isdisjoint(file.relative_to(folder).parts) and module.__name__.partition(".")[0] not in own
