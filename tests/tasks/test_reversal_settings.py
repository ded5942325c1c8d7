"""Settings of a reversal run: mistakes, labels, and config.json, of older versions too."""

import dataclasses
import json

import pytest

from attention_jax import Additive
from attention_jax.nn import BlockConfig, CrossAttentionConfig, PositionConfig, Seq2SeqConfig
from attention_jax.tasks.reversal.task import MODEL, ReversalConfig
from attention_jax.training.loop import LoopConfig


def test_settings_survive_json():
    made = ReversalConfig(
        model=Seq2SeqConfig(
            score="additive",
            self_attention_score=None,
            block=BlockConfig(
                num_heads=4,
                num_key_heads=2,
                activation="gelu",
                norm="post",
                normalize_qk=True,
                dropout_rate=0.1,
            ),
            cross_attention=CrossAttentionConfig(
                attention="coverage", radius=3, alignment="monotonic"
            ),
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


def test_config_json_of_older_runs_still_loads():
    """As the first release wrote it, when there was one kind of attention with one head."""
    content = json.loads(
        """{"model": {"score": "general", "self_attention_score": "scaled", "dim": 32,
                      "hidden_dim": 64, "encoder_layers": 1, "decoder_layers": 1,
                      "mask_padding": true},
            "loop": {"seeds": 2, "first_seed": 3, "steps": 100, "log_every": 25,
                     "checkpoint_every": 50},
            "batch_size": 16, "min_length": 3, "max_length": 8, "learning_rate": 0.003,
            "clip_norm": 1.0}"""
    )
    loaded = ReversalConfig.from_json(content)
    assert loaded.model == Seq2SeqConfig(score="general", block=BlockConfig(dim=32, hidden_dim=64))
    assert (loaded.loop.first_seed, loaded.batch_size) == (3, 16)
    # The positions, the attentions and the sources are those of then, not today's defaults.
    assert (loaded.source_start, loaded.weight_decay) == (False, 0.0)
    assert ReversalConfig().model != loaded.model.with_settings(score="scaled", dim=64)


def test_config_json_with_flat_settings_still_loads():
    """As versions wrote it whose settings of the model were not composed."""
    content = json.loads(
        """{"model": {"score": "additive", "self_attention_score": null, "attention": "coverage",
                      "radius": 3, "alignment": "monotonic", "heads": 4, "key_heads": 2, "dim": 32,
                      "hidden_dim": 48, "activation": "gelu", "norm": "post",
                      "normalize_qk": true, "encoder_layers": 2, "decoder_layers": 1,
                      "dropout_rate": 0.1, "checkpoint_blocks": true, "mask_padding": false,
                      "positions": {"kind": "learned", "limit": 64},
                      "decoder_self_attention": false, "sharpen_from": null,
                      "tied_embeddings": "output"},
            "loop": {"seeds": 2}, "batch_size": 16}"""
    )
    assert ReversalConfig.from_json(content).model == Seq2SeqConfig(
        score="additive",
        self_attention_score=None,
        block=BlockConfig(
            dim=32,
            hidden_dim=48,
            num_heads=4,
            num_key_heads=2,
            activation="gelu",
            norm="post",
            normalize_qk=True,
            dropout_rate=0.1,
        ),
        cross_attention=CrossAttentionConfig("coverage", radius=3, alignment="monotonic"),
        positions=PositionConfig("learned", limit=64),
        encoder_layers=2,
        decoder_self_attention=False,
        mask_padding=False,
        tied_embeddings="output",
    )


@pytest.mark.parametrize("flat", [False, True])
def test_config_json_of_runs_with_sharpened_logits_still_loads(flat):
    """What was `sharpen_from` is the normaliser now, around another one that the run had."""
    for normalizer, expected in (
        (None, "log_scaled(start=7)"),
        ("softmax", "log_scaled(start=7)"),
        ("entmax(alpha=1.2)", "log_scaled(normalizer=entmax(alpha=1.2), start=7)"),
    ):
        config = ReversalConfig(model=MODEL.with_settings(normalizer=expected, radius=3))
        content = json.loads(json.dumps(config.to_json()))
        cross = content["model"]["cross_attention"]
        del cross["normalizer"]
        cross |= {"sharpen_from": 7} | ({} if normalizer is None else {"normalizer": normalizer})
        if flat:
            content["model"] |= content["model"].pop("cross_attention")
        assert ReversalConfig.from_json(content) == config


def test_labels_of_normalizers():
    labels = [
        ReversalConfig(model=MODEL.with_settings(**settings)).label
        for settings in (
            {}, {"normalizer": "softmax"}, {"normalizer": "softmax", "attention": "coverage"}
        )
    ]  # fmt: skip
    assert labels == ["scaled", "scaled, softmax", "scaled, coverage"]


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
            {"model": Seq2SeqConfig(score=Additive(5))},
            r"model.score must be a name, for config.json to hold it; got Additive",
        ),
        ({"model": Seq2SeqConfig(self_attention_score=Additive(5))}, r"model.self_attention_score"),
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
        lambda content: content["model"].update(block=3),
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
