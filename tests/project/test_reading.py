"""Files that are enough to follow a push, and to add an engine or a family: no more, and no longer, than their pages say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUSH = """
publish weights/sync weights/push_calls weights/plan/run_plan weights/plan/transfer_plan weights/plan/buckets
train/push/push_source weights/send train/push/pushed_tensors models/bridge/rank_tensors weights/transport/links
weights/transport/shared_memory rollout/server/server_state weights/weight_session weights/installation
rollout/engines/installed_bytes
"""
ENGINE = """
rollout/server/contract rollout/engines/engine_process rollout/engines/engine_arguments rollout/engines/installed_bytes
rollout/engines/process_push rollout/engines/sglang/sglang_server rollout/engines/sglang/sglang_core
rollout/engines/sglang/sglang_launch rollout/engines/sglang/sglang_scheduler rollout/server_commands rollout/build_engines
types/completion weights/receiver_protocol types/engine_traits
"""
FAMILY = """
models/families/family_table models/families/mixtral models/families/parts/family models/families/parts/layer_rules
models/families/parts/family_checks models/families/parts/rope
"""


@pytest.mark.parametrize(
    ("page", "names", "most"),
    [("architecture", PUSH, 3000), ("add-an-engine", ENGINE, 1600), ("add-a-family", FAMILY, 495)],
    ids=["push", "engine", "family"],
)
def test_few_files_are_enough_and_their_page_names_them(page: str, names: str, most: int) -> None:
    files = [ROOT / "moerl" / f"{name}.py" for name in names.split()]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines <= most, f"{lines} lines in {len(files)} files; {most} were the aim: move what a reader of docs/{page}.md may skip"
    text = (ROOT / "docs" / f"{page}.md").read_text()
    said = re.search(rf"\b{len(files)} (?:files of|with) some ([\d,]+) lines", text)
    assert said is not None and abs(int(said[1].replace(",", "")) - lines) <= 100
    assert not [file.stem for file in files if file.stem not in text and "sglang" not in file.stem]
