"""Table of transformers' models, kept on disk from one import of transformers to the next.

At its import, and again at that of its first model, transformers reads the sources of all its models, 1,600 files, for the names that each
has and the packages that each needs. The table that follows from them is kept in the user's cache under a digest of the installation's own
list of files and their hashes; one that has no such list, or is edited in place, is read as ever.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path
from wrapt import register_post_import_hook

Table = dict[frozenset[str], dict[str, set[str]]]
"""Names by module in the folder, these by packages that they need: of define_import_structure in transformers/utils/import_utils.py."""
_FORMAT = 1
"""Number of the file's form: another for what older versions of this module would misread, or have written otherwise."""


def keep_table() -> None:
    """To be called before transformers is imported; nothing happens after it."""
    if "transformers" not in sys.modules:
        register_post_import_hook(_keep, "transformers.utils.import_utils")


def _keep(module: Any) -> None:
    """Hook: transformers' own __init__ takes the function from `module` next."""
    read = module.define_import_structure

    def kept(module_path: str | Path, prefix: str | None = None) -> Table:
        file = _file_for(Path(module_path))
        if file is None:
            found: Table = read(module_path, prefix=prefix)
            return found
        table = _from_file(file, lambda: read(module_path))
        before = "" if prefix is None else f"{prefix}."
        return {needs: {before + name: names for name, names in modules.items()} for needs, modules in table.items()}

    module.define_import_structure = kept


def _from_file(file: Path, read: Callable[[], Table]) -> Table:
    with suppress(OSError, ValueError):
        return {frozenset(needs): {name: set(names) for name, names in modules.items()} for needs, modules in json.loads(file.read_bytes())}
    table = read()
    with suppress(OSError):  # a home that cannot be written
        _write(file, table)
    return table


def _write(file: Path, table: Mapping[frozenset[str], Mapping[str, set[str]]]) -> None:
    rows = [[sorted(needs), {name: sorted(names) for name, names in modules.items()}] for needs, modules in table.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as unfinished:
        (written := Path(unfinished) / file.name).write_text(json.dumps(rows))
        os.replace(written, file)


def _file_for(path: Path) -> Path | None:
    """None if `path` is not the folder of all models or its __init__, or if nothing says what is in it."""
    models = path.parent if path.name == "__init__.py" else path
    if models.parts[-2:] != ("transformers", "models"):  # each model has a table too, of its few files
        return None
    try:
        found = distribution("transformers")
    except PackageNotFoundError:
        return None
    record, directory = found.read_text("RECORD") or "", user_cache_path("moerl")
    is_listed = Path(str(found.locate_file("transformers/models"))) == models and "\ntransformers/models/" in record
    if not is_listed or not directory.is_absolute():  # a user without a home
        return None
    return directory / f"transformers-{_FORMAT}-{hashlib.blake2b(record.encode(), digest_size=16).hexdigest()}.json"
