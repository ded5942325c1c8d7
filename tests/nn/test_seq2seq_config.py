"""Composed settings of the model: changes by name, JSON of this and earlier versions, labels."""

import dataclasses
import json

import pytest

from attention_jax.nn import ANY_LENGTH, BlockConfig, CrossAttentionConfig, Seq2SeqConfig

CONFIG = Seq2SeqConfig(
    score="additive",
    block=BlockConfig(dim=8, num_heads=2),
    cross_attention=CrossAttentionConfig("local-m", radius=3),
    positions=ANY_LENGTH,
    encoder_layers=0,
)


def test_settings_are_changed_by_name_whichever_part_they_belong_to():
    flat = {
        "score": "additive", "dim": 8, "num_heads": 2, "attention": "local-m", "radius": 3,
        "positions": ANY_LENGTH, "encoder_layers": 0,
    }  # fmt: skip
    assert Seq2SeqConfig().with_settings(**flat) == CONFIG
    changed = CONFIG.with_settings(radius=1, block=BlockConfig(hidden_dim=5), num_heads=4)
    assert changed.cross_attention == CrossAttentionConfig("local-m", radius=1)
    assert changed.block == BlockConfig(hidden_dim=5, num_heads=4)
    assert CONFIG.with_settings() == CONFIG != changed


def test_no_two_settings_have_the_same_name():
    """The command line has one option for each; `positions` is one option as a whole."""
    names = [
        field.name
        for part in (Seq2SeqConfig, BlockConfig, CrossAttentionConfig)
        for field in dataclasses.fields(part)
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["heads", "kind", "checkpoint_blocks"])
def test_settings_that_do_not_exist(name):
    with pytest.raises(TypeError, match=name):
        CONFIG.with_settings(**{name: 1})


@pytest.mark.parametrize("name", ["block", "cross_attention", "positions"])
def test_a_part_must_be_a_config(name):
    with pytest.raises(ValueError, match=f"{name} must be a [A-Z].*Config; got 3"):
        Seq2SeqConfig(**{name: 3})


def test_json_of_this_version():
    content = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
    assert content["block"]["num_heads"] == 2
    assert content["cross_attention"]["attention"] == "local-m"
    assert Seq2SeqConfig.from_json(content) == CONFIG


def test_json_of_earlier_versions():
    """Their settings were flat, and some had other names."""
    content = {
        "score": "additive", "dim": 8, "heads": 2, "key_heads": None, "attention": "local-m",
        "radius": 3, "checkpoint_blocks": False, "positions": dataclasses.asdict(ANY_LENGTH),
        "encoder_layers": 0,
    }  # fmt: skip
    assert Seq2SeqConfig.from_json(json.loads(json.dumps(content))) == CONFIG


def test_labels_name_what_is_not_the_default():
    assert Seq2SeqConfig().label == "scaled"
    assert Seq2SeqConfig(block=BlockConfig(num_heads=4)).label == "scaled, 4 heads"
    expected = "additive, local-m, 2 heads in self attention, positions any-length"
    assert CONFIG.label == expected
