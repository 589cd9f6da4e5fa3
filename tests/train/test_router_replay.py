"""Routes noted before an update, or by the engine, are those its tokens take: forward, backward, computed again, under every layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from deepseek_cases import deepseek_settings, slow, write_deepseek
from engine_cases import LAYOUTS, random_batch
from engine_jobs import train
from engine_ranks import RankError, run_ranks
from hf_trainer import HFTrainGroup, load_model
from memory_jobs import with_train
from plain_routing import own_routes, random_routes
from replay_jobs import (
    first_gradients,
    noted_and_replayed,
    record_disturb_train,
    select_under_replay,
    train_with_a_router_that_disobeys,
    train_without_recording,
)
from test_hf_parity import train_plainly

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import FullRecompute, SelectiveRecompute

LAYOUTS = {"one": Layout(), **LAYOUTS}
MODELS = {"qwen3_moe": {"num_layers": 4, "top_k": 2, "num_experts": 8}, "deepseek": {"num_layers": 3, "top_k": 4, "num_experts": 8}}
RECOMPUTE = {"kept": None, "layers": FullRecompute(), "experts": SelectiveRecompute(modules=("moe",))}


@pytest.fixture(scope="module")
def directories(checkpoints, tmp_path_factory):
    """deepseek: a dense layer first, group-limited sigmoid routers with a bias, layers of multi-token prediction."""
    return {"qwen3_moe": checkpoints["qwen3_moe"], "deepseek": write_deepseek(tmp_path_factory.mktemp("deepseek"), "plain")["plain"]}


def replaying(directory, layout, mode, *, recompute="kept", updates=2, mtp_loss=0.0, **options):
    chosen = deepseek_settings(directory, LAYOUTS[layout], mtp_loss=mtp_loss, **options)
    changes = {} if RECOMPUTE[recompute] is None else {"recompute": RECOMPUTE[recompute]}
    return with_train(chosen, router_replay=mode, updates_per_step=updates, **changes)


def routed_batch(name, **options):
    """Routes that no router would choose, some unknown."""
    batch = random_batch(**options)
    return replace(batch, routes_T=random_routes(batch, **MODELS[name]))


# -- against transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_on_routes_of_an_engine_equal_transformers_made_to_follow_them(name, directories):
    chosen, batch = replaying(directories[name], "one", "rollout", dtype="float64"), routed_batch(name)
    result, expected = run_ranks(train, 1, chosen, batch), train_plainly(chosen, batch)
    np.testing.assert_allclose(result.before_T, expected.before_T, atol=2e-6, rtol=0)
    np.testing.assert_allclose(result.after_T, expected.after_T, atol=1e-5, rtol=0)
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=2e-6, abs=1e-8)
    for tensor, weight in expected.weights.items():
        np.testing.assert_allclose(result.weights[tensor], weight, atol=2e-6, rtol=0, err_msg=tensor)
    without = run_ranks(train, 1, with_train(chosen, router_replay="off"), replace(batch, routes_T=None), 1, 1)
    assert np.abs(without.before_T - expected.before_T).max() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_that_of_a_forward_that_follows_the_routes(name, directories):
    """The routers' among them: a probability is the current router's, of experts it did not choose."""
    chosen, batch = replaying(directories[name], "one", "rollout", dtype="float64"), routed_batch(name)
    result = run_ranks(first_gradients, 1, chosen, batch)
    expected = plain_gradients(chosen, batch)
    routers = [tensor for tensor in expected if tensor.endswith(".mlp.gate.weight")]
    assert len(routers) == MODELS[name]["num_layers"]
    for tensor, gradient in expected.items():
        largest = np.abs(gradient).max()
        assert largest > 0 or not tensor.endswith("gate.weight")
        np.testing.assert_allclose(result[tensor], gradient, atol=2e-6 * max(largest, 1e-6), rtol=0, err_msg=tensor)


def plain_gradients(chosen, batch):
    """By the names of the checkpoint."""
    import asyncio

    from moerl.algorithms.mini_batch_loss import loss_of
    from moerl.config.algorithm_settings import algorithm

    async def scenario():
        group = HFTrainGroup(with_train(chosen, updates_per_step=1), checkpoint_dir=chosen.model_dir)
        await group.start()
        group._optimizer.step = lambda: None
        group._settings = with_train(group._settings, optimizer=replace(chosen.train.optimizer, clip_grad=None))
        await group.update(batch, loss_of(algorithm("grpo")), lr=1e-3)
        for parameter in group.model.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return {name: tensor.numpy() for name, tensor in group.weights().items()}

    return asyncio.run(scenario())


@pytest.mark.parametrize("updates", [1, 2])
def test_an_update_of_routers_that_changed_follows_the_routes_noted_before(updates, directories):
    """Their weights are negated in between, so that they would choose the opposite."""
    directory, batch = directories["qwen3_moe"], random_batch()
    result = run_ranks(record_disturb_train, 1, replaying(directory, "one", "trainer", updates=updates, dtype="float64"), batch)
    model = load_model(directory, torch.float64)
    noted = replace(batch, routes_T=own_routes(model, batch))
    expected = train_plainly(replaying(negated(directory), "one", "rollout", dtype="float64"), noted, 1, updates)
    [step], [wanted] = result.steps, expected.steps
    assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=2e-6, abs=1e-8)
    for tensor, weight in expected.weights.items():
        np.testing.assert_allclose(result.weights[tensor], weight, atol=2e-6, rtol=0, err_msg=tensor)
    assert step.routing.replayed == 1.0
    assert max(step.routing.overlap) < 0.5


def negated(directory):
    """A checkpoint beside the given one whose routers have the opposite weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    target = directory.with_name(f"{directory.name}-negated")
    if not target.exists():
        shutil.copytree(directory, target)
        file = target / "model.safetensors"
        weights = {name: -tensor if name.endswith(".mlp.gate.weight") else tensor for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    return target


# -- layouts -------------------------------------------------------------------------------------------------------

EACH_CHANGE = ("tp2", "ep2", "pp2-vpp2", "cp2-ep2")
CASES = [
    (layout, way) if layout in EACH_CHANGE and (way == "experts" or layout == "ep2") else slow(layout, way)
    for layout in ("dp2", "tp2", "ep2", "tp2-ep2", "pp2", "pp2-vpp2", "cp2-ep2", "tp2-cp2", "tp2-pp2-vpp2-cp2-ep4")
    for way in RECOMPUTE
]


@pytest.fixture(scope="module")
def one_process(directories):
    return {
        mode: run_ranks(job, 1, replaying(directories["qwen3_moe"], "one", mode, dtype="float64"), batch, 2)
        for mode, (job, batch) in JOBS.items()
    }


JOBS = {"rollout": (train, routed_batch("qwen3_moe", num_sequences=16)), "trainer": (record_disturb_train, random_batch(num_sequences=16))}


@pytest.mark.parametrize("mode", JOBS)
@pytest.mark.parametrize(("layout", "way"), CASES)
def test_a_layout_equals_one_process_and_layers_computed_again_take_the_same_routes(layout, way, mode, directories, one_process):
    job, batch = JOBS[mode]
    chosen = replaying(directories["qwen3_moe"], layout, mode, recompute=way, dtype="float64", micro_batch_tokens=48)
    assert_same(run_ranks(job, LAYOUTS[layout].ranks, chosen, batch, 2), one_process[mode])


ROUNDED = 1e-6
"""Between float64 runs: Megatron's router makes float32 numbers of its scores whatever the model's dtype."""


def assert_same(result, expected):
    np.testing.assert_allclose(result.before_T, expected.before_T, atol=ROUNDED, rtol=0)
    np.testing.assert_allclose(result.after_T, expected.after_T, atol=ROUNDED, rtol=0)
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-6, abs=1e-8)
        assert step.routing == wanted.routing
    for tensor, weight in result.weights.items():
        np.testing.assert_allclose(weight, expected.weights[tensor], atol=ROUNDED, rtol=0, err_msg=tensor)


@pytest.mark.parametrize(("layout", "way"), [("tp2-ep2", "layers"), ("pp2-vpp2", "kept"), ("cp2-ep2", "experts")])
def test_dense_layers_and_multi_token_prediction_have_no_routes_to_replay(layout, way, directories):
    """The latter's routers choose for themselves, also with replay."""
    options = {"mtp_loss": 0.3, "dtype": "float64"}
    batch = routed_batch("deepseek")
    expected = run_ranks(train, 1, replaying(directories["deepseek"], "one", "rollout", **options), batch, 2)
    chosen = replaying(directories["deepseek"], layout, "rollout", recompute=way, **options)
    result = run_ranks(train, LAYOUTS[layout].ranks, chosen, batch, 2)
    assert_same(result, expected)
    assert expected.steps[0].routing.layers == (1, 2, 3)
    assert [step.mtp_loss for step in result.steps] == pytest.approx([step.mtp_loss for step in expected.steps], rel=1e-6)


@pytest.mark.parametrize("mode", JOBS)
def test_a_stage_of_dense_layers_alone_replays_nothing_and_the_others_what_one_process_does(mode, tmp_path):
    """As in the layout of DeepSeek-V3's recipe, whose first stage has its three dense layers."""
    directory, (job, batch) = write_deepseek(tmp_path, "odd")["odd"], JOBS[mode]
    if mode == "rollout":
        batch = replace(batch, routes_T=random_routes(batch, num_layers=2, top_k=4, num_experts=8))
    expected, found = (
        run_ranks(job, LAYOUTS[layout].ranks, replaying(directory, layout, mode, dtype="float64"), batch, 2) for layout in ("one", "pp2")
    )
    assert_same(found, expected)
    assert expected.steps[0].routing.layers == (2, 3) and expected.steps[0].routing.replayed > 0


@pytest.mark.parametrize("mode", JOBS)
def test_packing_does_not_matter(mode, directories, one_process):
    job, batch = JOBS[mode]
    for budget in (20, 4096):  # one sequence at a time; all in one row
        chosen = replaying(directories["qwen3_moe"], "one", mode, dtype="float64", micro_batch_tokens=budget)
        assert_same(run_ranks(job, 1, chosen, batch, 2), one_process[mode])


@pytest.mark.parametrize("mode", ["trainer", "rollout"])
def test_a_choice_from_the_whole_mini_batch_is_made_by_the_log_probs_of_the_update(mode, directories):
    """Under the same routes, which are those of neither the routers as they are nor of another mini-batch."""
    batch = random_batch() if mode == "trainer" else routed_batch("qwen3_moe")
    chosen = replaying(directories["qwen3_moe"], "one", mode, dtype="float64")
    parts, asked_N, free_N = run_ranks(select_under_replay, 1, chosen, batch)
    assert len(parts) == 2
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), asked_N)
    assert np.abs(asked_N - free_N).max() > 0.01


# -- nothing changes where nothing should --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one", "tp2-ep2"])
def test_replaying_a_routers_own_routes_changes_no_bit(layout, directories):
    off = replaying(directories["qwen3_moe"], layout, "off", updates=1)
    expected = run_ranks(train, off.train.layout.ranks, off, random_batch(), 1, 1).steps[0]
    chosen = with_train(off, router_replay="trainer")
    result = run_ranks(record_disturb_train, off.train.layout.ranks, chosen, random_batch(), 1, 1.0).steps[0]
    assert (result.routing.replayed, set(result.routing.overlap)) == (1.0, {1.0})
    assert replace(result, routing=None) == replace(expected, routing=None)


def test_noted_routes_are_replayed_in_log_probs_bit_by_bit(directories):
    noting_T, replaying_T = run_ranks(noted_and_replayed, 1, replaying(directories["qwen3_moe"], "one", "trainer"), random_batch())
    np.testing.assert_array_equal(replaying_T, noting_T)


def test_the_reference_chooses_for_itself(directories):
    batch = routed_batch("qwen3_moe")
    chosen = replaying(directories["qwen3_moe"], "one", "rollout", uses_reference=True)
    result = run_ranks(train, 1, chosen, batch, 1, 1)
    # As many mini-batches, so that both passes run the same micro-batches.
    plain = run_ranks(train, 1, replaying(directories["qwen3_moe"], "one", "off"), replace(batch, routes_T=None), 0)
    np.testing.assert_array_equal(result.reference_T, plain.before_T)
    assert np.abs(result.before_T - plain.before_T).max() > 0.1


# -- counts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one", "tp2-ep2", "pp2-vpp2", "cp2"])
def test_loads_count_every_token_once_and_no_padding(layout, directories):
    batch = random_batch()
    chosen = replaying(directories["qwen3_moe"], layout, "off", recompute="layers", updates=1, dtype="float64")
    stats = run_ranks(train, chosen.train.layout.ranks, chosen, batch, 1, 1).steps[0].routing
    model = load_model(directories["qwen3_moe"], torch.float64)
    routes = own_routes(model, batch)
    for place, layer in enumerate(stats.layers):
        load_E = np.bincount(routes[:, place].ravel(), minlength=8) / routes[:, place].size * 8 - 1
        assert layer == place
        measured = stats.load_max[place], stats.load_min[place], stats.load_mean[place], stats.dead_experts[place]
        assert measured == pytest.approx((load_E.max(), load_E.min(), np.abs(load_E).mean(), (load_E == -1).sum()), abs=1e-12)
    assert (stats.replayed, stats.overlap) == (None, None)


def test_overlap_is_the_share_of_routes_the_trainer_would_have_chosen(directories):
    batch = random_batch()
    model = load_model(directories["qwen3_moe"], torch.float64)
    own = own_routes(model, batch)
    routes = own[..., ::-1].copy()  # another order among the same experts
    routes[batch.offsets[1:] - 1] = 255
    changed = np.flatnonzero(routes[:, 3, 0] != 255)[::2]
    routes[changed, 3] = np.sort((own[changed, 3] + [1, 2]) % 8) % 8
    routes[changed, 3, 1] = np.where(routes[changed, 3, 0] == routes[changed, 3, 1], (routes[changed, 3, 0] + 1) % 8, routes[changed, 3, 1])
    same = (np.sort(routes[:, 3]) == np.sort(own[:, 3])).all(-1)
    num_known = len(own) - batch.num_sequences
    chosen = replaying(directories["qwen3_moe"], "one", "rollout", updates=1, dtype="float64")
    stats = run_ranks(train, 1, chosen, replace(batch, routes_T=routes), 1, 1).steps[0].routing
    assert stats.replayed == num_known / len(own)
    assert stats.overlap == pytest.approx((1, 1, 1, same.sum() / num_known))
    assert same.sum() < 0.6 * num_known


# -- what is refused -----------------------------------------------------------------------------------------------


def test_routes_that_a_layer_does_not_follow_stop_the_update(directories):
    chosen = replaying(directories["qwen3_moe"], "one", "rollout")
    with pytest.raises(RankError, match=r"layer 2: \d+ of \d+: must be all"):
        run_ranks(train_with_a_router_that_disobeys, 1, chosen, routed_batch("qwen3_moe"), 2)


@pytest.mark.parametrize(
    ("mode", "batch", "message"),
    [
        ("trainer", random_batch(), "0 micro-batches with routes for an update of"),
        ("rollout", random_batch(), r"routes of None: must be .* = \(4, 2\)"),
        ("rollout", routed_batch("deepseek"), r"routes of \(3, 4\): must be .* = \(4, 2\)"),
        ("off", routed_batch("qwen3_moe"), r"routes of \(4, 2\): must be none"),
    ],
)
def test_an_update_without_the_routes_it_needs_is_refused(mode, batch, message, directories):
    with pytest.raises(RankError, match=message):
        run_ranks(train_without_recording, 1, replaying(directories["qwen3_moe"], "one", mode), batch)
