"""Imports: a package imports only packages below it, validation reads declarations of models alone, and what is imported is declared."""

import ast
import re
import sys
import tomllib
from graphlib import CycleError
from importlib.metadata import packages_distributions
from pathlib import Path

import package_order
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moerl

ROOT = Path(moerl.__file__).resolve().parent.parent

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


def sources() -> list[Path]:
    return sorted((ROOT / "moerl").rglob("*.py"))


GRAPH = package_order.file_graph()
FOLDERS = package_order.grouped(GRAPH, package_order.folder_of)
PACKAGES = package_order.grouped(GRAPH, package_order.package_of)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_imports_only_packages_below_it(package):
    """As docs/architecture.md has them: one that rises to another floor is seen in its change."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", package_order.PAGE.read_text(), re.MULTILINE)
    floor = {name: int(number) for number, name in rows}
    assert {other for other in PACKAGES[package] if floor[other] >= floor[package]} == set()


@pytest.mark.parametrize("graph", [GRAPH, FOLDERS, PACKAGES], ids=["files", "folders", "packages"])
def test_nothing_imports_each_other_in_a_circle(graph):
    assert package_order.floors(graph)


def test_a_circle_is_found():
    with pytest.raises(CycleError):
        package_order.floors({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_architecture_md_draws_the_order_of_the_code():
    text = package_order.PAGE.read_text()
    assert text == package_order.page(text), "python tools/package_order.py draws it anew"


def module_of(name: str) -> Path:
    """The file of the module that `name`, a module or something in one, belongs to."""
    path = ROOT.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if path.is_dir() else module_of(name.rpartition(".")[0])


def test_what_validation_reads_of_models_is_declarations_alone():
    """And with them every family: adding one must not make validation import torch or Megatron."""
    files = (ROOT / "moerl" / "config").rglob("*.py")
    read = {name for file in files for name in package_order.imported(file) if name.startswith("moerl.models")}
    waiting, seen = {module_of(name) for name in read} | {module_of("moerl.models")}, set()
    while waiting:
        file = waiting.pop()
        seen.add(file)
        for name in package_order.imported(file):
            assert name.split(".")[0] in {*sys.stdlib_module_names, "packaging", "pydantic", "moerl"}, f"{file.name} imports {name}"
            assert not name.startswith("moerl.") or name.startswith(("moerl.models.", "moerl.types.errors.")), f"{file.name} imports {name}"
            if name.startswith("moerl.models"):
                waiting |= {module_of(name)} - seen
    assert {"deepseek_v3.py", "family.py", "layer_rules.py"} <= {file.name for file in seen}


def test_types_import_no_other_part():
    names = [name for file in (ROOT / "moerl" / "types").glob("*.py") for name in package_order.imported(file)]
    assert not [name for name in names if name.startswith("moerl") and not name.startswith("moerl.types.")]


def test_third_party_packages_with_an_owner_are_imported_only_there():
    wrong = []
    for file in sources():
        where = file.relative_to(ROOT / "moerl").as_posix()
        for name in package_order.imported(file):
            owners = OWNERS.get(name.split(".")[0])
            if owners is not None and not where.startswith(owners):
                wrong.append(f"{where} imports {name}")
    assert not wrong


def test_imports_inside_functions_and_relative_ones_are_seen(tmp_path):
    file = tmp_path / "moerl" / "config" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f():\n    from moerl.loop import run\n    import torch\nfrom ..train import actor\nfrom . import y\n")
    found = set(package_order.imported(file, tmp_path))
    assert found == {"moerl.loop.run", "torch", "moerl.train.actor", "moerl.config.y"}


def test_what_the_package_imports_is_declared_and_what_is_declared_is_imported():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    needed = {distribution(line) for line in project["dependencies"]}
    optional = {distribution(line) for name in EXTRAS for line in project["optional-dependencies"][name]}
    found = packages_distributions()
    names = {name.split(".")[0] for file in sources() for name in package_order.imported(file)}
    names -= {*sys.stdlib_module_names, "moerl", "megatron_patches"}
    imported = {canonical(found.get(name, [DISTRIBUTIONS.get(name, name)])[0]) for name in names}
    assert sorted(imported - needed - optional) == []
    assert sorted(needed - imported - FOR_OTHERS) == []


def distribution(requirement: str) -> str:
    return canonical(Requirement(requirement).name)


def canonical(name: str) -> str:
    return str(canonicalize_name(name))


WALL_CLOCK = {
    "moerl/run_stop.py": 2,  # when the machine is taken away is given in it: it is read once, and once to see that it lies ahead
    "moerl/doctor/head.py": 2,  # the nodes' wall clocks are what is compared
    "moerl/doctor/on_each_node.py": 1,
    "moerl/hangs/hang_reports.py": 1,  # the name of a file
    "moerl/models/plain_tokenizer.py": 1,  # templates of chats ask for the date
    "moerl/observe/writers.py": 2,  # TensorBoard shows it
}


def test_nothing_waits_by_the_wall_clock():
    """Whoever sets it would end a wait early, or never: these read it, and nobody else."""
    found: dict[str, int] = {}
    for file in sorted(file for folder in ("moerl", "megatron_patches", "slurm") for file in (ROOT / folder).rglob("*.py")):
        names = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow", "datetime.today"}
        calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        if count := sum(call in names for call in calls):
            found[str(file.relative_to(ROOT))] = count
    assert found == WALL_CLOCK
