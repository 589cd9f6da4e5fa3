"""Variables that NCCL reads from files, which it heeds where the environment does not have them (NCCL's user guide; src/misc/param.cc)."""

from collections.abc import Mapping
from pathlib import Path


def read_nccl_files(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, Path]:
    """Name -> the file that sets it: that of NCCL_CONF_FILE, or else of the home folder, before /etc/nccl.conf. Files that cannot be read
    are left out, as by NCCL. `root`: of the file system, for tests."""
    own = environment.get("NCCL_CONF_FILE", "")
    found: dict[str, Path] = {}
    for file in (Path(own) if own else Path.home() / ".nccl.conf", root / "etc/nccl.conf"):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        found = {line.partition("=")[0]: file for line in lines if "=" in line} | found
    return found
