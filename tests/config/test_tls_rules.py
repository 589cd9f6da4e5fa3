"""What the files of rollout.tls must be."""

import subprocess
from pathlib import Path

import pytest

from moerl.config.load import load
from moerl.config.reference import explanation
from moerl.config.rules.job_rules import launch_problems
from moerl.config.schema.rollout_config import TLSConfig
from moerl.types.errors import ConfigError, Problem

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
NAMES = {"certificate": "server.pem", "key": "server.key", "authority": "authority.pem"}


def overrides(directory: Path, **files: str) -> list[str]:
    return [f"rollout.tls.{name}={directory / file}" for name, file in (NAMES | files).items()]


def problem_of(*overrides: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load([DEMO, *overrides])
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def files(certificates, tmp_path) -> Path:
    for file in certificates.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_files_that_fit_each_other_are_accepted_and_none_are_needed(files: Path):
    tls = load([DEMO, *overrides(files)]).rollout.tls
    assert tls == TLSConfig(**{name: str(files / file) for name, file in NAMES.items()})
    assert load([DEMO]).rollout.tls is None


@pytest.mark.parametrize(
    ("given", "path", "said"),
    [
        ({"certificate": "absent.pem"}, "certificate", "is not a file"),
        ({"key": "."}, "key", "is not a file"),
        ({"authority": "x" * 300}, "authority", "is not a file"),
        ({"certificate": "server.key"}, "certificate", "must hold certificates in PEM"),
        ({"authority": "server.key"}, "authority", "must hold certificates in PEM"),
        ({"key": "authority.key"}, "key", "must be the private key of rollout.tls.certificate"),
        ({"key": "server.pem"}, "key", "must be the private key of rollout.tls.certificate"),
        ({"authority": "another.pem"}, "certificate", "is refused by who trusts rollout.tls.authority"),
    ],
)
def test_each_file_that_cannot_be_used_is_named(files: Path, given: dict[str, str], path: str, said: str):
    problem = problem_of(*overrides(files, **given))
    assert problem.path == f"rollout.tls.{path}" and said in problem.rule
    assert problem.reason and problem.fix


def test_a_relative_path_is_refused(files: Path):
    problem = problem_of(*overrides(files), "rollout.tls.key=server.key")
    assert (problem.path, problem.rule) == ("rollout.tls.key", "must be an absolute path")


def test_a_file_that_this_user_may_not_read_is_refused(files: Path, monkeypatch):
    monkeypatch.setattr("os.access", lambda file, mode: Path(file).name != "server.key")  # root may read everything
    problem = problem_of(*overrides(files))
    assert (problem.path, problem.rule) == ("rollout.tls.key", "cannot be read")


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(files: Path):
    command = ["openssl", "pkey", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key"]
    subprocess.run(command, cwd=files, check=True)
    problem = problem_of(*overrides(files, key="locked.key"))
    assert problem.path == "rollout.tls.key" and "without a passphrase" in problem.rule


def test_an_engine_inside_the_driver_has_no_connection_to_encrypt(files: Path):
    problem = problem_of(*overrides(files), "rollout.engine=fake")
    assert (problem.path, problem.rule) == ("rollout.tls", "has no effect")


def test_files_must_be_on_a_volume_of_the_pods_that_read_them(files: Path):
    found = [problem.path for problem in launch_problems(load([DEMO, *overrides(files)]), None)]
    assert set(found) > {"rollout.tls.certificate", "rollout.tls.key", "rollout.tls.authority"}


def test_the_section_and_each_file_are_explained():
    text = explanation("rollout.tls")
    assert "a section, or null; default null" in text and "subjectAltName" in text
    assert all(f"rollout.tls.{name}\n    text; must be given" in text for name in NAMES)
