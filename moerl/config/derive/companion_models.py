"""Models beside the policy that a configuration asks for, and the configuration that each is trained by."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moerl.config.schema.layout import Layout
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import NoRecompute, OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionModel:
    name: str
    """Also of the folder of its part of a checkpoint."""
    section: str
    """Path of its settings."""
    path: str | None
    """None: the policy's initial weights."""
    layout: Layout | None
    """Layout of ranks of its own; None: on the policy's."""
    optimizer: OptimizerConfig | None = None
    """None: the policy's."""
    is_critic: bool = False
    uses_reference: bool = False
    trains: bool = True


def companion_models(config: RunConfig) -> Iterator[CompanionModel]:
    """In the order in which they start."""
    critic, outcome, needs = config.critic, config.outcome_model, config.algorithm.needs
    if "values" in needs:
        yield CompanionModel(
            name="critic", section="critic", path=critic.path, layout=critic.layout, optimizer=critic.optimizer, is_critic=True
        )
    if "process_rewards" in needs:
        name = "outcome_model"
        yield CompanionModel(
            name=name, section=name, path=outcome.path, layout=outcome.layout, optimizer=outcome.optimizer, uses_reference=True
        )
    for name, teacher in ({} if config.distillation is None else config.distillation.teachers).items():
        section = f"distillation.teachers.{name}"
        yield CompanionModel(name=f"teacher-{name}", section=section, path=teacher.path, layout=teacher.layout, trains=False)


def own_layouts(config: RunConfig) -> dict[str, Layout]:
    """Those on ranks of their own, by name."""
    return {model.name: model.layout for model in companion_models(config) if model.layout is not None}


def makes_room(config: RunConfig) -> bool:
    """The policy gives up what training needs while a model on its ranks is loaded or saved."""
    return config.train.offload != "none" and any(model.layout is None for model in companion_models(config))


def without_companions(config: RunConfig) -> RunConfig:
    """Settings for an evaluation, which asks none of them."""
    critic, outcome = replace(config.critic, layout=None, path=None), replace(config.outcome_model, layout=None, path=None)
    return replace(config, critic=critic, outcome_model=outcome, distillation=None)


def companion_config(config: RunConfig, model: CompanionModel) -> RunConfig:
    """The run's, as this model is trained: without what concerns servers and routes."""
    on_own = model.layout is not None
    offload = "none" if on_own else config.train.offload
    train = replace(
        config.train,
        layout=config.train.layout if model.layout is None else model.layout,
        optimizer=config.train.optimizer if model.optimizer is None else model.optimizer,
        offload=offload,
        destroy_groups=False,
        router_replay="off",
        mtp_loss=0.0,
        updates_per_step=config.train.updates_per_step if model.trains else 1,
        bridge="native",
    )
    if not model.trains:
        train = replace(train, recompute=NoRecompute(), overlap_grad_reduce=False, overlap_param_gather=False, overlap_bucket_size=None)
    # Where it leaves the GPU its checkpoints are copies on the host, however they are written.
    checkpoint = replace(config.checkpoint, async_save=True) if offload != "none" else config.checkpoint
    return replace(config, train=train, checkpoint=checkpoint)
