"""The parts of the recipe for strings of any length, and what replaces each in an ablation."""

from __future__ import annotations

import dataclasses
from typing import Any

from attention_jax.nn.config import ANY_LENGTH, ModelConfig
from attention_jax.scores import Additive, ScaledDot
from attention_jax.tasks.reversal import MODEL, Reversal
from attention_jax.training.task import TrainConfig
from experiments.reversal.multiplied_scores import LearnedTemperature

SCALED = LearnedTemperature(ScaledDot())
ADDITIVE = LearnedTemperature(Additive())


# Scaled dot without SOS and weight decay, the other two parts of the task's default settings.
RECIPE = Reversal(
    model=dataclasses.replace(MODEL, normalizer="log_scaled(start=40)"),
    min_length=1,
    max_length=40,
    train=TrainConfig(learning_rate=1e-2),
    source_start=False,
)


_SINUSOIDAL = {name: getattr(ModelConfig, name) for name in ANY_LENGTH}  # the default positions
_PLAIN = {**_SINUSOIDAL, "normalizer": "softmax"}
# {part: {arm: settings of the model that differ from the recipe's}}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "where the source is counted from": {
        "its end": {},
        "its start": {"position_anchor": "start"},
        "both": {"position_anchor": "both"},
    },
    "which positions are seen in training": {
        "subsets of a random window": {},
        "random subsets of 8,192": {"position_draw": "subset"},
        "0, 1, 2, ...": {"position_draw": "none"},
    },
    "how a position enters": {
        "sinusoidal, fast waves": {},
        "sinusoidal, 2017's": {
            "max_wavelength": 10_000.0, "min_wavelength": 1.0, "position_scale": 1.0,
        },
        "learned": {"positions": "learned"},
        "rotary": {"positions": "rotary"},
        "none": {"positions": "none"},
    },
    "size of logits, scaled dot": {
        "growing with log n": {},
        "as they are": {"normalizer": "softmax"},
        "learned factor": {"normalizer": "softmax", "score": f"{__name__}:SCALED"},
    },
    "size of logits, additive": {
        "growing with log n": {"score": "additive"},
        "as they are": {"score": "additive", "normalizer": "softmax"},
        "learned factor": {"score": f"{__name__}:ADDITIVE", "normalizer": "softmax"},
    },
    "other attention": {
        "none": {},
        "the decoder's self attention": {"decoder_self_attention": True},
        "that and an encoder": {"decoder_self_attention": True, "encoder_layers": 1},
        "that, and positions from the start": {
            "decoder_self_attention": True, "encoder_layers": 1, **_PLAIN,
        },
    },
}  # fmt: skip
