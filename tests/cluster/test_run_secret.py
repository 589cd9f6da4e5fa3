"""Secret of a run: who has it is let in, who has not is a stranger, whatever is said."""

import pickle
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from moerl.cluster.run_secret import RunSecret, StrangerError


@pytest.fixture
def ends():
    accepting, connecting = socket.socketpair()
    with accepting, connecting, ThreadPoolExecutor(1) as thread:
        yield accepting, connecting, thread


def test_both_sides_with_the_secret_prove_it_and_go_on_talking(ends):
    accepting, connecting, thread = ends
    secret = RunSecret.new()
    examined = thread.submit(secret.examine, accepting, 5.0)
    pickle.loads(pickle.dumps(secret)).prove(connecting, 5.0)
    examined.result()
    connecting.sendall(b"hello\n")
    assert accepting.recv(6) == b"hello\n"


def test_neither_side_takes_another_secret(ends):
    accepting, connecting, thread = ends
    examined = thread.submit(RunSecret.new().examine, accepting, 5.0)
    with pytest.raises(StrangerError):  # nothing comes: the accepting side has seen a wrong proof
        RunSecret.new().prove(connecting, 0.3)
    assert isinstance(examined.exception(), StrangerError)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"\0" * 64, secrets.token_bytes(4096)])
def test_a_stranger_is_told_nothing_that_proves_the_secret(ends, said):
    accepting, connecting, thread = ends
    examined = thread.submit(RunSecret.new().examine, accepting, 0.3)
    connecting.sendall(said)
    assert isinstance(examined.exception(), StrangerError)
    accepting.close()
    connecting.settimeout(5)
    received = b""
    try:
        while chunk := connecting.recv(4096):
            received += chunk
    except ConnectionResetError:
        pass
    assert len(received) <= 32, "the nonce and nothing after it"


def test_a_proof_cannot_be_reflected(ends):
    """A side without the secret that plays back what the other one says."""
    accepting, connecting, thread = ends
    proven = thread.submit(RunSecret.new().prove, connecting, 1.0)
    accepting.sendall(secrets.token_bytes(32))
    answer = accepting.recv(64, socket.MSG_WAITALL)
    accepting.sendall(answer[32:])
    assert isinstance(proven.exception(), StrangerError)


def test_a_drip_of_bytes_does_not_hold_the_deadline_up(ends):
    accepting, connecting, thread = ends
    examined = thread.submit(RunSecret.new().examine, accepting, 0.3)
    for _ in range(40):
        connecting.sendall(b"x")
        if wait([examined], timeout=0.1).done:
            break
    assert isinstance(examined.exception(timeout=0), StrangerError)


def test_only_the_whole_header_is_admitted():
    secret = RunSecret.new()
    given = secret.headers["Authorization"]
    assert secret.admits(given)
    for other in (
        None,
        "",
        given[:-1],
        given + "0",
        given.removeprefix("Bearer "),
        RunSecret.new().headers["Authorization"],
        "Bearer \xfc",
    ):
        assert not secret.admits(other)


def test_the_secret_is_in_no_text_of_it():
    secret = RunSecret.new()
    assert secret.key not in f"{secret!r} {secret} {[secret]}"
