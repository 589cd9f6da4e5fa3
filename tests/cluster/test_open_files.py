"""The limit of open files in a job: raised as far as the system lets."""

import resource

import pytest

from moerl.slurm.job_node import allow_open_files


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_low_soft_limit_becomes_the_hard_one_or_as_many_as_a_node_needs(limits):
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    allow_open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == limits[1]
    assert soft == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
