"""Settings of a reversal run: mistakes, labels, and config.json, of older versions too."""

import dataclasses
import json

import pytest
from attention_jax.tasks.reversal.task import MODEL, ReversalConfig

from attention_jax import Additive
from attention_jax.nn import ModelConfig
from attention_jax.training.loop import LoopConfig


def test_settings_survive_json():
    made = ReversalConfig(
        model=ModelConfig(
            score="additive",
            self_attention_score=None,
            num_heads=4,
            num_key_heads=2,
            activation="gelu",
            norm="post",
            normalize_qk=True,
            dropout_rate=0.1,
            attention="coverage",
            radius=3,
            alignment="monotonic",
            mask_padding=False,
            encoder_layers=2,
        ),
        loop=LoopConfig(seeds=3),
        learning_rate=0.1,
        weight_decay=0.25,
        coverage_weight=0.5,
        source_start=False,
    )
    content = json.loads(json.dumps(dataclasses.asdict(made)))
    assert ReversalConfig.from_json(content) == made
    assert ReversalConfig.from_json(content) != ReversalConfig()


def test_labels_of_normalizers():
    labels = [
        ReversalConfig(model=dataclasses.replace(MODEL, **settings)).label
        for settings in (
            {}, {"normalizer": "softmax"}, {"attention": "coverage"}, {"positions": "rotary"}
        )
    ]  # fmt: skip
    rotary = "positions rotary position_anchor=end position_draw=window position_limit=8192"
    rotary = f"scaled, {rotary} max_wavelength=100.0 min_wavelength=0.4 position_scale=8.0"
    assert labels == ["scaled", "scaled, softmax", "scaled, coverage", rotary]


def test_the_usual_normalizer_is_that_of_the_kind_of_attention():
    for attention, normalizer in (("global", "log_scaled(start=9)"), ("local-p", "softmax")):
        made = ReversalConfig(model=dataclasses.replace(MODEL, attention=attention))
        assert made.model.normalizer == normalizer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be at least 1; got 0"),
        ({"min_length": 0}, r"min_length must be at least 1; got 0"),
        ({"min_length": 5, "max_length": 4}, r"max_length must be at least min_length 5; got 4"),
        ({"learning_rate": 0.0}, r"learning_rate must be greater than 0; got 0.0"),
        ({"learning_rate": float("nan")}, r"learning_rate must be greater than 0; got nan"),
        ({"schedule": "linear"}, r"schedule must be one of cosine, constant; got 'linear'"),
        ({"clip_norm": -1.0}, r"clip_norm must be greater than 0; got -1.0"),
        ({"weight_decay": -0.5}, r"weight_decay must be at least 0; got -0.5"),
        ({"coverage_weight": -0.5}, r"coverage_weight must be at least 0; got -0.5"),
        ({"coverage_weight": float("nan")}, r"coverage_weight must be at least 0; got nan"),
        (
            {"model": ModelConfig(score=Additive(5))},
            r"model.score must be a name, for config.json to hold it; got Additive",
        ),
        ({"model": ModelConfig(self_attention_score=Additive(5))}, r"model.self_attention_score"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ReversalConfig(**settings)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("model"),
        lambda content: content.update(model=3),
        lambda content: content["model"].update(unknown=3),
        lambda content: content["model"].update(block={"dim": 8}),  # of earlier versions
        lambda content: content["loop"].update(unknown=3),
        lambda content: content.update(unknown=3),
    ],
)
def test_foreign_json(damage):
    content = dataclasses.asdict(ReversalConfig())
    damage(content)
    with pytest.raises(ValueError, match=r"config.json is not that of a reversal run"):
        ReversalConfig.from_json(content)


def test_foreign_settings():
    content = dataclasses.asdict(ReversalConfig())
    content["model"]["dim"] = "wide"
    with pytest.raises(ValueError, match=r"dim must be an integer; got 'wide'"):
        ReversalConfig.from_json(content)
