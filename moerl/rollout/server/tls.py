"""Contexts of TLS, each made from files in the process that uses it: paths travel, contexts cannot."""

import ssl
from pathlib import Path

from moerl.types.errors import EngineError


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Context of a server that shows `certificate`. EngineError if this node's files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # without, OpenSSL asks the terminal for a passphrase
    except (OSError, ValueError) as error:
        raise EngineError(_unusable(f"rollout.tls.certificate = {str(certificate)!r}, rollout.tls.key = {str(key)!r}", error)) from error
    return context


def client_context(authority: Path | None) -> ssl.SSLContext | None:
    """Context of a client that trusts certificates of `authority` alone, for the host that it asked; None without one: plain HTTP.
    EngineError if this node's file cannot be used."""
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ValueError) as error:
        raise EngineError(_unusable(f"rollout.tls.authority = {str(authority)!r}", error)) from error


def _unusable(files: str, error: Exception) -> str:
    return f"{files}: cannot be used on this node: {error}; every node must have the same files there, readable by the run"
