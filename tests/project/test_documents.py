"""Commands that README and the tutorials show do what is printed there.

A block after `<!-- run -->` is run: lines that begin with `$ ` are commands of moerl, what follows one is its output, whole, with `...`
for what may differ. A block after `<!-- file: NAME -->` is a file that the commands of the page find.
"""

import re
import shlex
from dataclasses import dataclass

import pytest
from sources import ROOT

from moerl.config.reference import settings

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]

_MARKED = re.compile(r"^<!-- (run|file: (\S+)) -->\n((?:    .*\n|\n)+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A command of a document, and what it shows of the output."""

    words: list[str]
    shown: str


def blocks(text: str) -> list[tuple[str | None, str]]:
    """(name of the file, None for commands; the block without its indentation), in the document's order."""
    return [(match[2], re.sub(r"^    ", "", match[3].rstrip() + "\n", flags=re.MULTILINE)) for match in _MARKED.finditer(text)]


def examples(block: str) -> list[Example]:
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
    assert parts[0] == "", f"a block to run begins with a command: {block}"
    commands = [part.partition("\n") for part in parts[1:]]
    return [Example(words=shlex.split(command), shown=shown) for command, _, shown in commands]


def matches(shown: str, printed: str) -> bool:
    """`...` alone on a line stands for any lines, within one for the rest of it."""
    pattern = re.escape(shown.strip("\n")).replace(r"\.\.\.\n", "(?:.*\n)*").replace(r"\.\.\.", "(?s:.*)")
    return re.fullmatch(pattern, printed.strip("\n")) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_commands_print_what_a_document_shows(document, moerl, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    text = document.read_text()
    found = blocks(text)
    assert len(found) == len(re.findall(r"^<!-- (?:run|file)", text, re.MULTILINE)) > 0, "a marker is followed by its block"
    for file, block in found:
        if file is not None:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(block)
            continue
        for example in examples(block):
            assert example.words[0] == "moerl"
            if example.words[1] == "train":
                request.getfixturevalue("shared_ray")
            done = moerl(*example.words[1:])
            assert matches(example.shown, done.stdout + done.stderr), f"{shlex.join(example.words)} printed\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a\n", "a\nb\n", False),
        ("...\nb\n", "a\nb\n", True),
        ("...\nb\n", "a\nb\nc\n", False),
        ("a: ...\n", "a: 1\n", True),
        ("a\n...\n", "a\nb\nc\n", True),
    ],
)
def test_dots_alone_stand_for_what_is_left_out(shown, printed, expected):
    assert matches(shown, printed) is expected


def test_whatever_a_document_names_in_the_repository_is_there():
    """Paths from the root, and names of files in code."""
    known = {
        path.relative_to(ROOT).as_posix()
        for folder in ("moerl", "tools", "benchmarks", "configs", "scripts")
        for path in (ROOT / folder).rglob("*")
    }
    named = re.compile(r"(?<![\w./-])(?:moerl|tools|benchmarks|configs|scripts)/[\w/-]+(?:\.(?:py|yaml|json|txt|sh|sbatch\.j2))?")
    missing = []
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for path in sorted({path.rstrip("/") for path in named.findall(document.read_text())}):
            if path not in known and f"{path}.py" not in known and "NAME" not in path and "FAMILY" not in path:
                missing.append(f"{document.relative_to(ROOT)}: {path}")
    assert missing == []


def test_every_name_and_setting_of_where_to_change_is_there():
    text = (ROOT / "docs" / "where-to-change.md").read_text()
    rows = [row for line in text.splitlines() if len(row := line.strip("|").split("|")) == 3 and "---" not in line]
    assert len(rows) > 50
    keys, missing = {re.sub(r"\[.*\]", "", setting.path) for setting in settings()}, []
    for _, setting, where in rows:
        missing += [key for key in re.findall(r"`([^`]+)`", setting) if key not in keys]
        for path, names in re.findall(r"`(moerl/[^`]+\.py)`(?: \(((?:`\w+`(?:, )?)+)\))?", where):
            source = (ROOT / path).read_text()
            defined = [rf"^\s*(?:class|(?:async )?def) {name}\b|^{name}\b" for name in re.findall(r"\w+", names)]
            missing += [f"{path}: {name}" for name in defined if not re.search(name, source, re.MULTILINE)]
    assert missing == []
