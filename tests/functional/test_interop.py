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


def test_bfloat16():
    query, key, value = qkv(dtype=jnp.bfloat16)
    output, residual = dot_product_attention(query, key, value, return_residual=True)
    with pytest.raises(ValueError, match="promotion"):  # strict, in these tests
        jax.eval_shape(jax.nn.dot_product_attention, query, key, value)
    with jax.numpy_dtype_promotion("standard"):
        theirs = functools.partial(jax.nn.dot_product_attention, return_residual=True)
        expected = jax.jit(theirs)(query, key, value)
    assert (output.dtype, residual.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert_close(output, expected[0], 2e-2)
    assert_close(residual, expected[1], 2e-2)


# --- any score: against the score's formula in NumPy, and a loop over heads for gradients ---


def per_head_params(name, query_dim=D):
    heads = [numpy_params(SCORE_CASES[name].score, query_dim, D, seed) for seed in range(N)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *heads)


def numpy_attention(pair, params, query, key, value, bias, mask):
    """Float64, one head after another."""
    query, key, value, bias = (np.asarray(x, np.float64) for x in (query, key, value, bias))
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    output = np.zeros((B, T, N, DV))
    for b, n in np.ndindex(B, N):
        k = n * K // N
        own = jax.tree.map(lambda leaf: leaf[n], params)  # noqa: B023
        logits = pair(own, query[b, :, None, n], key[b, None, :, k]) + bias[b, n]
        weights = np.exp(logits - logits.max()) * mask[b, n]
        output[b, :, n] = weights / weights.sum(1, keepdims=True) @ value[b, :, k]
    return output


def output_and_gradients(function):
    """Returns a compiled function: the output, and gradients of its squares by each argument."""

    def loss(arrays):
        output = function(*arrays)
        return (output**2).sum(), output

    return quick_jit(jax.grad(loss, has_aux=True))


@functools.cache
def repeated_keys(name):
    """Keys and values repeated for every query head: nothing left to group."""

    def repeated(query, key, value, bias, params):
        key, value = (jnp.repeat(array, N // K, axis=2) for array in (key, value))
        arrays = (array.swapaxes(1, 2) for array in (query, key, value))
        options = {"mask": MASK, "bias": bias, "implementation": "reference"}
        score = SCORE_CASES[name].score
        return attention(*arrays, score=score, params=params, **options).swapaxes(1, 2)

    return output_and_gradients(repeated)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param("general", None, marks=pytest.mark.slow),
        ("own", None),
        ("additive", "reference"),
        pytest.param("additive", "tiled", marks=pytest.mark.slow),
    ],
)
def test_every_head_has_its_own_parameters(name, implementation):
    score, params = SCORE_CASES[name].score, per_head_params(name)
    arrays = (*qkv(dv=DV), normal(8, B, N, T, S), params)

    def whole(query, key, value, bias, params):
        return dot_product_attention(
            query, key, value, bias, MASK, score=score, params=params, implementation=implementation
        )

    got, output = output_and_gradients(whole)(arrays)
    assert_close(output, numpy_attention(SCORE_CASES[name].pair, params, *arrays[:4], MASK))
    expected, _ = repeated_keys(name)(arrays)
    for got_leaf, expected_leaf in zip(
        jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
    ):
        assert_close(got_leaf, expected_leaf, 2e-5)
        assert np.any(expected_leaf)


SHARED = numpy_params(SCORE_CASES["additive"].score, D, D)


def attend_with_shared_parameters(query, key, value, lengths, params=SHARED):
    score = SCORE_CASES["additive"].score
    return dot_product_attention(
        query, key, value, score=score, params=params, key_value_seq_lengths=lengths
    )


def test_shared_parameters_under_vmap():
    arrays = (*qkv(), np.array([4, 6]))
    attend = quick_jit(attend_with_shared_parameters)
    expected = attend(*arrays)
    examples = [x[:, None] for x in arrays]
    mapped = quick_jit(jax.vmap(attend_with_shared_parameters))(*examples)
    assert_close(np.asarray(mapped)[:, 0], expected)
    shaped = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (B, 1, *leaf.shape)), SHARED)
    assert_close(attend(*arrays, shaped), expected)


@pytest.mark.slow
def test_shared_parameters_without_jit():
    arrays = (*qkv(), np.array([4, 6]))
    expected = attend_with_shared_parameters(*arrays)
    with jax.disable_jit():
        assert_close(attend_with_shared_parameters(*arrays), expected)


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


def test_differs_rows_without_keys():
    query, key, value = qkv(k=N)
    mask = MASK.copy()
    mask[0, 0, 1] = False
    bias = np.where(mask, 0.0, -np.inf).astype(np.float32)

    @quick_jit
    def run(query, key, value):
        results = []
        for attend in (jax.nn.dot_product_attention, dot_product_attention):

            def first(value, attend=attend):
                output, residual = attend(query, key, value, mask=mask, return_residual=True)
                return output[0, 1, 0].sum(), (output[0, 1, 0], residual[0, 1, 0])

            gradient, row = jax.grad(first, has_aux=True)(value)
            results.append((*row, gradient, attend(query, key, value, bias)[0, 1, 0]))
        return results

    theirs, ours = jax.tree.map(np.asarray, run(query, key, value))
    output, residual, gradient, biased = theirs
    assert_close(output, value[0, :, 0].mean(0))
    assert residual < -1e38
    assert np.isfinite(residual)
    assert np.any(gradient)
    assert np.isnan(biased).all()
    output, residual, gradient, biased = ours
    assert not np.any(output)
    assert np.isneginf(residual)
    assert not np.any(gradient)
    assert not np.any(biased)


@functools.cache
def gradients_with_lengths(function):
    lengths = {
        "query_seq_lengths": np.array([5, 3], np.int32),
        "key_value_seq_lengths": np.array([4, 7], np.int32),
    }

    def loss(arrays):
        output = function(**arrays, **lengths)
        return output.sum(), output

    return quick_jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_differs_nan_in_padding(poisoned):
    clean = dict(zip(("query", "key", "value"), qkv(), strict=True))
    dirty = clean | {poisoned: clean[poisoned].copy()}
    dirty[poisoned][(1, slice(3, None)) if poisoned == "query" else (0, slice(4, None))] = np.nan
    of_jax_nn = gradients_with_lengths(jax.nn.dot_product_attention)
    their_gradients, theirs = jax.tree.map(np.asarray, of_jax_nn(dirty))
    _, their_clean = of_jax_nn(clean)
    assert np.isnan(theirs[0]).all() if poisoned == "value" else np.allclose(theirs, their_clean)
    assert any(np.isnan(gradient).any() for gradient in their_gradients.values())
    ours, expected = (gradients_with_lengths(dot_product_attention)(x) for x in (dirty, clean))
    for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for output in (ours[1], theirs):
        assert not np.any(np.asarray(output)[1, 3:])  # beyond query_seq_lengths both give 0


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
