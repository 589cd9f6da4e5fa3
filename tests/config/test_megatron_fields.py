"""Names under train.megatron against Megatron's real dataclass."""

import dataclasses

from moerl.config.megatron_fields import OWNED, megatron_fields, megatron_problems


def test_the_names_read_from_source_are_the_fields_of_the_dataclass():
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert set(megatron_fields()) == {field.name for field in dataclasses.fields(TransformerConfig)}


def test_every_owned_name_is_a_field_of_megatron():
    assert set(OWNED) <= set(megatron_fields())


def test_an_owned_name_is_refused_with_what_to_do_instead():
    (problem,) = megatron_problems({"context_parallel_size": 2})
    assert problem.fix == "set train.layout.cp instead"


def test_without_megatron_any_name_is_refused_and_none_is_fine(monkeypatch):
    monkeypatch.setattr("moerl.config.megatron_fields.megatron_fields", dict)
    assert not list(megatron_problems({}))
    (problem,) = megatron_problems({"moe_z_loss_coeff": 0.1})
    assert problem.rule == "needs megatron-core"
