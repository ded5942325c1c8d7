"""Weights of Keras and Equinox, moved as docs/guide/from_other_libraries.md says, if installed."""

import jax
import numpy as np
import pytest
from flax import nnx
from oracles import normal

from attention_jax import nn
from attention_jax.interop import from_torch

TOKENS = QUERY, KEY, VALUE = normal(2, 5, 8), normal(2, 7, 6, seed=1), normal(2, 7, 3, seed=2)
MASK = np.random.default_rng(0).random((2, 5, 7)) < 0.6
MASK[..., 0] = True  # rows without keys differ


def keras_layer():
    keras = pytest.importorskip("keras")
    theirs = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4)
    theirs(QUERY, VALUE, KEY)
    weights = [normal(*array.shape, seed=i) / 3 for i, array in enumerate(theirs.get_weights())]
    theirs.set_weights(weights)
    sizes = {"key_dim": 6, "value_dim": 3, "num_heads": 2, "use_bias": True}
    layer = nn.MultiHeadAttention("scaled", 8, **sizes, rngs=nnx.Rngs(0))
    projections = (layer.query, layer.key, layer.value, layer.output)
    for projection, kernel, bias in zip(projections, weights[::2], weights[1::2], strict=True):
        projection.kernel[...], projection.bias[...] = kernel, bias
    return layer, lambda query, key, value: theirs(query, value, key, attention_mask=MASK)


def equinox_layer():
    equinox = pytest.importorskip("equinox")
    sizes = {"key_size": 6, "value_size": 3, "output_size": 8}
    theirs = equinox.nn.MultiheadAttention(2, 8, **sizes, key=jax.random.key(0))
    names = {"q_proj_weight": "query", "k_proj_weight": "key", "v_proj_weight": "value"}
    names["out_proj.weight"] = "output"
    state = {torchs: getattr(theirs, f"{name}_proj").weight for torchs, name in names.items()}
    return from_torch(state, num_heads=2), lambda *tokens: jax.vmap(theirs)(*tokens, MASK)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras
@pytest.mark.parametrize("make", [keras_layer, equinox_layer])
def test_outputs_are_those_of_the_other_layer(make, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        layer, theirs = make()
        expected = np.asarray(theirs(*TOKENS))
    got = layer(*TOKENS, mask=MASK)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
