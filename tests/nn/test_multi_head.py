"""Multi-head attention against Flax's own and against float64 NumPy, head by head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads
from numpy_model import multi_head, normal, scrambled
from score_cases import each_score

from attention_jax import SCORES, alibi_bias, alibi_slopes, causal_mask, padding_mask, relative_bias
from attention_jax.nn import MultiHeadAttention

B, T, S, DX, DY, DO = 2, 5, 7, 11, 13, 17
N, K, D = 6, 2, 3  # heads, of keys, size of each
LENGTHS = [4, 7]
SIZES = {"key_dim": DY, "qkv_dim": N * D, "output_dim": DO, "num_heads": N, "num_key_heads": K}


def make(score="general", **options):
    """A module of unequal sizes, and its parameters in float64."""
    options = {**SIZES, **options}
    return scrambled(lambda: MultiHeadAttention(score, DX, **options, rngs=nnx.Rngs(0)))


def tokens():
    return normal(B, T, DX), normal(B, S, DY, seed=3)


def examples(*arrays):
    return zip(*(np.asarray(array, np.float64) for array in arrays), strict=True)


# --- against Flax ---


def flax_peer(ours, **options):
    """Flax's module with our parameters."""
    peer = nnx.eval_shape(
        lambda: nnx.MultiHeadAttention(ours.num_heads, **options, decode=False, rngs=nnx.Rngs(9))
    )
    pairs = [("query", "query"), ("key", "key"), ("value", "value"), ("output", "out")]
    pairs += [("query_norm", "query_ln"), ("key_norm", "key_ln")]
    for name, theirs in pairs:
        if getattr(ours, name) is not None:
            nnx.update(getattr(peer, theirs), nnx.state(getattr(ours, name)))
    return peer


@pytest.mark.parametrize(
    ("ours", "theirs", "mask"),
    [
        ({"num_heads": 1}, {"use_bias": False}, "causal"),
        ({"num_heads": 3, "use_bias": True, "qkv_dim": 21, "output_dim": DO},
         {"use_bias": True, "qkv_features": 21, "out_features": DO}, "heads"),
        ({**SIZES, "use_bias": True},
         {"in_kv_features": DY, "qkv_features": N * D, "out_features": DO, "num_kv_heads": K},
         "heads"),
        ({**SIZES, "num_key_heads": 1, "normalize_qk": True},
         {"in_kv_features": DY, "qkv_features": N * D, "out_features": DO, "num_kv_heads": 1,
          "normalize_qk": True, "use_bias": False}, None),
    ],
    ids=["one_head", "self", "grouped_cross", "normalized_cross"],
)  # fmt: skip
def test_scaled_is_flax(ours, theirs, mask):
    module, _ = scrambled(lambda: MultiHeadAttention("scaled", DX, **ours, rngs=nnx.Rngs(0)))
    peer = flax_peer(module, in_features=DX, **theirs)
    x, y = tokens()
    y = y if "key_dim" in ours else None
    source, heads = x.shape[1] if y is None else S, module.num_heads
    allowed = np.random.default_rng(5).random((B, heads, T, source)) < 0.6
    allowed[..., 0] = True  # no row without keys: there the two differ
    our_mask = {"causal": causal_mask(), "heads": jnp.array(allowed), None: None}[mask]
    their_mask = np.tril(np.ones((B, 1, T, T), bool)) if mask == "causal" else allowed

    @jax.jit
    def both(x, y):
        output = module(x, y, mask=our_mask)
        with jax.numpy_rank_promotion("allow"):
            return output, peer(x, y, mask=None if mask is None else their_mask)

    output, expected = both(x, y)
    assert expected.shape == (B, T, ours.get("output_dim", DX))
    np.testing.assert_allclose(output, expected, atol=2e-5)


# --- against NumPy ---


@pytest.mark.parametrize("score", each_score(sorted(SCORES)))
def test_every_score_with_lengths_and_what_stands_beyond(score):
    module, params = make(score, num_key_heads=K if len(score) % 2 else N)
    x, y = tokens()
    for row, length in enumerate(LENGTHS):
        y[row, length:] = np.nan

    @jax.jit
    def call(x, y, lengths):
        mask = padding_mask(lengths)
        remembered = module(x, module.remember(y), mask=mask, return_weights=True)
        return module(x, y, mask=mask, return_weights=True), remembered

    (output, weights), remembered = call(x, y, jnp.array(LENGTHS))
    assert weights.shape == (B, N, T, S)
    for row, (x_row, y_row) in enumerate(examples(x, y)):
        allowed = np.arange(S) < LENGTHS[row]
        expected, expected_weights = multi_head(score, params, x_row, y_row, allowed)
        np.testing.assert_allclose(output[row], expected, atol=2e-5)
        np.testing.assert_allclose(weights[row], expected_weights, atol=1e-5)
        np.testing.assert_allclose(remembered[0][row], expected, atol=2e-5)
        np.testing.assert_allclose(remembered[1][row], expected_weights, atol=1e-5)


TABLE = np.random.default_rng(7).random((B, T, S)) < 0.6
TABLE[0, 2] = False  # a query that may attend to nothing
HEAD_TABLE = np.random.default_rng(8).random((B, N, T, S)) < 0.6
HEAD_LENGTHS = np.array([[1, 2, 3, 4, 5, 6], [7, 6, 7, 6, 7, 0]])
DISTANCES = np.arange(S)[None, :] - np.arange(T)[:, None]
CAUSAL = DISTANCES <= 2
BIASES = normal(B, N, T, S, seed=9)
RELATIVE = normal(N, 5, seed=10)
RELATIVE_TABLE = RELATIVE[:, np.clip(DISTANCES, -2, 2) + 2]
ALIBI = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]  # of six heads, as published
SHORT = np.arange(S) < np.array(LENGTHS)[:, None, None, None]  # [B, 1, 1, S]
SHORT_HEADS = np.arange(S) < HEAD_LENGTHS[:, :, None, None]
# What is given as mask and bias, and what both are for each pair: broadcastable to [B, N, T, S].
PAIR_CASES = {
    "masks_and_alibi": (
        lambda: padding_mask(jnp.array(LENGTHS)) & causal_mask(2),
        SHORT & CAUSAL,
        lambda: alibi_bias(alibi_slopes(N)),
        -np.array(ALIBI)[:, None, None] * np.abs(DISTANCES),
    ),
    "array": (lambda: TABLE, TABLE[:, None], lambda: BIASES, BIASES),
    "array_with_heads": (
        lambda: HEAD_TABLE, HEAD_TABLE, lambda: relative_bias(jnp.array(RELATIVE)), RELATIVE_TABLE
    ),
    "lengths_of_heads": (
        lambda: padding_mask(jnp.array(HEAD_LENGTHS)), SHORT_HEADS, lambda: BIASES[1], BIASES[1]
    ),
    "shared": (lambda: CAUSAL, CAUSAL, lambda: BIASES[0, 0], BIASES[0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIR_CASES)
def test_masks_and_biases(case):
    mask, allowed, bias, added = PAIR_CASES[case]
    module, params = make("additive", use_bias=True)
    x, y = tokens()
    call = jax.jit(functools.partial(module, return_weights=True))
    output, weights = call(x, y, mask=mask(), bias=bias())
    allowed, added = (np.broadcast_to(table, (B, N, T, S)) for table in (allowed, added))
    for row, (x_row, y_row) in enumerate(examples(x, y)):
        expected = multi_head("additive", params, x_row, y_row, allowed[row], added[row])
        np.testing.assert_allclose(output[row], expected[0], atol=2e-5)
        np.testing.assert_allclose(weights[row], expected[1], atol=1e-5)
    if case == "array":  # nothing to attend to: nothing but the last vector is left
        np.testing.assert_array_equal(output[0, 2], module.output.bias[...])
        np.testing.assert_array_equal(weights[0, :, 2], 0)


def test_values_of_their_own():
    module, params = make("dot")
    x, y = tokens()
    value = normal(B, S, DY, seed=4)

    @jax.jit
    def both(x, y, value):
        return module(x, y, value), module(x, module.remember(y, value))

    output, remembered = both(x, y, value)
    for row, (x_row, y_row, v_row) in enumerate(examples(x, y, value)):
        _, weights = multi_head("dot", params, x_row, y_row)
        values = np.einsum("sd,dnh->nsh", v_row, params["value"]["kernel"]).repeat(N // K, axis=0)
        expected = np.einsum("nts,nsh,nho->to", weights, values, params["output"]["kernel"])
        np.testing.assert_allclose(output[row], expected, atol=2e-5)
    np.testing.assert_array_equal(remembered, output)


# --- parameters ---


def test_every_head_has_parameters_of_its_own():
    module = MultiHeadAttention("general", DX, **SIZES, rngs=nnx.Rngs(0))
    kernels = np.asarray(module.params["kernel"][...])
    assert kernels.shape == (N, D, D)
    assert len({kernel.tobytes() for kernel in kernels}) == N
    graph, state = nnx.split(module)
    x, y = tokens()

    @jax.jit
    def gradient(params, head):
        one = jnp.zeros((N, 1, 1)).at[head].set(1.0)
        params["output"]["kernel"] = params["output"]["kernel"] * one
        return jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(x, y) ** 2))(params)

    for head in (0, N - 1):
        found = gradient(nnx.to_pure_dict(state), head)
        touched = np.any(np.asarray(found["params"]["kernel"]) != 0, axis=(1, 2))
        np.testing.assert_array_equal(touched, np.arange(N) == head)
        touched = np.any(np.asarray(found["key"]["kernel"]) != 0, axis=(0, 2))
        np.testing.assert_array_equal(touched, np.arange(K) == head // (N // K))


def test_gradients_of_first_and_second_order():
    with jax.enable_x64(True):
        sizes = {"num_heads": 2, "num_key_heads": 1, "qkv_dim": 4, "output_dim": 3, "key_dim": 2}
        module = MultiHeadAttention("additive", 3, **sizes, rngs=nnx.Rngs(0))
        graph, state = nnx.split(module)
        params = jax.tree.map(np.float64, nnx.to_pure_dict(state))
        x, y = normal(3, 3).astype(np.float64), normal(4, 2).astype(np.float64)

        flat, unravel = ravel_pytree((params, x, y))  # one array: fewer shapes to compile for

        @jax.jit
        def call(flat):
            params, x, y = unravel(flat)
            return nnx.merge(graph, params)(x, y, mask=causal_mask(1))

        check_grads(call, (flat,), order=2, modes=["rev"])


# --- dropout, and what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_dim": 20}, "qkv_dim must be a multiple of 6 heads; got 20"),
        ({"num_key_heads": 4}, "num_key_heads must divide 6 heads; got 4"),
        ({"score": "adit"}, "did you mean 'additive'"),
        ({"dropout_rate": 2}, "dropout_rate must be a number in"),
        ({"implementation": "fast"}, "implementation must be None or one of"),
    ],
)
def test_wrong_options_fail_at_construction(options, message):
    with pytest.raises(ValueError, match=message) as error:
        MultiHeadAttention(
            **{"score": "dot", "query_dim": DX, **SIZES, **options}, rngs=nnx.Rngs(0)
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": (B, T, DY)}, r"query must be \[\*B, length, 11\]; got \[2, 5, 13\]"),
        ({"query": (DX,)}, r"query must be \[\*B, length, 11\]; got \[11\]"),
        ({"key": (B, S, DX)}, r"key must be \[\*B, length, 13\]; got \[2, 7, 11\]"),
        ({"key": None}, r"key must be \[\*B, length, 13\]; got \[2, 5, 11\]"),
        ({"value": (B, S, DX)}, r"value must be \[\*B, length, 13\]; got \[2, 7, 11\]"),
        ({"value": (B, S + 1, DY)}, "value must be"),
        ({"bias": (T, S + 1)}, "bias must broadcast to"),
        ({"bias": (K, T, S)}, r"bias must broadcast to \[2, 6, 5, 7\] .*; got \[2, 5, 7\]"),
    ],
)
def test_wrong_arguments(arguments, message):
    shapes = {"query": (B, T, DX), "key": (B, S, DY), **arguments}
    arrays = {name: None if shape is None else normal(*shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message) as error:
        make()[0](**arrays)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(T, S + 1), (3, T, S), (B, N - 1, T, S), (B, K, T, S)])
def test_wrong_masks(shape):
    with pytest.raises(ValueError, match=r"mask must broadcast to \[2, 6, 5, 7\] .*; got"):
        make()[0](*tokens(), mask=jnp.ones(shape, bool))
