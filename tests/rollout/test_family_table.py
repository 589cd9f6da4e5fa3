"""docs/rollout-servers.md says of every family which engine serves it: what their tests run, and what `moerl check` accepts."""

from pathlib import Path

from family_servers import NATIVE, REFUSED, TRAINED
from tiny_servers import CONFIGS
from tiny_servers import NATIVE as OTHERS

from moerl.models.families import family_table
from moerl.types.engine_traits import TRAITS

PAGE = Path(__file__).parents[2] / "docs" / "rollout-servers.md"
FAMILIES = {engine: traits.served for engine, traits in TRAITS.items() if traits.served is not None}
IN_EVERY_CHANGE = "qwen3_moe"
"""Of the runs of tests/run/test_run_engines.py."""


def served(engine):
    kept = {name for kind, name in (each.split("-") for each in NATIVE) if kind == engine}
    return kept | {CONFIGS[name].model_type for kind, name in (each.split("-") for each in OTHERS) if kind == engine}


def test_a_family_is_accepted_with_the_engines_that_keep_the_contract_and_train_with_it():
    for engine, accepted in FAMILIES.items():
        assert set(accepted) == served(engine)
        assert set(accepted) == {name for kind, name in (each.split("-") for each in TRAINED) if kind == engine} | {IN_EVERY_CHANGE}


def test_the_page_has_every_family_and_quotes_refusals():
    lines = PAGE.read_text().partition("<!-- families -->")[2].split("\n\n")[1].splitlines()[2:]
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]

    def cell(engine, family):
        if family in FAMILIES[engine]:
            return "yes"
        return f'no: "{REFUSED[engine, family]}"' if (engine, family) in REFUSED else "not tried"

    assert found == [(f"`{family}`", cell("sglang", family), cell("vllm", family)) for family in family_table.FAMILIES]
