"""Store of the train ranks: it listens where it is told, and nowhere else."""

import psutil
import pytest

from moerl.train.rank_store import join_store, open_store


def listening():
    found = psutil.Process().net_connections("inet")
    return {tuple(connection.laddr[:2]) for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_ranks_meet_at_a_store_that_listens_on_one_address(host):
    before = listening()
    store = open_store(host, 2)
    assert listening() - before == {(host, store.port)}
    joined = join_store(host, store.port, 2, 10.0)
    joined.set("key", "value")
    assert store.get("key") == b"value"
    del store, joined
    assert listening() == before
