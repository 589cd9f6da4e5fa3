"""Table of transformers' models, kept on disk from one import of transformers to the next.

At its import, and again at that of its first model, transformers reads the sources of all its models, 1,600 files, for the names that each
has and the packages that each needs. The table that follows from them is kept in the user's cache under a digest of the installation's own
list of files and their hashes; one that has no such list, or is edited in place, is read as ever. The list also says which models have
image processors, for which transformers looks into the folders of all, nine openings each.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

from moerl.models.user_cache import cache_file, keep_file, read_kept

Table = dict[frozenset[str], dict[str, set[str]]]
"""Names by module in the folder, these by packages that they need: of define_import_structure in transformers/utils/import_utils.py."""
_PROCESSORS = "image_processing_*.py"
_SEARCH = Path.rglob
_FORMAT = 1
"""Number of the file's form: another for what older versions of this module would misread, or have written otherwise."""


def keep_table() -> None:
    """To be called before transformers is imported; nothing happens after it."""
    if "transformers" not in sys.modules:
        register_post_import_hook(_keep, "transformers.utils.import_utils")
        register_post_import_hook(_search_list, "transformers.utils.import_utils")
        register_post_import_hook(_search_folders, "transformers")


def _keep(module: Any) -> None:
    """Hook: transformers' own __init__ takes the function from `module` next."""
    read = getattr(module, "define_import_structure", None)
    if read is None:  # of another version, which may have another way
        return

    def kept(module_path: str | Path, prefix: str | None = None, **more: Any) -> Table:
        file = None if more else _file_for(Path(module_path))
        if file is None:
            found: Table = read(module_path, prefix=prefix, **more)
            return found
        table = _from_file(file, lambda: read(module_path))
        before = "" if prefix is None else f"{prefix}."
        return {needs: {before + name: names for name, names in modules.items()} for needs, modules in table.items()}

    module.define_import_structure = kept


def _search_list(module: Any) -> None:
    """Hook: until transformers is imported, its search for image processors is one of its list of files."""
    models = Path(module.__file__).parents[1] / "models"
    record = _record_of(models)
    if record is None:
        return
    listed = [models.parents[1] / line.partition(",")[0] for line in record.splitlines() if line.startswith("transformers/models/")]
    processors = [file for file in listed if file.match(_PROCESSORS)]

    def search(path: Path, pattern: str, **more: Any) -> Iterator[Path]:
        return iter(processors) if (path, pattern) == (models, _PROCESSORS) else _SEARCH(path, pattern, **more)

    execute: Any = getattr(module, "direct_transformers_import", None)

    def again(*args: Any, **more: Any) -> Any:
        """Transformers' processing_utils executes transformers' own __init__ a second time."""
        Path.rglob = search  # type: ignore[assignment, method-assign]
        try:
            return execute(*args, **more)
        finally:
            _search_folders()

    Path.rglob = search  # type: ignore[assignment, method-assign]
    if execute is not None:
        module.direct_transformers_import = again


def _search_folders(_: Any = None) -> None:
    Path.rglob = _SEARCH  # type: ignore[method-assign]


def _from_file(file: Path, read: Callable[[], Table]) -> Table:
    with suppress(ValueError, TypeError, AttributeError):  # none, or one that is damaged
        rows = json.loads(read_kept(file))
        if found := {frozenset(needs): {name: set(names) for name, names in modules.items()} for needs, modules in rows}:
            return found
    table = read()
    rows = [[sorted(needs), {name: sorted(names) for name, names in modules.items()}] for needs, modules in table.items()]
    keep_file(file, json.dumps(rows).encode())
    return table


def _file_for(path: Path) -> Path | None:
    """None if `path` is not the folder of all models or its __init__, if nothing says what is in it, or if the user has no home."""
    models = path.parent if path.name == "__init__.py" else path
    record = _record_of(models)
    return (
        None
        if record is None
        else cache_file(f"transformers-{_FORMAT}-{hashlib.blake2b(record.encode(), digest_size=16).hexdigest()}.json")
    )


def _record_of(models: Path) -> str | None:
    """The installation's list of files, one a line, with hashes; likewise."""
    if models.parts[-2:] != ("transformers", "models"):  # each model has a table too, of its few files
        return None
    try:
        found = distribution("transformers")
    except PackageNotFoundError:
        return None
    record = found.read_text("RECORD") or ""
    is_of = Path(str(found.locate_file("transformers/models"))) == models and "\ntransformers/models/" in record
    return record if is_of else None
