"""Rules of a run as a whole: its steps, its optimizer, the variables of its network; and of `eval`: what cannot be measured."""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from moerl.config.derive.eval_settings import max_response_tokens, reward_of
from moerl.config.derive.rdma import SHARP, crosses_nodes
from moerl.config.rules.algorithm_rules import compares_samples, corrects_staleness
from moerl.config.rules.facts import Facts
from moerl.config.schema.data_config import DataConfig, EvalConfig, EvalDataset, FileData, RewardConfig
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, can_be, problem


def run_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        reason = "it is the name of the run's directory under output_dir"
        yield problem("name", config.name, "must be letters, digits, dots, dashes and underscores", reason, "name=my-run-1")
    if not can_be(config.run_dir):
        reason = "the run's directory is made there, and no file system takes that"
        yield problem("output_dir", config.output_dir, "must be a path, and name a part of one", reason, "shorter names")
    if config.group_size < 2 and compares_samples(config.algorithm):
        reason = f"{config.algorithm.advantage.kind} compares the samples of one prompt with each other; one sample has advantage 0"
        yield problem("group_size", config.group_size, "must be at least 2", reason, "group_size=8")
    samples = config.groups_per_step * config.group_size
    if config.train.updates_per_step > samples:
        reason = f"a step has groups_per_step * group_size = {samples} samples, and every update needs one"
        yield problem("train.updates_per_step", config.train.updates_per_step, f"must be at most {samples}", reason, f"at most {samples}")


def staleness_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if config.max_staleness == 0:
        if config.rollout.partial:
            reason = "with max_staleness=0 no completion is unfinished when weights are pushed"
            yield problem("rollout.partial", True, "has no effect", reason, "max_staleness=1, or rollout.partial=false")
        return
    if config.deterministic:
        reason = "which weights sample a group then depends on timing"
        yield problem("deterministic", True, "needs max_staleness=0", reason, "max_staleness=0 or deterministic=false")
    if config.train.old_logprobs == "trainer" and not corrects_staleness(config.algorithm):
        reason = "samples of older weights must be corrected by the probability they were drawn with, which the server recorded"
        fix = "train.old_logprobs=rollout or log_linear, or a correction, as algorithm.corrections=[{kind: tis}]"
        yield problem("train.old_logprobs", "trainer", "needs algorithm.corrections when max_staleness > 0", reason, fix)


def straggler_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    per_step, spare, in_flight = config.groups_per_step, config.spare_groups, config.groups_in_flight
    most = (config.max_staleness + 1) * per_step
    if in_flight is not None and spare:
        reason = "a step begins its own groups then, and those that take long are put off instead of passed"
        yield problem("groups_in_flight", in_flight, "has no effect with spare_groups", reason, "leave it out, or spare_groups=0")
    elif in_flight is not None and config.max_staleness == 0:
        reason = "a group that others pass trains later than the weights it began with"
        yield problem("groups_in_flight", in_flight, "needs max_staleness > 0", reason, "max_staleness=2, or leave it out")
    elif in_flight is not None and not per_step < in_flight <= most:
        reason = (
            "a step waits for groups_per_step of them, which may not be all, and (max_staleness + 1) * groups_per_step are none too stale"
        )
        fix = f"groups_in_flight={min(2 * per_step, most)}, or leave it out"
        yield problem("groups_in_flight", in_flight, f"must be in [{per_step + 1}, {most}]", reason, fix)
    if spare > per_step:
        reason = "of every step's groups more would be thrown away than trained"
        yield problem("spare_groups", spare, f"must be at most groups_per_step={per_step}", reason, f"spare_groups={-(-per_step // 4)}")
    elif spare and spare > (config.num_steps - 1 - config.max_staleness) * per_step:
        reason = f"groups are put off only if the run trains them later, and num_steps={config.num_steps} leaves no step for that"
        yield problem("spare_groups", spare, "has no effect", reason, "spare_groups=0, or a larger num_steps")
    if spare and config.deterministic:
        reason = "which groups are put off depends on which finish first"
        yield problem("deterministic", True, "needs spare_groups=0", reason, "spare_groups=0 or deterministic=false")


def micro_batch_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    budget, multiple = config.train.micro_batch_tokens, config.train.token_multiple
    longest = -(-config.model.max_context // multiple) * multiple
    if budget < longest:
        padded = "" if longest == config.model.max_context else f", padded to a multiple of {multiple} for the layout"
        reason = (
            f"a sequence is never split over micro-batches, and one may have model.max_context={config.model.max_context} tokens{padded}"
        )
        yield problem("train.micro_batch_tokens", budget, f"must be at least {longest}", reason, f"train.micro_batch_tokens={longest}")
    if budget % multiple:
        reason = "micro-batches are padded to it, for sequence and context parallelism and FP8, and must not grow past the budget"
        fix = f"train.micro_batch_tokens={-(-budget // multiple) * multiple}"
        yield problem("train.micro_batch_tokens", budget, f"must be a multiple of {multiple}", reason, fix)


def optimizer_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    optimizer, path = config.train.optimizer, "train.optimizer"
    if optimizer.min_lr > optimizer.lr:
        rule, reason = f"must be at most lr={optimizer.lr}", "the learning rate decays from lr down to min_lr"
        yield problem(f"{path}.min_lr", optimizer.min_lr, rule, reason, f"{path}.min_lr={optimizer.lr / 10}")
    if optimizer.decay != "constant" and optimizer.warmup_steps >= config.num_steps:
        rule = f"must be less than num_steps={config.num_steps}"
        reason = f"{optimizer.decay} decay lasts from the warm-up's end to num_steps"
        yield problem(f"{path}.warmup_steps", optimizer.warmup_steps, rule, reason, f"{path}.decay=constant, or a shorter warm-up")
    yield from _warm_start_rates(config)
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            rule, reason = "must be in [0, 1)", "it is the weight of the past in a running mean"
            yield problem(f"{path}.betas.{index}", beta, rule, reason, f"{path}.betas=[0.9,0.95]")


def _warm_start_rates(config: RunConfig) -> Iterator[Problem]:
    sft, optimizer = config.sft, config.train.optimizer
    if sft is None or optimizer.decay == "constant":
        return
    if sft.lr < optimizer.min_lr:
        rule, reason = f"must be at least train.optimizer.min_lr={optimizer.min_lr}", "the warm start's learning rate decays to that too"
        yield problem("sft.lr", sft.lr, rule, reason, f"train.optimizer.min_lr={sft.lr / 10}")
    if sft.warmup_steps >= sft.num_steps:
        rule, reason = f"must be less than sft.num_steps={sft.num_steps}", f"{optimizer.decay} decay lasts from the warm-up's end to it"
        yield problem("sft.warmup_steps", sft.warmup_steps, rule, reason, "train.optimizer.decay=constant, or a shorter warm-up")


def observe_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if config.observe.wandb != "off" and importlib.util.find_spec("wandb") is None:
        reason = "the package wandb is not installed here"
        yield problem("observe.wandb", config.observe.wandb, "needs wandb", reason, "pip install 'moerl[wandb]', or observe.wandb=off")


_OWNED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
_READ_AT_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PATH", "HOME")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_LONGEST_NAME = 200
"""Characters of the name of a data set that is evaluated."""
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""PyTorch reads the first that is set."""
_HANDLERS = ("auto", "gpu", "cpu", "cpu_host_memory")
"""Values of NVSHMEM_IBGDA_NIC_HANDLER."""


def network_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule of `network` that is broken, and of the variables of ranks and servers."""
    network, given = config.network, config.network.variables
    yield from _variable_problems("network.variables", given)
    for path, own in (("train.environment", config.train.environment), ("rollout.environment", config.rollout.environment)):
        yield from _variable_problems(path, own)
        for name in own.keys() & given.keys():
            yield problem(
                f"{path}.{name}", own[name], "is given twice", "network.variables has it too, for ranks and servers", "one of the two"
            )
    for name in _INTERFACES:
        if name in given and network.interface is not None:
            reason = f"network.interface={network.interface} sets it"
            yield problem(f"network.variables.{name}", given[name], "is given twice", reason, "one of the two")
    yield from _ibgda_problems(config)
    yield from _sharp_problems(config)
    if config.rollout.engine == "sglang":
        for path, found in (("network.variables", given), ("rollout.environment", config.rollout.environment)):
            for name in (name for name in _ALLOCATOR if "expandable_segments:True" in str(found.get(name, ""))):
                reason = "SGLang puts a server to sleep by its own allocation of GPU memory, which such segments do not go with"
                fix = f"leave it out, or train.environment.{name}, the ranks' alone, where pushes go by nccl or disk"
                yield problem(f"{path}.{name}", found[name], "cannot be set for rollout.engine=sglang", reason, fix)


def _ibgda_problems(config: RunConfig) -> Iterator[Problem]:
    roles: tuple[tuple[Literal["train", "rollout"], str, Mapping[str, str | int]], ...] = (
        ("train", "train.environment", config.train.environment),
        ("rollout", "rollout.environment", config.rollout.environment),
    )
    crossing = [(where, own) for role, where, own in roles if crosses_nodes(config, role)]
    for where, given in [("network.variables", config.network.variables), *crossing] if crossing else []:
        for name, rule, reason, fix in _contradictions(given):
            yield problem(f"{where}.{name}", given[name], rule, reason, fix)


def _sharp_problems(config: RunConfig) -> Iterator[Problem]:
    for where, given in (("network.variables", config.network.variables), ("train.environment", config.train.environment)):
        if str(given.get(SHARP)) != "1":
            continue
        path, fix = f"{where}.{SHARP}", "leave it out"
        if config.placement.nodes == 1:
            yield problem(path, given[SHARP], "needs several nodes", "switches sum what comes from different ones", fix)
        elif config.train.destroy_groups:
            reason = "Megatron asks for SHARP when it first makes the groups, and groups that are made again would not have it"
            yield problem(path, given[SHARP], "needs train.destroy_groups=false", reason, f"train.destroy_groups=false, or {fix}")


def _contradictions(given: Mapping[str, str | int]) -> Iterator[tuple[str, str, str, str]]:
    """Variables that DeepEP between nodes cannot work with, or that have no effect: name, rule, reason, what to write instead."""
    if str(given.get("NVSHMEM_IB_ENABLE_IBGDA", "1")).lower() not in ("1", "true", "yes", "on"):
        reason = "DeepEP's kernels send by IBGDA, and DeepEP sets it over what is there"
        yield "NVSHMEM_IB_ENABLE_IBGDA", "has no effect with DeepEP over several nodes", reason, "leave it out"
    if str(given.get("NVSHMEM_ENABLE_NIC_PE_MAPPING", "0")).lower() not in ("0", "false", "no", "off"):
        reason = (
            "DeepEP's kernels for throughput make a group of NVSHMEM of one GPU of each node, which would all take the node's first adapter"
        )
        rule = "cannot be set with DeepEP over several nodes"
        yield "NVSHMEM_ENABLE_NIC_PE_MAPPING", rule, reason, "leave it out: each GPU takes the nearest of NVSHMEM_HCA_LIST"
    handler = str(given.get("NVSHMEM_IBGDA_NIC_HANDLER", "auto")).lower()
    if handler not in _HANDLERS:
        yield "NVSHMEM_IBGDA_NIC_HANDLER", f"must be one of {', '.join(_HANDLERS)}", "NVSHMEM takes no other", "leave it out, which is auto"


def _variable_problems(where: str, given: Mapping[str, str | int]) -> Iterator[Problem]:
    for name, value in given.items():
        path = f"{where}.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            reason = "letters, digits and underscores are what a shell and every library can read"
            yield problem(path, value, "is not the name of an environment variable", reason, f"{where}.NCCL_IB_TIMEOUT=22")
        elif name in _OWNED:
            yield problem(path, value, "cannot be set", "moerl and Ray tell each process its place", "leave it out")
        elif name in _READ_AT_START and where != "rollout.environment":
            reason = "it is read when a process starts, and ranks are processes of Ray's that have started"
            yield problem(path, value, "has no effect", reason, f"slurm.environment.{name}, or export {name} before moerl")


# -- evaluation ------------------------------------------------------------------------------------------------


def eval_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule of `eval` that is broken, and of the run's reward for its data."""
    yield from gym_problems(config.reward, config.data)
    if config.eval is None:
        return
    if not config.eval.datasets:
        reason, fix = "nothing would be evaluated", "eval.datasets.NAME.data={kind: files, files: [FILE.parquet]}, or eval=null"
        yield problem("eval.datasets", {}, "needs a data set", reason, fix)
    for name, dataset in config.eval.datasets.items():
        path = f"eval.datasets.{name}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            reason = "files and metrics are named after it"
            yield problem(path, name, "must be letters, digits, dots, dashes and underscores", reason, "eval.datasets.math-500={...}")
        elif len(name) > _LONGEST_NAME:
            rule, reason = f"must be at most {_LONGEST_NAME} characters", "a file is named after it, with more before and behind"
            yield problem(path, name, rule, reason, "a shorter name")
        yield from _sample_problems(path, dataset, config.eval)
        yield from _length_problems(path, dataset, config)
        yield from _seed_problems(path, dataset, config)
        if dataset.reward is not None or not any(gym_problems(config.reward, config.data)):  # once for the reward of the run
            yield from gym_problems(reward_of(config, dataset), dataset.data, f"{path}.")


def gym_problems(reward: RewardConfig, data: DataConfig, path: str = "") -> Iterator[Problem]:
    """`path`: of the section that has `reward` and `data`, with its dot."""
    for name, term in reward.terms.items():
        if term.kind == "gym" and data.kind != "gym":
            reason = f"the scorer belongs to a reasoning-gym task, and {path}data.kind={data.kind}"
            fix = f"{path}data.kind=gym with {path}data.task=TASK, or another kind"
            yield problem(f"{path}reward.terms.{name}.kind", "gym", f"needs {path}data.kind=gym", reason, fix)


def _sample_problems(path: str, dataset: EvalDataset, settings: EvalConfig) -> Iterator[Problem]:
    for index, k in enumerate(dataset.pass_at):
        if k > dataset.samples:
            reason = f"pass@{k} is estimated from the samples of a prompt, and {path}.samples={dataset.samples}"
            yield problem(f"{path}.pass_at.{index}", k, f"must be at most {dataset.samples}", reason, f"{path}.samples={k} or more")
    if settings.temperature == 0 and dataset.samples > 1:
        reason = "at eval.temperature=0 every sample of a prompt is the same"
        yield problem(f"{path}.samples", dataset.samples, "must be 1", reason, f"{path}.samples=1, or eval.temperature=0.6")


def _length_problems(path: str, dataset: EvalDataset, config: RunConfig) -> Iterator[Problem]:
    prompt, response, context = dataset.data.max_prompt_tokens, max_response_tokens(config), config.model.max_context
    if prompt + response > context:
        left = context - response
        reason = f"the longest prompt and a response of {response} tokens must fit into model.max_context={context}"
        fix = f"model.max_context={prompt + response}, or fewer eval.max_response_tokens"
        fix = fix if left < 1 else f"{path}.data.max_prompt_tokens={left}, or {fix}"
        yield problem(f"{path}.data.max_prompt_tokens", prompt, f"must be at most {max(left, 0)}", reason, fix)


def _seed_problems(path: str, dataset: EvalDataset, config: RunConfig) -> Iterator[Problem]:
    assert config.eval is not None
    ours, trained = dataset.data, config.data
    if isinstance(ours, FileData) or isinstance(trained, FileData) or config.eval.seed != config.seed:
        return
    if ours.kind == trained.kind and getattr(ours, "task", None) == getattr(trained, "task", None):  # a kind may have no tasks
        reason = f"rows of kind={ours.kind} are made up from the seed: {path} would have rows that the run trains on"
        yield problem("eval.seed", config.eval.seed, f"must not be seed={config.seed}", reason, f"eval.seed={config.seed + 1}")
