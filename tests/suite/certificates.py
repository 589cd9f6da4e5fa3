"""Certificates for tests, made by the commands that docs/rollout-servers.md gives."""

import subprocess
from pathlib import Path

NEW = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]


def make_authority(directory: Path, name: str) -> None:
    """name.pem and name.key."""
    files = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
    _run(directory, *NEW, "-days", "365", "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign", *files)


def make_certificate(directory: Path, name: str, host: str) -> None:
    """name.pem and name.key, signed by authority.pem. `host`: IP:127.0.0.1 and so on."""
    signed = ["-CA", "authority.pem", "-CAkey", "authority.key", "-days", "365", "-subj", "/CN=rollout"]
    extensions = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"subjectAltName={host}"]
    _run(directory, *NEW, *signed, *extensions, "-keyout", f"{name}.key", "-out", f"{name}.pem")


def _run(directory: Path, *command: str) -> None:
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
