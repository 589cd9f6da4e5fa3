"""Certificates for tests, made by the commands that docs/rollout-servers.md shows."""

import re
import subprocess
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "rollout-servers.md"


def make_certificates(directory: Path) -> None:
    """authority.pem, authority.key; server.pem and server.key, which the authority has signed for IP:127.0.0.1."""
    found = re.search(r"<!-- certificates -->\n\n((?:    .*\n)+)", _PAGE.read_text())
    assert found is not None, f"{_PAGE} shows no commands"
    subprocess.run(["sh", "-ec", found[1]], cwd=directory, check=True, capture_output=True)
