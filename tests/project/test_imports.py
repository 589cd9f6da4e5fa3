"""Who may import whom. A package imports only packages of its own level and below.

Validation also reads the declarations of model families, which import nothing but each other and the types.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moerl

ROOT = Path(moerl.__file__).resolve().parent.parent

LEVELS = [
    {"types", "config"},
    {"algorithms", "models", "rewards"},
    {"rollout", "train", "weights", "planner", "cluster", "observe", "convert", "doctor", "evaluation"}
    | {"hangs", "hardware", "slurm", "kuberay", "residency", "publish", "canary", "scratch_model"},
    {"loop", "warm_start"},
    {"run", "check"},
    {"__main__"},
]

OWNERS = {
    "megatron": ("train/", "models/"),
    "megatron_patches": ("train/", "models/"),
    "transformer_engine": ("train/", "models/"),
    "vllm": ("rollout/engines/vllm",),
    "sglang": ("rollout/engines/sglang",),
    "hydra": ("config/",),
    "omegaconf": ("config/",),
    "wandb": ("observe/",),
}
"""Third-party package -> where under moerl/ it may be imported."""

DISTRIBUTIONS = {"transformer_engine": "transformer-engine"}
"""Of packages that may not be installed where this runs: name of the import -> of the distribution, where they differ."""

EXTRAS = ("gpu", "wandb", "mbridge", "vllm", "sglang")

FOR_OTHERS = {"einops", "tensorboard"}
"""Imported by megatron-core and by torch.utils.tensorboard, which do not declare them."""


def level_of(part: str) -> int:
    return next(level for level, parts in enumerate(LEVELS) if part in parts)


def sources() -> list[Path]:
    return sorted((ROOT / "moerl").rglob("*.py"))


def imports_of(file: Path) -> Iterator[str]:
    """Absolute dotted names, also of imports inside functions; `from moerl import run` counts as moerl.run."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_every_part_of_the_package_has_a_level():
    parts = {file.relative_to(ROOT / "moerl").parts[0].removesuffix(".py") for file in sources()} - {"__init__"}
    assert parts <= set().union(*LEVELS)


def test_no_module_imports_a_level_above_its_own():
    wrong = []
    for file in sources():
        part = file.relative_to(ROOT / "moerl").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for name in imports_of(file):
            parts = name.split(".")
            if parts[0] != "moerl" or len(parts) == 1 or parts[1] == "__version__":
                continue
            if part == "config" and parts[1] == "models":
                continue  # declarations: the next test
            if level_of(parts[1]) > level_of(part):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong


def module_of(name: str) -> Path:
    """The file of the module that `name`, a module or something in one, belongs to."""
    path = ROOT.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if path.is_dir() else module_of(name.rpartition(".")[0])


def test_what_validation_reads_of_models_is_declarations_alone():
    """And with them every family: adding one must not make validation import torch or Megatron."""
    read = {name for file in (ROOT / "moerl" / "config").rglob("*.py") for name in imports_of(file) if name.startswith("moerl.models")}
    waiting, seen = {module_of(name) for name in read} | {module_of("moerl.models")}, set()
    while waiting:
        file = waiting.pop()
        seen.add(file)
        for name in imports_of(file):
            assert name.split(".")[0] in {*sys.stdlib_module_names, "packaging", "moerl"}, f"{file.name} imports {name}"
            assert not name.startswith("moerl.") or name.startswith(("moerl.models.", "moerl.types.errors.")), f"{file.name} imports {name}"
            if name.startswith("moerl.models"):
                waiting |= {module_of(name)} - seen
    assert {"deepseek_v3.py", "family.py", "layers.py"} <= {file.name for file in seen}


def test_types_import_no_other_part():
    names = [name for file in (ROOT / "moerl" / "types").glob("*.py") for name in imports_of(file)]
    assert not [name for name in names if name.startswith("moerl") and not name.startswith("moerl.types.")]


def test_third_party_packages_with_an_owner_are_imported_only_there():
    wrong = []
    for file in sources():
        where = file.relative_to(ROOT / "moerl").as_posix()
        for name in imports_of(file):
            owners = OWNERS.get(name.split(".")[0])
            if owners is not None and not where.startswith(owners):
                wrong.append(f"{where} imports {name}")
    assert not wrong


def test_the_levels_check_sees_an_import_inside_a_function_and_a_relative_one(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "moerl" / "config" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f():\n    from moerl.loop import run\n    import torch\nfrom ..train import actor\nfrom . import y\n")
    assert set(imports_of(file)) == {"moerl.loop.run", "torch", "moerl.train.actor", "moerl.config.y"}


def test_what_the_package_imports_is_declared_and_what_is_declared_is_imported():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    needed = {distribution(line) for line in project["dependencies"]}
    optional = {distribution(line) for name in EXTRAS for line in project["optional-dependencies"][name]}
    found = packages_distributions()
    names = {name.split(".")[0] for file in sources() for name in imports_of(file)}
    names -= {*sys.stdlib_module_names, "moerl", "megatron_patches"}
    imported = {canonical(found.get(name, [DISTRIBUTIONS.get(name, name)])[0]) for name in names}
    assert sorted(imported - needed - optional) == []
    assert sorted(needed - imported - FOR_OTHERS) == []


def distribution(requirement: str) -> str:
    return canonical(Requirement(requirement).name)


def canonical(name: str) -> str:
    return str(canonicalize_name(name))
