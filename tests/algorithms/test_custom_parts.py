"""Parts of an algorithm from a user's file: the one of docs/add-an-algorithm.md."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import moerl.algorithms.columns
from moerl.config.algorithm_settings import of_plain
from moerl.config.load import load
from moerl.config.schema.custom_part import _is_neighbour, load_class, modules_of_files
from moerl.train.loss.algorithm_loss import TokenArrays, algorithm_loss
from moerl.types.errors import ConfigError, DataError

PAGE = (Path(__file__).parents[2] / "docs" / "add-an-algorithm.md").read_text()
DEMO = "recipe=grpo-tiny-moe-1n2g-sync"


def block(begins):
    found = re.search(rf"^    {begins}\n((?:    .*\n|\n)+)", PAGE, re.MULTILINE)
    return textwrap.dedent(found[0])


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(block("# own.py"))
    monkeypatch.chdir(tmp_path)
    return yaml.safe_load(block("algorithm:"))["algorithm"]


def test_the_parts_of_the_page_are_used(own):
    tokens = TokenArrays(mask=[[1, 1], [1, 0]], logprobs=[[-1.0, -2.0], [-1.0, 0]], old_logprobs=[[-1.1, -1.0], [-1.0, 0]])
    result = algorithm_loss(of_plain({**own, "normalize_by": "token"}), tokens, rewards=[3.0, 1.0], groups=[0, 0])
    assert result.advantages.tolist() == [[1.0, 1.0], [-1.0, 0]]
    near = -(2.718281828459045**0.1) + 0.1**2  # the second token is too far
    assert result.loss == pytest.approx(0.5 * (near + 1.0) / 3)
    assert result.metrics["objective"]["far"] == pytest.approx(1 / 3)
    assert result.metrics["correction_weight"] == 0.5


def test_an_advantage_gets_the_log_probs_that_it_needs(own, tmp_path):
    (tmp_path / "near.py").write_text(
        "from dataclasses import dataclass\n\nfrom moerl.algorithms.advantages import Credit\n\n\n"
        "@dataclass\nclass Near:\n    needs = {'reference', 'old_logprobs'}\n\n"
        "    def __call__(self, step):\n        return Credit(advantages_N=step.tokens.old_N - step.tokens.reference_N)\n"
    )
    columns = {"old_logprobs": [[-1.0, -2.0], [-1.5, 0]], "reference_logprobs": [[-1.5, -2.0], [-1.0, 0]]}
    tokens = TokenArrays(mask=[[1, 1], [1, 0]], logprobs=[[-1.0, -2.0], [-1.0, 0]], **columns)
    settings = {**own, "advantage": {"kind": "custom", "path": "near.py:Near"}}
    result = algorithm_loss(of_plain(settings), tokens, rewards=[3.0, 1.0], groups=[0, 0])
    assert result.advantages.tolist() == [[0.5, 0.0], [-0.5, 0]]
    (tmp_path / "turns.py").write_text(
        "from dataclasses import dataclass\n\nfrom moerl.algorithms.advantages import Credit\n\n\n"
        "@dataclass\nclass Turns:\n    needs = {'tokens'}\n\n"
        "    def __call__(self, step):\n        return Credit(advantages_N=10 * step.tokens.token_ids_N + step.tokens.turn_N)\n"
    )
    settings["advantage"]["path"] = "turns.py:Turns"
    tokens = TokenArrays(mask=[[1, 0, 1], [1, 1, 0]], logprobs=np.zeros((2, 3)), token_ids=[[1, 2, 3], [4, 5, 6]])
    result = algorithm_loss(of_plain(settings), tokens, rewards=[3.0], groups=[0], samples=[0, 0])
    assert result.advantages.tolist() == [[10, 0, 31], [42, 52, 0]]
    with pytest.raises(ValueError, match="token_ids = None: must be given"):
        algorithm_loss(of_plain(settings), replace(tokens, token_ids=None), rewards=[3.0], groups=[0], samples=[0, 0])
    with pytest.raises(ConfigError, match="cannot go with an advantage that needs tokens"):
        load([DEMO, "~algorithm.advantage", "+algorithm.advantage={kind: custom, path: 'turns.py:Turns'}", "train.router_replay=rollout"])
    (tmp_path / "plain.py").write_text("class Plain:\n    pass\n")
    settings["advantage"]["path"] = "plain.py:Plain"
    with pytest.raises(ConfigError, match="must be a dataclass"):
        algorithm_loss(of_plain(settings), tokens, rewards=[3.0], groups=[0], samples=[0, 0])


def test_an_objective_sees_the_values_of_a_critic_and_the_counts_of_the_mini_batch(own, tmp_path):
    (tmp_path / "valued.py").write_text(
        "from dataclasses import dataclass\n\nimport torch\n\nfrom moerl.algorithms.columns import TokenLoss\n\n\n"
        "@dataclass\nclass Valued:\n    metric_names = ('tokens', 'sequences')\n\n    def token_loss(self, columns):\n"
        "        counts = {'tokens': columns.all_tokens, 'sequences': columns.all_sequences}\n"
        "        return TokenLoss(loss_T=-columns.values_T * columns.logp_T, clipped_T=torch.zeros_like(columns.mask_T),\n"
        "                         metrics={name: torch.full_like(columns.logp_T, count) for name, count in counts.items()})\n"
    )
    tokens = TokenArrays(mask=[[1, 1, 0]], logprobs=[[-1.0, -2.0, np.nan]], values=[[0.5, 0.25, np.nan]])
    settings = {"advantage": {"kind": "gae"}, "objective": {"kind": "custom", "path": "valued.py:Valued"}, "normalize_by": "token"}
    result = algorithm_loss(of_plain(settings), tokens, rewards=[1.0], groups=[0])
    assert result.gradient.tolist() == [[-0.25, -0.125, 0]]
    assert result.metrics["objective"] == {"tokens": 2, "sequences": 1}


@pytest.mark.parametrize(
    ("credit", "said"),
    [
        ("advantages_S=step.rewards_S[:1]", r"advantages_S of shape \(1,\): must be \(2,\)"),
        ("advantages_N=step.rewards_S[:1]", r"advantages_N of shape \(1,\): must be \(3,\)"),
        ("advantages_S=0.5", r"advantages_S of shape \(\): must be \(2,\)"),
        ("returns_N=np.zeros(3)", "a Credit without advantages"),
        ("advantages_S=credit_S, returns_N=np.zeros(1)", r"returns_N of shape \(1,\): must be \(3,\)"),
        ("advantages_S=credit_S * 1j", "advantages_S of dtype complex128: must be real numbers"),
        ("advantages_S=np.array([None, None])", "advantages_S of dtype object: must be real numbers"),
    ],
)
def test_credit_of_another_shape_is_no_credit(credit, said, own, tmp_path):
    (tmp_path / "other.py").write_text((tmp_path / "own.py").read_text().replace("advantages_S=credit_S", credit))
    tokens = TokenArrays(mask=[[1, 1], [1, 0]], logprobs=[[-1.0, -2.0], [-1.0, 0]], old_logprobs=[[-1.1, -1.0], [-1.0, 0]])
    advantage = {"kind": "custom", "path": "other.py:RankAdvantage"}
    with pytest.raises(DataError, match=said):
        algorithm_loss(of_plain({**own, "advantage": advantage}), tokens, rewards=[3.0, 1.0], groups=[0, 0])


def test_an_advantage_that_returns_no_credit_is_told(own, tmp_path):
    (tmp_path / "bare.py").write_text((tmp_path / "own.py").read_text().replace("Credit(advantages_S=credit_S)", "credit_S"))
    tokens = TokenArrays(mask=[[1, 1], [1, 0]], logprobs=[[-1.0, -2.0], [-1.0, 0]])
    advantage = {"kind": "custom", "path": "bare.py:RankAdvantage"}
    with pytest.raises(DataError, match="algorithm.advantage returned ndarray: must be a Credit"):
        algorithm_loss(of_plain({**own, "advantage": advantage}), tokens, rewards=[3.0, 1.0], groups=[0, 0])


@pytest.mark.parametrize(
    ("returned", "other", "said"),
    [
        ("loss_T=torch.where(far_T, 0.0, loss_T)", "loss_T=loss_T[:, None]", r"loss_T of shape \((\d), 1\): must be \(\1,\)"),
        ("loss_T=torch.where(far_T, 0.0, loss_T)", "loss_T=loss_T.mean()", r"objective returned loss_T of shape \(\): must be \(\d,\)"),
        ("loss_T=torch.where(far_T, 0.0, loss_T)", "loss_T=loss_T.detach()", "objective returned loss_T without a gradient"),
        ("clipped_T=far_T", "clipped_T=far_T[:, None]", "objective returned clipped_T of shape"),
        ("far_T.to(d_T.dtype)", "far_T.to(d_T.dtype).mean()", "objective returned far of shape"),
        ("weight_T=half_T", "weight_T=half_T[:, None]", "corrections returned weight_T of shape"),
        ("zeros_like(columns.mask_T)", "zeros_like(columns.mask_T)[:1]", "corrections returned is_bounded_T of shape"),
        ("class Halved:\n", "class Halved:\n    needs = {'old_logprobs'}\n", None),
    ],
)
def test_a_column_of_another_shape_or_without_a_gradient_is_no_loss(returned, other, said, own, tmp_path):
    """It would be spread over the tokens, each of which would then have the losses of all."""
    text = (tmp_path / "own.py").read_text().replace(returned, other)
    if said is None:  # one that is asked before the update
        text, said = text.replace("weight_T=half_T", "weight_T=half_T[:, None]"), "corrections returned weight_T of shape"
    (tmp_path / "wide.py").write_text(text)
    settings = yaml.safe_load(yaml.safe_dump(own).replace("own.py", "wide.py"))
    tokens = TokenArrays(mask=[[1, 1], [1, 0]], logprobs=[[-1.0, -2.0], [-1.0, 0]], old_logprobs=[[-1.1, -1.0], [-1.0, 0]])
    with pytest.raises(DataError, match=said):
        algorithm_loss(of_plain({**settings, "normalize_by": "token"}), tokens, rewards=[3.0, 1.0], groups=[0, 0])


@pytest.mark.parametrize(
    ("part", "path", "said"),
    [
        ("objective", "absent.py:Squared", "names no file"),
        ("objective", "own.py", "must name a class that can be imported"),
        ("objective", "own.py:Round", "has no attribute 'Round'"),
        ("objective", "broken.py:Squared", "ZeroDivisionError"),
        ("objective", "own.py:Halved", "must have token_loss"),
        ("advantage", "own.py:Halved", "must have __call__"),
        ("corrections", "own.py:Squared", "must have weights"),
        ("corrections", "odd.py:Plain", "must be a dataclass"),
        ("corrections", "odd.py:Wanting", "needs must be a set of old_logprobs, reference"),
        ("corrections", "odd.py:Ending", "has no attribute 'Ending'"),
        ("objective", "leaving.py:Squared", "SystemExit"),
    ],
)
def test_a_part_that_cannot_be_used_is_named_before_the_run(part, path, said, own, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaving.py").write_text("raise SystemExit(5)")
    (tmp_path / "odd.py").write_text(
        "from dataclasses import dataclass\n\n\nclass Plain:\n    def weights(self, columns): ...\n\n\n"
        "@dataclass\nclass Wanting:\n    needs = 'reference'\n\n    def weights(self, columns): ...\n"
    )
    name = "algorithm.corrections" if part == "corrections" else f"algorithm.{part}"
    value = f"{{kind: custom, path: '{path}'}}"
    with pytest.raises(ConfigError) as caught:
        load([DEMO, f"~{name}", f"+{name}={value}"] if part != "corrections" else [DEMO, f"{name}=[{value}]"])
    assert any(problem.path.startswith(name) and said in str(problem) for problem in caught.value.problems), caught.value


def test_settings_that_are_not_the_classs_are_named(own):
    value = "{kind: custom, path: own.py:Squared, settings: {capp: 1.0}}"
    with pytest.raises(ConfigError) as caught:
        load([DEMO, "~algorithm.objective", f"+algorithm.objective={value}"])
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"algorithm.objective.settings.cap", "algorithm.objective.settings.capp"}


def test_a_file_that_was_mended_is_read_anew_by_the_next_check(own, tmp_path):
    words = [DEMO, "~algorithm.objective", "+algorithm.objective={kind: custom, path: 'own.py:Squared', settings: {cap: 0.5}}"]
    file = tmp_path / "own.py"
    whole = file.read_text()
    file.write_text(whole.replace("def token_loss", "def tokn_loss"))
    with pytest.raises(ConfigError, match="must have token_loss"):
        load(words)
    file.write_text(whole)
    load(words)


def test_an_environment_beneath_the_folder_of_a_file_is_no_neighbour_of_it(own, tmp_path, monkeypatch):
    packages = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "installed_beneath.py").write_text("")
    (tmp_path / "truly_beside.py").write_text("")
    (tmp_path / "in_a_home.py").write_text("import installed_beneath\nimport truly_beside\n\n\nclass Part: ...\n")
    monkeypatch.syspath_prepend(packages)
    load_class("in_a_home.py:Part")
    carried = {module.__name__ for module in modules_of_files()}
    assert {"moerl_custom_in_a_home", "truly_beside"} <= carried and "installed_beneath" not in carried


def test_moerls_own_modules_are_no_neighbours_of_a_file_above_them():
    assert not any(_is_neighbour(module, Path(moerl.__file__).parents[1]) for module in (moerl, moerl.algorithms.columns, torch))
