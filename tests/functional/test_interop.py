"""`interop.dot_product_attention` against `jax.nn` and NumPy."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, SCORE_CASES, quick_jit
from numpy_model import softmax_where
from score_cases import numpy_params

from attention_jax import ScaledDot, attention, local_mask
from attention_jax.functional.interop import dot_product_attention

B, T, S, N, K, D, DV = 2, 5, 7, 6, 3, 11, 13


def normal(seed, *shape, dtype=jnp.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def qkv(n=N, k=K, d=D, dv=D, batch=(B,), dtype=jnp.float32):
    shapes = ((*batch, T, n, d), (*batch, S, k, d), (*batch, S, k, dv))
    return [normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def assert_close(got, expected, tolerance=2e-6, message=""):
    """Within `tolerance` of the largest entry."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, message
    atol = tolerance * max(1, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=message)


# --- dot_product_attention against jax.nn ---


def test_the_signature_is_that_of_jax_nn():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    assert [*ours] == [*theirs, "score", "params"]
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name
    assert ours["score"].kind == ours["params"].kind == inspect.Parameter.KEYWORD_ONLY


MASK = np.random.default_rng(5).random((B, N, T, S)) < 0.6
MASK[..., 0] = True  # no row without keys: there the two differ
CASES = {
    "plain": {"k": N},
    "unbatched": {"batch": (), "bias": normal(8, N, T, S)},
    "multi_query": {"k": 1, "is_causal": True, "scale": 0.7},
    "lengths": {
        "query_seq_lengths": np.array([3, 5], np.int32),
        "key_value_seq_lengths": np.array([7, 2], np.int32),
    },
    "window": {"local_window_size": (1, 3), "bias": normal(8, B, 1, T, S)},
    "causal_window": {"local_window_size": 2, "is_causal": True, "mask": MASK[:, :1]},
    "broadcast": {"mask": MASK[:1, :, :, :], "bias": normal(8, 1, N, 1, S)},
    "all": {
        "k": N, "mask": MASK, "bias": normal(8, N, T, S), "is_causal": True,
        "local_window_size": (4, 9), "key_value_seq_lengths": np.array([1, 6], np.int32),
    },
}  # fmt: skip


def outputs_and_gradients(function, name, **options):
    """(output, residual) and gradients of a loss of the output, for query, key, value, bias."""
    case = dict(CASES[name])
    query, key, value = qkv(k=case.pop("k", K), batch=case.pop("batch", (B,)))
    bias = case.pop("bias", None)
    arrays = (query, key, value) if bias is None else (query, key, value, bias)

    def loss(*arrays):
        results = function(*arrays, **case, **options, return_residual=True)
        return (results[0] * jnp.cos(jnp.arange(D))).sum(), results

    with jax.numpy_rank_promotion("allow"):
        argnums = tuple(range(len(arrays)))
        grad = jax.grad(loss, argnums=argnums, has_aux=True)
        gradients, results = quick_jit(grad)(*arrays)
    return results, gradients


@functools.cache
def outputs_and_gradients_of_jax_nn(name):
    return outputs_and_gradients(jax.nn.dot_product_attention, name)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param("plain", None, marks=pytest.mark.slow),
        *((name, None) for name in CASES if name not in ("plain", "all")),
        pytest.param("all", None, marks=pytest.mark.slow),
        *(("all", implementation) for implementation in ALL_IMPLEMENTATIONS),
    ],
)
def test_equals_jax_nn(name, implementation):
    expected = outputs_and_gradients_of_jax_nn(name)
    got = outputs_and_gradients(dot_product_attention, name, implementation=implementation)
    (output, residual), (expected_output, expected_residual) = jax.tree.map(
        np.asarray, (got[0], expected[0])
    )
    assert_close(output, expected_output, message="output")
    some_key = expected_residual > -1e30
    assert residual.dtype == expected_residual.dtype
    assert some_key.any()
    assert residual.shape == expected_residual.shape
    assert_close(residual[some_key], expected_residual[some_key], message="residual")
    assert np.isneginf(residual[~some_key]).all()
    for got_gradient, expected_gradient in zip(got[1], expected[1], strict=True):
        assert_close(got_gradient, expected_gradient, 2e-5)
        assert np.any(expected_gradient)


# --- any score: against the score's formula in NumPy, and a loop over heads for gradients ---


def per_head_params(name, query_dim=D):
    heads = [numpy_params(SCORE_CASES[name].score, query_dim, D, seed) for seed in range(N)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *heads)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("own", None),
        ("additive", "tiled"),
    ],
)
def test_every_head_has_its_own_parameters(name, implementation):
    """As with keys and values repeated for every query head, where nothing is left to group."""
    score, params = SCORE_CASES[name].score, per_head_params(name)
    arrays = (*qkv(dv=DV), normal(8, B, N, T, S), params)

    def whole(query, key, value, bias, params):
        return dot_product_attention(
            query, key, value, bias, MASK, score=score, params=params, implementation=implementation
        )

    def repeated(query, key, value, bias, params):
        key, value = (jnp.repeat(array, N // K, axis=2) for array in (key, value))
        heads = (array.swapaxes(1, 2) for array in (query, key, value))
        output = attention(*heads, score=score, params=params, mask=MASK, bias=bias)
        return output.swapaxes(1, 2)

    @quick_jit
    def gradients(arrays):
        return [
            jax.grad(lambda arrays, f=f: (f(*arrays) ** 2).sum())(arrays) for f in (whole, repeated)
        ]

    for got, expected in zip(*map(jax.tree.leaves, gradients(arrays)), strict=True):
        assert_close(got, expected, 2e-5)
        assert np.any(expected)


def test_a_mask_object_whose_arrays_have_heads():
    left_of_head = local_mask(1, 2) | MASK

    @quick_jit
    def run(query, key, value):
        table = left_of_head.materialize(T, S)
        return (
            dot_product_attention(query, key, value, None, left_of_head, is_causal=True),
            jax.nn.dot_product_attention(query, key, value, mask=table, is_causal=True),
        )

    assert_close(*run(*qkv()))


def test_scale_may_be_traced_and_gets_a_gradient():
    query, key, value = qkv()

    def loss(function):
        return lambda scale: (function(query, key, value, scale=scale) ** 2).sum()

    functions = dot_product_attention, jax.nn.dot_product_attention

    @quick_jit
    def run(scale):
        return (
            [jax.value_and_grad(loss(function))(scale) for function in functions],
            dot_product_attention(query, key, value, scale=scale),
            dot_product_attention(query, key, value, scale=np.float32(0.4)),
            dot_product_attention(query, key, value, score=ScaledDot(0.4)),
        )

    (got, expected), traced, static, of_score = run(np.float32(0.4))
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1], 2e-5)
    assert_close(static, traced)
    assert_close(static, of_score)


def test_keys_are_not_repeated_for_the_heads_that_share_them():
    query, key = jnp.ones((1, 3, 64, 16)), jnp.ones((1, 1024, 1, 16))  # repeated: 4 MiB
    compiled = jax.jit(dot_product_attention).lower(query, key, key).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 1024 * 16 * 4


# --- where it differs from jax.nn, both sides run ---


def test_nan_in_padding_reaches_nothing():
    real = {
        "query": np.arange(T) < np.array([[5], [3]]),
        "key": np.arange(S) < np.array([[4], [7]]),
    }
    real["value"] = real["key"]
    lengths = {"query_seq_lengths": np.array([5, 3]), "key_value_seq_lengths": np.array([4, 7])}
    clean = dict(zip(("query", "key", "value"), qkv(), strict=True))
    dirty = {name: np.where(real[name][..., None, None], x, np.nan) for name, x in clean.items()}

    @quick_jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(arrays):
        output = dot_product_attention(**arrays, **lengths)
        return output.sum(), output

    got, expected = gradients(dirty), gradients(clean)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert not np.any(np.asarray(got[1])[~real["query"]])


def test_differs_the_residual_has_a_gradient():
    query, key, value = qkv()

    @quick_jit
    def gradients(query):
        def loss(query, function):
            return function(query, key, value, return_residual=True)[1].sum()

        functions = jax.nn.dot_product_attention, dot_product_attention
        return [jax.grad(loss)(query, function) for function in functions]

    theirs, ours = gradients(query)
    assert not np.any(theirs)
    # d logsumexp_i / d query_i = sum_j weights_ij key_j / sqrt(D)
    key = np.repeat(key, N // K, 2)
    weights = softmax_where(np.einsum("btnd,bsnd->bnts", query, key) / D**0.5)
    assert_close(ours, np.einsum("bnts,bsnd->btnd", weights, key) / D**0.5, 2e-5)


def test_differs_float64_is_not_rounded_to_float32():
    query, key, value = qkv(k=N, dtype=np.float64)
    weights = softmax_where(np.einsum("btnd,bsnd->bnts", query, key) / D**0.5)
    expected = np.einsum("bnts,bsnd->btnd", weights, value)
    with jax.enable_x64(True):
        ours = dot_product_attention(query, key, value)
        with jax.numpy_dtype_promotion("standard"):
            theirs = jax.jit(jax.nn.dot_product_attention)(query, key, value)
    assert np.abs(np.asarray(ours) - expected).max() < 1e-14
    assert np.abs(np.asarray(theirs) - expected).max() > 1e-9


def test_no_examples():
    output = dot_product_attention(*qkv(batch=(0,)))
    assert output.shape == (0, T, N, D)
