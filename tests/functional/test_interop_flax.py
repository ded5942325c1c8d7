"""`interop.flax_attention_fn` against Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS
from flax import nnx

from attention_jax import get_score, local_mask
from attention_jax.functional.interop import dot_product_attention, flax_attention_fn
from attention_jax.nn import Attention

B, T, S = 2, 5, 7
HEADS, HEAD_DIM = 3, 11
FEATURES = HEADS * HEAD_DIM
every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)

MASK = np.random.default_rng(5).random((B, HEADS, T, S)) < 0.6
MASK[..., 0] = True  # no row without keys: there the two differ


@pytest.fixture(autouse=True)
def _flax_relies_on_rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def qkv():
    return [normal(i, B, n, HEADS, HEAD_DIM) for i, n in enumerate((T, S, S))]


def assert_close(got, expected, tolerance=2e-6, message=""):
    """Within `tolerance` of the largest entry."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, message
    atol = tolerance * max(1, np.abs(expected).max())
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=message)


def layers(score="scaled", params=None, implementation=None, **options):
    """Two layers of the same parameters: Flax's own, and one with our attention."""
    options = {"decode": False, "in_features": FEATURES, "num_heads": HEADS} | options
    attend = flax_attention_fn(score, params, implementation=implementation)
    return (
        nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0)),
        nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0), attention_fn=attend),
    )


def flax_inputs(*batch):
    return normal(1, *batch, T, FEATURES), normal(2, *batch, S, FEATURES)


FLAX_CASES = {
    "self": lambda layer, x, y: layer(x),
    "causal": lambda layer, x, y: layer(x, is_causal=True),
    "cross": lambda layer, x, y: layer(x, y),
    "float_mask": lambda layer, x, y: layer(x, mask=nnx.make_causal_mask(x[..., 0])),
    "mask": lambda layer, x, y: layer(x, y, mask=MASK),
}


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1, "normalize_qk": True}], ids=str)
@pytest.mark.parametrize("case", FLAX_CASES)
def test_equals_flax(case, options):
    x, y = flax_inputs(*((2, 2) if case == "causal" else (B,)))
    expected, got = (
        jax.jit(lambda layer=layer: FLAX_CASES[case](layer, x, y))() for layer in layers(**options)
    )
    assert_close(got, expected)


@every_implementation
def test_equals_flax_while_decoding(implementation):
    theirs, ours = layers(decode=True, num_kv_heads=1, implementation=implementation)
    x, _ = flax_inputs(B)
    outputs = []
    for layer in (theirs, ours):
        layer.init_cache(x.shape)
        outputs.append(jnp.stack([layer(x[:, i : i + 1])[:, 0] for i in range(T)], 1))
    assert_close(outputs[1], outputs[0])


def test_dtype_and_bias():
    query, key, value = qkv()
    bias = normal(8, B, HEADS, T, S)
    ours = flax_attention_fn()(query, key, value, bias, dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        theirs = nnx.dot_product_attention(query, key, value, bias, dtype=jnp.bfloat16)
    assert ours.dtype == theirs.dtype == jnp.bfloat16
    assert_close(ours, theirs, 2e-2)


def test_a_mask_without_a_table():
    _, ours = layers()
    x, _ = flax_inputs(B)
    expected = ours(x, mask=local_mask(1, 0).materialize(T, T)[None, None])
    assert_close(ours(x, mask=local_mask(1, 0)), expected)


def test_sown_weights_are_those_of_flax():
    x, y = flax_inputs(B)
    sown = []
    for layer in layers(num_kv_heads=1):
        _, intermediates = nnx.capture(layer, nnx.Intermediate)(x, y, sow_weights=True, mask=MASK)
        sown.append(jax.tree.leaves(intermediates)[0])
    assert sown[1].shape == (B, HEADS, T, S)
    assert_close(sown[1], sown[0])


@pytest.mark.parametrize("broadcast", [True, False])
@every_implementation
def test_dropout(implementation, broadcast):
    """With an identity for values, the output is the weights after dropout."""
    rate, length = 0.4, 37
    query, key = normal(0, B, length, 2, HEAD_DIM), normal(1, B, length, 2, HEAD_DIM)
    value = jnp.broadcast_to(jnp.eye(length)[None, :, None, :], (B, length, 2, length))
    attend = flax_attention_fn(implementation=implementation)

    def weights(**options):
        output = attend(
            query, key, value, dropout_rate=rate, broadcast_dropout=broadcast,
            dropout_rng=jax.random.key(0), **options,
        )  # fmt: skip
        return np.asarray(output).swapaxes(1, 2).reshape(B * 2, length, length)

    whole, dropped = weights(deterministic=True), weights()
    kept = dropped != 0
    assert_close(dropped[kept], whole[kept] / (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 0.05
    same = [np.array_equal(kept[0], other) for other in kept[1:]]
    assert all(same) if broadcast else not any(same)
    np.testing.assert_array_equal(weights(), dropped)


def test_dropout_inside_a_layer():
    _, layer = layers(dropout_rate=0.5)
    x, _ = flax_inputs(B)
    first, second = layer(x, deterministic=False), layer(x, deterministic=False)
    assert not np.allclose(first, second)
    assert_close(layer(x, deterministic=True), layers()[0](x))


def additive_params(num_heads=HEADS):
    score = get_score("additive")
    rngs = jax.random.split(jax.random.key(1), num_heads)
    return jax.vmap(lambda rng: score.init(rng, HEAD_DIM, HEAD_DIM))(rngs)


def test_the_models_state_holds_the_scores_parameters():
    params = additive_params()
    _, layer = layers("additive", params)
    x, y = flax_inputs(B)
    query, key, value = layer.query(x), layer.key(y), layer.value(y)

    @jax.jit
    @jax.grad
    def expected(params):
        heads = dot_product_attention(query, key, value, score="additive", params=params)
        return (layer.out(heads) ** 2).sum()

    graph, state, rest = nnx.split(layer, nnx.Param, ...)
    by_jax = jax.jit(jax.grad(lambda state: (nnx.merge(graph, state, rest)(x, y) ** 2).sum()))
    by_nnx = nnx.jit(nnx.grad(lambda layer: (layer(x, y) ** 2).sum()))
    for gradient in (by_jax(state), by_nnx(layer)):
        found = nnx.to_pure_dict(gradient)["attention_fn"]["params"]
        assert found.keys() == params.keys()
        for name, leaf in expected(params).items():
            assert leaf.shape[0] == HEADS
            assert_close(found[name], leaf, 2e-5, name)
            assert np.abs(leaf).sum(axis=tuple(range(1, leaf.ndim))).all()  # every head learns


def test_a_variable_stays_itself_and_is_shared():
    owner = Attention("general", HEAD_DIM, HEAD_DIM, rngs=nnx.Rngs(0))
    attend = flax_attention_fn(owner.score, owner.params)
    query, key, value = qkv()
    before = attend(query, key, value)
    owner.params["kernel"][...] = 2 * owner.params["kernel"][...]
    assert not np.allclose(attend(query, key, value), before)
    frozen = flax_attention_fn("general", {"kernel": nnx.Variable(jnp.eye(HEAD_DIM))})
    assert not jax.tree.leaves(nnx.state(frozen, nnx.Param))
    assert frozen(query, key, value).shape == (B, T, HEADS, HEAD_DIM)


def test_flax_errors():
    query, key, value = qkv()
    with pytest.raises(ValueError, match="score must be one of"):
        flax_attention_fn("aditive")
    with pytest.raises(ValueError, match="leave it out"):
        flax_attention_fn(implementation="cudnn")
    with pytest.raises(ValueError, match="params must be"):
        flax_attention_fn("additive")(query, key, value)
    with pytest.raises(ValueError, match="dropout_rng must be one PRNG key"):
        flax_attention_fn()(query, key, value, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"query and key must be \[\*B, T, N, Dq\]"):
        flax_attention_fn()(query[0, 0], key[0, 0], value[0, 0])
