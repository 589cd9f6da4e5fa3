"""How the versions of an engine call the settings that moerl renders."""

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet

from moerl.types.errors import EngineError

Names = Mapping[str, str]
"""From a field of moerl's settings, e.g. rollout.layout.dp, to the engine's argument."""


def names_of(engine: str, table: Mapping[str, Names], version: str) -> Names:
    """`table`: by range of versions, as in pyproject.toml. EngineError with the ranges if none has `version`."""
    for versions, names in table.items():
        if version in SpecifierSet(versions, prereleases=True):
            return names
    raise EngineError(f"{engine} {version}: moerl knows the arguments of {', '.join(f'{engine}{versions}' for versions in table)}")


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""quantization_config of a checkpoint in DeepSeek-V3's format."""
