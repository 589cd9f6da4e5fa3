"""Echoes of a failure: words of sides that only lost another one, or waited for it in vain: a sign of a failure, and not its cause."""

LEFT = "left the push"
LATE = "did not come within"

_ECHOES = (
    LEFT, LATE,
    "Connection closed by peer", "Connection reset by peer", "Socket closed", "connection was closed", "Broken pipe", "Connection refused",
    "recvValue failed", "NCCL communicator was aborted", "Timed out waiting", "wait timeout after",
    "Connection closed by remote peer", "Connection was likely closed", "Got completion from peer",
    "Watchdog caught collective operation timeout", "ncclRemoteError",
)  # fmt: skip
"""Words of moerl's own pushes; of gloo, NCCL and their store."""


def is_echo(error: BaseException) -> bool:
    return any(echo in str(error) for echo in _ECHOES)
