"""Distributions that only a machine with GPUs installs, without what is compiled: fetched once for a user, and read."""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import griffe

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moerl" / "wheels"
PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in (17, 18, 27, 28, 31, 34, 35)]


def pinned(engine: str, name: str) -> str:
    return re.search(rf"^{name}==(.+)$", (Path(__file__).parents[2] / "scripts" / "engines" / f"{engine}.txt").read_text(), re.MULTILINE)[1]


@cache
def unpacked(name: str, version: str) -> Path:
    """Folder with the Python files and the metadata of the distribution for Python 3.12 on x86-64."""
    folder = CACHE / f"{name}-{version}"
    if not folder.exists():
        with _archive(name, version) as (archive, partial):
            kept = [file for file in archive.namelist() if file.endswith(".py") or ".dist-info/" in file]
            archive.extractall(partial, kept)
            if not folder.exists():
                partial.rename(folder)
    return folder


def strings(name: str, version: str, files: Sequence[str], pattern: bytes) -> set[str]:
    """What `pattern` finds in compiled files of the distribution, of which nothing else is kept."""
    found = CACHE / f"{name}-{version}.strings"
    if not found.exists():
        with _archive(name, version) as (archive, partial):
            words = {word for file in files for word in re.findall(pattern, archive.read(file))}
            partial.write_bytes(b"\n".join(sorted(words)))
            partial.rename(found)
    return set(found.read_text().splitlines())


@contextmanager
def _archive(name: str, version: str) -> Iterator[tuple[zipfile.ZipFile, Path]]:
    """The downloaded distribution, and a path beside it for what is to be kept."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--python-version=3.12"]
        command += ["--only-binary=:all:", *(f"--platform={platform}" for platform in PLATFORMS), f"--dest={directory}"]
        subprocess.run([*command, f"{name}=={version}"], check=True, timeout=600)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            yield archive, Path(directory) / "files"


@cache
def module(folder: Path, path: str) -> griffe.Module:
    """Of a dotted path, as it is written; nothing is imported."""
    base = folder.joinpath(*path.split("."))
    file = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
    return griffe.visit(path, filepath=file, code=file.read_text())


def find(folder: Path, path: str, name: str) -> griffe.Object:
    """What `from path import name` brings, wherever it is written. KeyError without."""
    below = folder.joinpath(*path.split("."), name)
    if below.with_suffix(".py").exists() or (below / "__init__.py").exists():
        return module(folder, f"{path}.{name}")
    found = module(folder, path).members[name]
    if not found.is_alias:
        return found
    target, _, original = found.target_path.rpartition(".")
    return find(folder, target, original)


def method(folder: Path, owner: griffe.Class, name: str) -> griffe.Object | None:
    """Member of a class, or of the nearest base that is of the same distribution."""
    if name in owner.members:
        return owner.members[name]
    for base in owner.bases:
        path, _, base_name = (base if isinstance(base, str) else base.canonical_path).rpartition(".")
        if folder.joinpath(*path.split(".")[:1]).exists() and path:
            found = method(folder, find(folder, path, base_name), name)
            if found is not None:
                return found
    return None
