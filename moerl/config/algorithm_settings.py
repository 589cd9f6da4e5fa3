"""Settings of an algorithm alone: one of configs/algorithm, for programs and notebooks that need no run."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from moerl.config.compose import options
from moerl.config.derive.model_configs import shipped_configs
from moerl.config.schema.algorithm_config import AlgorithmConfig
from moerl.config.schema_problems import problem_of
from moerl.types.errors import NOT_SET, ConfigError, problem

_ADAPTER = TypeAdapter(AlgorithmConfig)


def algorithm(name: str, *overrides: str) -> AlgorithmConfig:
    """Settings of algorithm=NAME with overrides: algorithm("gspo", "objective.clip_high=0.001", "kl_coefficient=0.01").

    Raises ConfigError with everything that is wrong.
    """
    if name not in (known := options("algorithm")):
        fix = f"one of {', '.join(known)}"
        raise ConfigError([problem("algorithm", name, "is not one of the algorithm files", "they are in configs/algorithm", fix)])
    bare = [text for text in overrides if "=" not in text]
    wrong = [problem("override", text, "must read key=value", "there is no value", f"{text}=VALUE") for text in bare]
    if wrong:
        raise ConfigError(wrong)
    overrides = tuple(text.removeprefix("algorithm.") for text in overrides)
    try:
        composed = OmegaConf.merge(
            OmegaConf.load(shipped_configs() / "algorithm" / f"{name}.yaml"), OmegaConf.from_dotlist(list(overrides))
        )
        plain = OmegaConf.to_container(composed, resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        path = ".".join(filter(None, ("algorithm", getattr(error, "full_key", None))))
        raise ConfigError([problem(path, NOT_SET, "must be given here", reason, f"{path}=VALUE as an override")]) from error
    assert isinstance(plain, dict)
    return of_plain({str(key): value for key, value in plain.items()})


def of_plain(plain: Mapping[str, Any]) -> AlgorithmConfig:
    """Typed form of plain settings. Raises ConfigError with everything that is wrong."""
    try:
        return _ADAPTER.validate_python(dict(plain))
    except ValidationError as error:
        found = [problem_of({**details, "loc": ("algorithm", *details["loc"])}) for details in error.errors(include_url=False)]
        raise ConfigError(found) from error


def settings_of(given: AlgorithmConfig | Mapping[str, Any] | str) -> AlgorithmConfig:
    """Typed settings of what may be these, plain settings, or the name of a file."""
    if isinstance(given, AlgorithmConfig):
        return given
    return algorithm(given) if isinstance(given, str) else of_plain(given)
