"""Table of transformers' models: the same as transformers reads, and read once."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from transformers.utils import import_utils

from moerl.models import transformers_table, user_cache

MODELS = Path(transformers.__file__).parent / "models"
IMPORT = """
import sys
from pathlib import Path
opened, looked = [], []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
sys.addaudithook(lambda event, args: event == "os.scandir" and looked.append(str(args[0])))
search = Path.rglob
from moerl.models.transformers_table import keep_table
keep_table()
from transformers import AutoConfig, Qwen3MoeConfig
assert Path.rglob is search
import transformers.models.qwen3_moe.modeling_qwen3_moe
assert Path.rglob is search
import transformers.models.clip.image_processing_clip_fast
print(sum("/transformers/models/" in name and name.endswith(".py") for name in opened))
print(sum("/transformers/models" in name for name in looked))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moerl"


def test_a_second_import_reads_the_table_and_not_the_sources_of_all_models(cache: Path) -> None:
    unkept = import_utils.define_import_structure.__wrapped__  # what it remembers, transformers has added to
    read = unkept(MODELS, prefix="models")
    module = SimpleNamespace(define_import_structure=unkept)
    transformers_table._keep(module)
    assert module.define_import_structure(MODELS, prefix="models") == read
    assert module.define_import_structure(MODELS, prefix="models") == read
    assert [file.suffix for file in cache.iterdir()] == [".json"]
    found = subprocess.run([sys.executable, "-c", IMPORT], env=os.environ | {"XDG_CACHE_HOME": str(cache.parent)}, capture_output=True)
    sources, folders = map(int, found.stdout.split())
    assert 0 < sources < 100 and folders < 100, found.stderr.decode()


def test_the_list_of_files_has_what_a_search_of_the_folders_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, found = transformers_table._PROCESSORS, sorted(MODELS.rglob(transformers_table._PROCESSORS))
    monkeypatch.setattr(Path, "rglob", Path.rglob)  # to be put back
    transformers_table._search_list(SimpleNamespace(__file__=import_utils.__file__))
    assert sorted(MODELS.rglob(pattern)) == found and len(found) > 100
    assert sorted((MODELS / "clip").rglob(pattern)) == [file for file in found if file.parent.name == "clip"]
    transformers_table._search_folders()
    assert Path.rglob is transformers_table._SEARCH


def test_a_table_that_cannot_be_kept_or_read_is_made_anew(cache: Path) -> None:
    table = {frozenset({"torch"}): {"models.a.modeling_a": {"A"}}}
    cache.write_text("no directory")
    assert transformers_table._from_file(cache / "table.json", lambda: table) == table
    cache.unlink()
    cache.mkdir()
    for damaged in ('[[["tor', "", "[]", "{}", "[[1, 2]]", '[[["torch"], ["A"]]]'):
        (cache / "table.json").write_text(damaged)
        assert transformers_table._from_file(cache / "table.json", lambda: table) == table
    assert transformers_table._from_file(cache / "table.json", dict) == table


@pytest.mark.parametrize("models", [Path("/elsewhere/transformers/models"), MODELS])
def test_sources_that_no_list_names_are_read_as_ever(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if models == MODELS:  # an installation that is edited in place lists a link alone
        listed = SimpleNamespace(read_text=lambda _: "\n__editable__.transformers.pth,,\n", locate_file=lambda _: MODELS)
        monkeypatch.setattr(transformers_table, "distribution", lambda _: listed)
    assert transformers_table._file_for(models) is None


def test_a_table_that_somebody_else_wrote_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {frozenset({"torch"}): {"models.a.modeling_a": {"A"}}}
    assert transformers_table._from_file(cache / "table.json", lambda: table) == table
    monkeypatch.setattr(user_cache.os, "getuid", lambda: (cache / "table.json").stat().st_uid + 1)
    assert transformers_table._from_file(cache / "table.json", lambda: table | {frozenset(): {}}) == table | {frozenset(): {}}


def test_a_version_that_makes_its_table_another_way_is_left_as_it_is() -> None:
    transformers_table._keep(module := SimpleNamespace())
    assert vars(module) == {}
    module.define_import_structure = lambda path, prefix=None, deep=False: {frozenset(): {str(path): {str(deep)}}}
    transformers_table._keep(module)
    assert module.define_import_structure(MODELS, deep=True) == {frozenset(): {str(MODELS): {"True"}}}
