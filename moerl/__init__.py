"""Reinforcement learning for large mixture-of-experts language models, Megatron-first.

    import moerl

    config = moerl.load("grpo-tiny-moe-1n2g-sync", "eval=tiny-repeat", "num_steps=20")     as the words of a command
    problems = moerl.check(config)       what `train` would refuse it for; empty: nothing
    print(moerl.plan(config))            what a push of its weights moves
    report = moerl.train(config)         trains, or goes on; the path of the report
    results = moerl.evaluate(config)     of its newest checkpoint, on the data sets of eval.*
    loss = moerl.algorithm_loss(...)     advantages, loss and metrics of an algorithm, from plain arrays

The functions are in moerl/api.py, which is imported when the first of them is used: `import moerl` imports nothing.
"""

import sys
from types import ModuleType

__version__ = "0.1.0"

__all__ = [
    "AlgorithmConfig", "AlgorithmResult", "CheckpointError", "ConfigError", "MemoryPlan", "MoerlError", "Problem", "PushPlan", "Result",
    "RunConfig", "RunStopped", "TokenArrays", "algorithm", "algorithm_loss", "check", "evaluate", "load", "memory", "plan", "train",
]  # fmt: skip

TYPE_CHECKING = False  # that of typing, without its import
if TYPE_CHECKING:
    from moerl.api import algorithm, check, evaluate, load, memory, plan, train
    from moerl.config.schema.algorithm_config import AlgorithmConfig
    from moerl.config.schema.run_config import RunConfig
    from moerl.evaluation.estimates import Result
    from moerl.planner.memory_plan import MemoryPlan
    from moerl.planner.push_plan import PushPlan
    from moerl.train.loss.algorithm_loss import AlgorithmResult, TokenArrays, algorithm_loss
    from moerl.types.errors import CheckpointError, ConfigError, MoerlError, Problem, RunStopped
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'moerl' has no attribute {name!r}")
        from moerl import api

        return getattr(api, name)

    def __dir__():
        return sorted({*globals(), *__all__})


class _Module(ModuleType):
    """`moerl.train` and `moerl.check` are functions and, once they are imported, also modules: those can be called as the functions."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in __all__:
            value.__class__ = _Module
        super().__setattr__(name, value)

    def __call__(self, *args: object, **kwargs: object) -> object:
        from moerl import api

        return getattr(api, self.__name__.rpartition(".")[2])(*args, **kwargs)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """By its name, as cloudpickle does with every other module."""
        from importlib import import_module

        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Module
