"""A run on one page: what follows from its settings as comments, then every setting as YAML."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from moerl.config.derive.collectors import num_collectors, reception_seconds
from moerl.config.derive.companion_models import CompanionModel, companion_config, companion_models
from moerl.config.derive.object_store import most_bytes, sample_bytes
from moerl.config.load import to_yaml
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem


def summary(config: RunConfig, further: Iterable[str] = ()) -> str:
    """Valid YAML: what `moerl check` prints can be kept and read again. `further`: lines from packages this one may not import."""
    return "".join(f"# {line}\n" for line in (*_derived(config), *further)) + to_yaml(config)


def refusals(problems: Sequence[Problem]) -> Iterator[str]:
    """Lines for people: what the run lacks to be started."""
    if problems:
        yield f"cannot start    moerl train and moerl launch refuse it, for {len(problems)} reason{'s' if len(problems) > 1 else ''}:"
        yield from (f"  {line}" for problem in problems for line in str(problem).splitlines())


def _derived(config: RunConfig) -> list[str]:
    layout = config.train.layout
    samples = config.groups_per_step * config.group_size
    updates = config.train.updates_per_step
    return [
        f"run directory   {config.run_dir}",
        f"train ranks     {layout.ranks}: data parallel {layout.dp}, expert data parallel {layout.edp}",
        f"rollout servers {config.rollout.num_servers} ({config.rollout.engine}, {config.rollout_dtype})",
        f"one step        {config.groups_per_step} prompts * {config.group_size} = {samples} samples, {updates} update(s)",
        f"in flight       at most {config.most_groups} groups{_passing(config)}",
        f"object store    at most {most_bytes(config) / 1e9:.3g} GB of samples, {sample_bytes(config) / 1e6:.3g} MB for the longest",
        f"reception       {_reception(config)}",
        f"algorithm       {_algorithm(config)}",
        f"old log-probs   {_old_logprobs(config)}",
        *(f"{model.name:15} {_companion(config, model)}" for model in companion_models(config)),
        f"reference model {'a frozen copy of the initial weights' if config.uses_reference else 'none'}",
    ]


def _reception(config: RunConfig) -> str:
    if config.rollout.traits.runs_in_driver:
        return "in the driver"
    return f"{num_collectors(config)} collector(s), at most {reception_seconds(config):.2g} s for the samples of a step"


def _passing(config: RunConfig) -> str:
    if config.spare_groups:
        return f"; {config.spare_groups} of each step may be put off"
    left = (config.max_staleness + 1) * config.groups_per_step - config.most_groups
    return f"; {left} younger ones may train before one that is unfinished" if left else ""


def _companion(config: RunConfig, model: CompanionModel) -> str:
    begins = "the policy's initial model" if model.path is None else model.path
    where = "on the policy's ranks" if model.layout is None else f"on {model.layout.ranks} ranks of its own"
    what = f"learning rate {companion_config(config, model).train.optimizer.lr:g}" if model.trains else "does not learn"
    return f"{begins}, {where}; {what}"


def _algorithm(config: RunConfig) -> str:
    algorithm = config.algorithm
    parts = [algorithm.advantage, algorithm.objective, *algorithm.corrections]
    told = (f"{part.kind}({', '.join(f'{name}={value}' for name, value in asdict(part).items() if name != 'kind')})" for part in parts)
    return f"{', '.join(told).replace('()', '')}; normalize_by={algorithm.normalize_by}"


def _old_logprobs(config: RunConfig) -> str:
    if config.train.old_logprobs == "rollout":
        return "the rollout server's"
    if config.train.old_logprobs == "log_linear":
        return "between the rollout server's and the policy's, by their age"
    return "the trainer's, in a pass of their own" if config.needs_old_logprobs else "the trainer's, from the update itself"
