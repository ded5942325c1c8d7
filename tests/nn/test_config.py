"""The settings of a model: mistakes, what follows from them, labels."""

import dataclasses

import pytest

from attention_jax.nn import ModelConfig


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
@pytest.mark.parametrize("anchor", ["start", "end", "both"])
def test_sizes_that_can_be_encoded(positions, anchor):
    """Each id needs pairs of features: a sine and a cosine, or two features to rotate."""
    if (positions, anchor) == ("rotary", "both"):
        with pytest.raises(ValueError, match="position_anchor must be start or end with rotary"):
            ModelConfig(positions=positions, position_anchor=anchor)
        return
    for dim in (2, 3, 6, 8, 10):
        settings = {"dim": dim, "positions": positions, "position_anchor": anchor}
        if positions == "none" or dim % (4 if anchor == "both" else 2) == 0:
            ModelConfig(**settings)
            continue
        with pytest.raises(ValueError, match=f"{positions} positions anchored at {anchor}; got"):
            ModelConfig(**settings)


def test_scores_and_normalizers_of_self_attention():
    config = ModelConfig(score="dot", normalizer="sigmoid")
    assert (config.self_score, config.self_normalizer) == ("scaled", "softmax")
    assert dataclasses.replace(config, self_attention_score=None).self_score == "dot"
    config = dataclasses.replace(config, architecture="decoder")
    assert (config.self_score, config.self_normalizer) == ("dot", "sigmoid")
    assert ModelConfig(normalizer=None).cross_normalizer == "softmax"
