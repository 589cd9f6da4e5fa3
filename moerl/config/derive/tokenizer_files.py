"""Numbers that a checkpoint's tokenizer gives to tokens, from its files: two models speak of the same tokens, or they do not."""

import hashlib
from pathlib import Path
from typing import Any

from moerl.types.json_text import read_object

_BINARY = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
"""Files of tokenizers without a tokenizer.json."""


def tokenizer_difference(ours: Path, theirs: Path) -> str | None:
    """Difference between the tokens of two checkpoints' folders, as text for people; None: there is none. Raises OSError and ValueError
    for a file that cannot be read."""
    files = [folder / "tokenizer.json" for folder in (ours, theirs)]
    if all(file.is_file() for file in files):
        own, other = (_numbers(file) for file in files)
        wrong = sorted(token for token in own if other.get(token) != own[token])
        if not wrong:
            return None
        token = wrong[0]
        number = f"has number {other[token]}" if token in other else "is unknown"
        return f"{len(wrong)} of {len(own)} tokens differ; {token!r} has number {own[token]} in {ours}, and {number} in {theirs}"
    digests = [{name: _digest(folder / name) for name in _BINARY if (folder / name).is_file()} for folder in (ours, theirs)]
    if digests[0] and digests[0] == digests[1]:
        return None
    return f"{ours} has {', '.join(digests[0]) or 'no tokenizer.json'}, and {theirs} {', '.join(digests[1]) or 'another'}"


def _numbers(file: Path) -> dict[str, int]:
    """Token -> number. The vocabulary is a table, or a list of (token, score) in the order of the numbers."""
    tokenizer = read_object(file)
    try:
        vocab: Any = tokenizer["model"]["vocab"]
        numbers = dict(vocab) if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
        return numbers | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: is no tokenizer of the library tokenizers: {error!r}") from error


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
