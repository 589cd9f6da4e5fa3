import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from pathlib import Path
from moerl.observe.writers import WandbWriter

writer = WandbWriter(Path(sys.argv[1]), mode="offline", project="moerl", name="a/run", config={"seed": 1})
writer.write(1, {"reward/mean": 0.5})
children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
before = [pid for file in children for pid in file.read_text().split()]
writer.close(succeeded=True)
stats = [Path(f"/proc/{pid}/stat") for pid in before]
alive = [stat for stat in stats if stat.exists() and stat.read_text().split(")")[1].split()[0] != "Z"]
print("BEFORE", len(before), "ALIVE", len(alive))
"""


def test_an_offline_run_leaves_a_file_and_no_process(tmp_path: Path):
    """In a process of its own, with no account, no configuration and no proxy to reach anything through."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env={**clean, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "BEFORE 1 ALIVE 0\n", "wandb's service ran, has ended, and wandb printed nothing"
    name = (tmp_path / "wandb_id.txt").read_text().strip()
    (recorded,) = tmp_path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb")
    assert b"reward/mean" in recorded.read_bytes()
