"""Real servers killed or frozen in a run that goes on: the same bits as without, and every step once."""

import signal

import pytest
from whole_runs import DIGIT, SMALL, SYNC, rows

from moerl import run
from moerl.check import load_checked
from moerl.cluster.run_secret import RunSecret
from moerl.types.errors import EngineError

pytestmark = pytest.mark.usefixtures("shared_ray")

OVERRIDES = ("num_steps=4", "save_every=0", "deadlines.probe_seconds=2", "weights.bucket_bytes=100000", DIGIT)
"""A push of half a megabyte has several buckets."""


def train(output_dir, *overrides):
    run.train(load_checked([f"recipe={SYNC}", *SMALL, *OVERRIDES, f"output_dir={output_dir}", *overrides]))
    return rows(output_dir, SYNC)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def secrets(monkeypatch):
    """The secrets of the runs that a test starts."""
    made, new = [], RunSecret.new

    def noted():
        made.append(new())
        return made[-1]

    monkeypatch.setattr(RunSecret, "new", noted)
    return made


def without_restarts(rows):
    return [{name: value for name, value in row.items() if name != "fleet/restarts"} for row in rows]


slow = pytest.mark.matrix


@pytest.mark.parametrize(
    ("when", "number", "num_servers", "transport"),
    [
        pytest.param("generation", signal.SIGKILL, 1, "ipc", marks=slow),
        pytest.param("generation", signal.SIGKILL, 2, "ipc", marks=slow),
        pytest.param("generation", signal.SIGSTOP, 2, "ipc", marks=slow),
        pytest.param("idle", signal.SIGKILL, 1, "ipc", marks=slow),
        pytest.param("idle", signal.SIGKILL, 2, "nccl", marks=slow),
        pytest.param("push", signal.SIGKILL, 2, "ipc", marks=slow),
        ("push", signal.SIGKILL, 2, "nccl"),
        pytest.param("push", signal.SIGKILL, 1, "nccl", marks=slow),
    ],
)
def test_a_lost_server_comes_back_and_changes_no_bit(undisturbed, tmp_path, strike, secrets, when, number, num_servers, transport):
    """And nothing of what the run writes has its secrets, its own or those of its pushes, not even about the server that was lost."""
    struck = strike(when, number)
    found = train(tmp_path, f"rollout.num_servers={num_servers}", f"weights.transport={transport}")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert without_restarts(found) == without_restarts(undisturbed)
    assert (found[-1]["fleet/restarts"], undisturbed[-1]["fleet/restarts"]) == (1.0, 0.0)
    assert struck.pools[0].fleet.members[0].num_starts == 2
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(secrets) > 1 and not [secret for secret in secrets for content in written if secret.key.encode() in content]


@slow
def test_without_restarts_the_run_ends_with_what_the_server_said(tmp_path, strike):
    strike("generation", signal.SIGKILL)
    with pytest.raises(Exception, match="no rollout server is left") as caught:
        train(tmp_path, "rollout.max_restarts=0")
    assert "ended by signal 9 (Killed)" in str(caught.value)
    assert isinstance(caught.value.__cause__, EngineError)
