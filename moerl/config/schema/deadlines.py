"""How long anything in a run may take: `deadlines` of moerl/config/schema, the limits of every wait for another process."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from moerl.config.schema.strict import NotNegative, Seconds, Strict

Phase = Literal["start", "load", "wake", "rollout", "eval", "logprobs", "update", "push", "save"]


@dataclass(frozen=True, kw_only=True)
class DeadlineConfig(Strict):
    """At a miss the driver writes who did not arrive, with Python stacks, newest collective and GPUs, into run_dir/hangs, and stops or
    restarts the run. A deadline is of one call to all ranks or servers, of which a phase may make several."""

    start_seconds: Seconds = 600.0
    """Start of ranks, until they have joined each other and loaded the model; of servers, until they accept requests, also when they are
    restarted."""
    load_seconds: Seconds = 3600.0
    """The newest checkpoint: comparing digests, and reading."""
    wake_seconds: Seconds = 300.0
    """The trainer's wake, and its sleep: what train.offload moves."""
    rollout_seconds: Seconds = 7200.0
    """All groups of one step, from the moment at which training waits for them."""
    eval_seconds: Seconds = 14400.0
    """One evaluation, of all its data sets."""
    completion_seconds: Seconds = 1800.0
    """One completion, waiting and repetition after the loss of a server included; all completions of a canary."""
    probe_seconds: Seconds = 30.0
    """Between two probes of a server, and for one to be answered. After one that was missed it gets no new requests, after
    three in a row its stacks are written down and it is ended and started again (rollout.max_restarts)."""
    logprobs_seconds: Seconds = 3600.0
    """Those of the policy, and those of the reference."""
    update_seconds: Seconds = 3600.0
    push_seconds: Annotated[Seconds, Field(le=86_400)] = 300.0
    """All bytes of a push, to all servers; likewise each of the calls before and after, and each pause, sleep and wake of a server. A
    server that misses it is ended and started again. Who waits for another in a push gives up at 0.9 of it."""
    save_seconds: Seconds = 3600.0
    """Staging, and writing, of one checkpoint; also of the weights that end a supervised warm start."""
    settle_seconds: Seconds = 5.0
    """After the first failure, how long the other ranks or servers get to report theirs: the first to be noticed is often not the cause."""
    on_hang: Literal["stop", "restart", "requeue"] = "stop"
    """When a phase has missed its deadline, and everything of the run is ended. stop: exit code 1. restart: the run goes on from its newest
    checkpoint, with new processes, as the same command would. requeue: exit code 75, which asks who started the run to start it again,
    perhaps on other nodes."""
    max_restarts: NotNegative = 3
    """Most restarts of on_hang=restart, in one process of the run."""

    def of(self, phase: Phase) -> float:
        """In seconds."""
        return getattr(self, f"{phase}_seconds")

    @property
    def longest_seconds(self) -> float:
        """Seconds of what training ranks do together."""
        phases: tuple[Phase, ...] = ("start", "load", "wake", "logprobs", "update", "push", "save")
        return max(self.of(phase) for phase in phases)
