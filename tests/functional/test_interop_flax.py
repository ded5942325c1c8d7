"""`interop.flax_attention_fn` against Flax."""

import jax
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, quick_jit
from flax import linen, nnx
from score_cases import numpy_params

from attention_jax import Additive, local_mask
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
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


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


def outputs_of(call, **options):
    """The outputs of `call(layer)` for both layers, made and called in one compiled program."""
    return quick_jit(lambda: [call(layer) for layer in layers(**options)])()


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1, "normalize_qk": True}], ids=str)
def test_equals_flax(options):
    inputs = {name: flax_inputs(*((2, 2) if name == "causal" else (B,))) for name in FLAX_CASES}

    def call(layer):
        return {name: FLAX_CASES[name](layer, *arrays) for name, arrays in inputs.items()}

    expected, got = outputs_of(call, **options)
    for name in FLAX_CASES:
        assert_close(got[name], expected[name], message=name)


@every_implementation
def test_equals_flax_while_decoding(implementation):
    x, _ = flax_inputs(B)

    def call(layer):
        layer.init_cache(x.shape)
        graph, state = nnx.split(layer)

        def step(state, token):
            layer = nnx.merge(graph, state)
            output = layer(token[:, None])[:, 0]
            return nnx.state(layer), output

        return jax.lax.scan(step, state, x.swapaxes(0, 1))[1]

    options = {"decode": True, "num_kv_heads": 1, "implementation": implementation}
    expected, got = outputs_of(call, **options)
    assert_close(got, expected)


def test_a_mask_without_a_table():
    x, _ = flax_inputs(B)
    table = np.tri(T, dtype=bool) & ~np.tri(T, k=-2, dtype=bool)

    def call(layer):
        return layer(x, mask=table[None, None]), layer(x, mask=local_mask(1, 0))

    expected, got = quick_jit(lambda: call(layers()[1]))()
    assert_close(got, expected)


def test_sown_weights_are_those_of_flax():
    x, y = flax_inputs(B)

    def call(layer):
        _, intermediates = nnx.capture(layer, nnx.Intermediate)(x, y, sow_weights=True, mask=MASK)
        return jax.tree.leaves(intermediates)[0]

    expected, got = outputs_of(call, num_kv_heads=1)
    assert got.shape == (B, HEADS, T, S)
    assert_close(got, expected)


def test_weights_sown_in_linen_are_those_of_flax():
    x, y = flax_inputs(B)

    def sown(**options):
        layer = linen.MultiHeadDotProductAttention(HEADS, qkv_features=FEATURES, **options)
        variables = layer.init(jax.random.key(0), x, y)
        call = {"mask": MASK, "sow_weights": True, "mutable": ["intermediates"]}
        return layer.apply(variables, x, y, **call)

    expected, got = quick_jit(lambda: (sown(), sown(attention_fn=flax_attention_fn())))()
    assert got[1]["intermediates"]["attention_weights"][0].shape == (B, HEADS, T, S)
    jax.tree.map(assert_close, got, expected)


@pytest.mark.parametrize(
    ("implementation", "broadcast"),
    [
        ("reference", True),
        ("tiled", False),
        pytest.param("reference", False, marks=pytest.mark.slow),
        pytest.param("tiled", True, marks=pytest.mark.slow),
    ],
)
def test_dropout(implementation, broadcast):
    """With an identity for values, the output is the weights after dropout."""
    rate, length = 0.4, 37
    query, key = normal(0, B, length, 2, HEAD_DIM), normal(1, B, length, 2, HEAD_DIM)
    identity = np.eye(length, dtype=np.float32)[None, :, None, :]
    value = np.broadcast_to(identity, (B, length, 2, length))
    attend = flax_attention_fn(implementation=implementation)

    @quick_jit
    def weights(query, key):
        outputs = [
            attend(
                query, key, value, dropout_rate=rate, broadcast_dropout=broadcast,
                dropout_rng=jax.random.key(0), deterministic=deterministic,
            )
            for deterministic in (True, False)
        ]  # fmt: skip
        return [x.swapaxes(1, 2).reshape(B * 2, length, length) for x in outputs]

    whole, dropped = map(np.asarray, weights(query, key))
    kept = dropped != 0
    assert_close(dropped[kept], whole[kept] / (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 0.05
    same = [np.array_equal(kept[0], other) for other in kept[1:]]
    assert all(same) if broadcast else not any(same)
    np.testing.assert_array_equal(weights(query, key)[1], dropped)


def test_the_models_state_holds_the_scores_parameters():
    heads = [numpy_params(Additive(), HEAD_DIM, HEAD_DIM, seed) for seed in range(HEADS)]
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *heads)
    _, layer = layers("additive", params)
    x, y = flax_inputs(B)
    graph, state, rest = nnx.split(layer, nnx.Param, ...)

    @quick_jit
    def by_jax(state, params):
        def expected(params):
            layer = nnx.merge(graph, state, rest)
            arrays = layer.query(x), layer.key(y), layer.value(y)
            heads = dot_product_attention(*arrays, score="additive", params=params)
            return (layer.out(heads) ** 2).sum()

        gradient = jax.grad(lambda state: (nnx.merge(graph, state, rest)(x, y) ** 2).sum())(state)
        return gradient, jax.grad(expected)(params)

    gradient, expected = by_jax(state, params)
    by_nnx = nnx.jit(nnx.grad(lambda layer: (layer(x, y) ** 2).sum()))
    for state in (gradient, by_nnx(layer)):
        found = nnx.to_pure_dict(state)["attention_fn"]["params"]
        assert found.keys() == params.keys()
        for name, leaf in jax.tree.map(np.asarray, expected).items():
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
    frozen = flax_attention_fn(
        "general", {"kernel": nnx.Variable(np.eye(HEAD_DIM, dtype=np.float32))}
    )
    assert not jax.tree.leaves(nnx.state(frozen, nnx.Param))
    assert frozen(query, key, value).shape == (B, T, HEADS, HEAD_DIM)
