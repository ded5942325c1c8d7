"""`interop.dot_product_attention` against `jax.nn` and NumPy."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, SCORE_CASES

from attention_jax import ScaledDot, attention, attention_weights, local_mask
from attention_jax.functional.interop import dot_product_attention

B, T, S, N, K, D, DV = 2, 5, 7, 6, 3, 11, 13


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


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
        "query_seq_lengths": jnp.array([3, 5], jnp.int32),
        "key_value_seq_lengths": jnp.array([7, 2], jnp.int32),
    },
    "window": {"local_window_size": (1, 3), "bias": normal(8, B, 1, T, S)},
    "causal_window": {"local_window_size": 2, "is_causal": True, "mask": MASK[:, :1]},
    "broadcast": {"mask": MASK[:1, :, :, :], "bias": normal(8, 1, N, 1, S)},
    "all": {
        "k": N, "mask": MASK, "bias": normal(8, N, T, S), "is_causal": True,
        "local_window_size": (4, 9), "key_value_seq_lengths": jnp.array([1, 6], jnp.int32),
    },
}  # fmt: skip


def outputs_and_gradients(function, case, **options):
    """(output, residual) and gradients of a loss of the output, for query, key, value, bias."""
    case = dict(case)
    query, key, value = qkv(k=case.pop("k", K), batch=case.pop("batch", (B,)))
    bias = case.pop("bias", None)
    arrays = (query, key, value) if bias is None else (query, key, value, bias)

    def loss(*arrays):
        results = function(*arrays, **case, **options, return_residual=True)
        return (results[0] * jnp.cos(jnp.arange(D))).sum(), results

    with jax.numpy_rank_promotion("allow"):
        argnums = tuple(range(len(arrays)))
        grad = jax.grad(loss, argnums=argnums, has_aux=True)
        gradients, results = jax.jit(grad)(*arrays)
    return results, gradients


@pytest.mark.parametrize(
    ("case", "implementation"),
    [*((case, None) for case in CASES), *(("all", name) for name in ALL_IMPLEMENTATIONS)],
)
def test_equals_jax_nn(case, implementation):
    expected = outputs_and_gradients(jax.nn.dot_product_attention, CASES[case])
    got = outputs_and_gradients(dot_product_attention, CASES[case], implementation=implementation)
    (output, residual), (expected_output, expected_residual) = got[0], expected[0]
    assert_close(output, expected_output, message="output")
    some_key = np.asarray(expected_residual) > -1e30
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
        jax.nn.dot_product_attention(query, key, value)
    with jax.numpy_dtype_promotion("standard"):
        expected = jax.nn.dot_product_attention(query, key, value, return_residual=True)
    assert (output.dtype, residual.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert_close(output, expected[0], 2e-2)
    assert_close(residual, expected[1], 2e-2)


# --- any score: against the score's formula in NumPy, and a loop over heads for gradients ---


def per_head_params(name, query_dim=D):
    score = SCORE_CASES[name].score
    rngs = jax.random.split(jax.random.key(3), N)
    return jax.vmap(lambda rng: score.init(rng, query_dim, D))(rngs)


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


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("general", None), ("own", None), *(("additive", name) for name in ALL_IMPLEMENTATIONS)],
)
def test_every_head_has_its_own_parameters(name, implementation):
    score, params = SCORE_CASES[name].score, per_head_params(name)
    query, key, value = qkv(dv=DV)
    bias = normal(8, B, N, T, S)

    def whole(query, key, value, bias, params):
        return dot_product_attention(
            query, key, value, bias, MASK, score=score, params=params, implementation=implementation
        )

    def repeated(query, key, value, bias, params):
        """Keys and values repeated for every query head: nothing left to group."""
        key, value = (jnp.repeat(array, N // K, axis=2) for array in (key, value))
        arrays = (array.swapaxes(1, 2) for array in (query, key, value))
        options = {"mask": MASK, "bias": bias, "implementation": "reference"}
        return attention(*arrays, score=score, params=params, **options).swapaxes(1, 2)

    arrays = (query, key, value, bias, params)

    def output_and_gradients(function):
        def loss(*arrays):
            output = function(*arrays)
            return (output**2).sum(), output

        grad = jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)
        gradients, output = jax.jit(grad)(*arrays)
        return output, gradients

    output, got = output_and_gradients(whole)
    assert_close(output, numpy_attention(SCORE_CASES[name].pair, params, *arrays[:4], MASK))
    _, expected = output_and_gradients(repeated)
    for got_leaf, expected_leaf in zip(
        jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
    ):
        assert_close(got_leaf, expected_leaf, 2e-5)
        assert np.any(expected_leaf)


def test_shared_parameters_without_jit_and_under_vmap():
    score = SCORE_CASES["additive"].score
    params = score.init(jax.random.key(0), D, D)
    query, key, value = qkv()
    lengths = jnp.array([4, 6])

    def attend(query, key, value, lengths):
        return dot_product_attention(
            query, key, value, score=score, params=params, key_value_seq_lengths=lengths
        )

    expected = attend(query, key, value, lengths)
    with jax.disable_jit():
        assert_close(attend(query, key, value, lengths), expected)
    one = [x[:, None] for x in (query, key, value, lengths)]
    assert_close(jax.vmap(attend)(*one)[:, 0], expected)
    shaped = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (B, 1, *leaf.shape)), params)
    of_examples = dot_product_attention(
        query, key, value, score=score, params=shaped, key_value_seq_lengths=lengths
    )
    assert_close(of_examples, expected)


def test_a_mask_object_whose_arrays_have_heads():
    query, key, value = qkv()
    left_of_head = local_mask(1, 2) | MASK
    expected = jax.nn.dot_product_attention(
        query, key, value, mask=left_of_head.materialize(T, S), is_causal=True
    )
    assert_close(
        dot_product_attention(query, key, value, None, left_of_head, is_causal=True), expected
    )


def test_scale_may_be_traced_and_gets_a_gradient():
    query, key, value = qkv()

    def loss(function):
        return lambda scale: (function(query, key, value, scale=scale) ** 2).sum()

    got, expected = (
        jax.jit(jax.value_and_grad(loss(function)))(jnp.float32(0.4))
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1], 2e-5)
    static = dot_product_attention(query, key, value, scale=np.float32(0.4))
    assert_close(static, dot_product_attention(query, key, value, scale=jnp.float32(0.4)))
    assert_close(static, dot_product_attention(query, key, value, score=ScaledDot(0.4)))


def test_keys_are_not_repeated_for_the_heads_that_share_them():
    query, key = jnp.ones((1, 3, 64, 16)), jnp.ones((1, 1024, 1, 16))  # repeated: 4 MiB
    compiled = jax.jit(dot_product_attention).lower(query, key, key).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 1024 * 16 * 4


# --- where it differs from jax.nn, both sides run ---


def test_differs_rows_without_keys():
    query, key, value = qkv(k=N)
    mask = MASK.copy()
    mask[0, 0, 1] = False
    theirs, their_residual = jax.nn.dot_product_attention(
        query, key, value, mask=mask, return_residual=True
    )
    ours, residual = dot_product_attention(query, key, value, mask=mask, return_residual=True)
    assert_close(theirs[0, 1, 0], value[0, :, 0].mean(0))
    assert their_residual[0, 1, 0] < -1e38
    assert np.isfinite(their_residual[0, 1, 0])
    assert not np.any(ours[0, 1, 0])
    assert np.isneginf(residual[0, 1, 0])
    gradients = [
        jax.grad(lambda v, f=f: f(query, key, v, mask=mask)[0, 1, 0].sum())(value)
        for f in (jax.nn.dot_product_attention, dot_product_attention)
    ]
    assert np.any(gradients[0])
    assert not np.any(gradients[1])
    bias = jnp.where(mask, 0.0, -jnp.inf)
    assert np.isnan(jax.nn.dot_product_attention(query, key, value, bias)[0, 1, 0]).all()
    assert not np.any(dot_product_attention(query, key, value, bias)[0, 1, 0])


@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_differs_nan_in_padding(poisoned):
    lengths = {
        "query_seq_lengths": jnp.array([5, 3], jnp.int32),
        "key_value_seq_lengths": jnp.array([4, 7], jnp.int32),
    }
    clean = dict(zip(("query", "key", "value"), qkv(), strict=True))
    padding = (1, slice(3, None)) if poisoned == "query" else (0, slice(4, None))
    dirty = clean | {poisoned: clean[poisoned].at[padding].set(jnp.nan)}

    def gradients(function, arrays):
        def loss(arrays):
            output = function(**arrays, **lengths)
            return output.sum(), output

        gradients, output = jax.jit(jax.grad(loss, has_aux=True))(arrays)
        return gradients, output

    their_gradients, theirs = gradients(jax.nn.dot_product_attention, dirty)
    their_clean = jax.nn.dot_product_attention(**clean, **lengths)
    assert np.isnan(theirs[0]).all() if poisoned == "value" else np.allclose(theirs, their_clean)
    assert any(np.isnan(gradient).any() for gradient in their_gradients.values())
    ours, expected = (gradients(dot_product_attention, arrays) for arrays in (dirty, clean))
    for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for output in (ours[1], theirs):
        assert not np.any(output[1, 3:])  # beyond query_seq_lengths both give 0


def test_differs_the_residual_has_a_gradient():
    query, key, value = qkv()

    def loss(query, function):
        return function(query, key, value, return_residual=True)[1].sum()

    theirs = jax.grad(loss)(query, jax.nn.dot_product_attention)
    ours = jax.grad(loss)(query, dot_product_attention)
    assert not np.any(theirs)
    # d logsumexp_i / d query_i = sum_j weights_ij key_j / sqrt(D)
    weights = attention_weights(query.swapaxes(1, 2), jnp.repeat(key, N // K, 2).swapaxes(1, 2))
    expected = jnp.einsum("bnts,bsnd->btnd", weights, jnp.repeat(key, N // K, 2)) / D**0.5
    assert_close(ours, expected, 2e-5)


def test_differs_refused_arguments():
    query, key, value = qkv(dv=DV)
    with pytest.raises(ValueError, match="value shape"):
        jax.nn.dot_product_attention(query, key, value)
    assert dot_product_attention(query, key, value).shape == (B, T, N, DV)
    half = query.astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="query dtype"):
        jax.nn.dot_product_attention(half, key, key)
    assert dot_product_attention(half, key, key).dtype == jnp.bfloat16
    two_axes = jnp.ones((5, 3))
    assert jax.nn.dot_product_attention(two_axes, two_axes, two_axes).shape == (5, 3)
    with pytest.raises(ValueError, match=r"query must be \[B, T, N, Dq\].*got \[5, 3\]"):
        dot_product_attention(two_axes, two_axes, two_axes)
    ones = jnp.ones((T, S), int)
    with jax.numpy_dtype_promotion("standard"):
        jax.nn.dot_product_attention(query, key, key, ones)
    with pytest.raises(ValueError, match="bias must be floating-point"):
        dot_product_attention(query, key, key, ones)


def test_differs_float64_is_not_rounded_to_float32():
    with jax.enable_x64(True):
        query, key, value = qkv(k=N, dtype=jnp.float64)
        logits = np.einsum("btnd,bsnd->bnts", query, key) / D**0.5
        weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        expected = np.einsum("bnts,bsnd->btnd", weights, value)
        ours = dot_product_attention(query, key, value)
        with jax.numpy_dtype_promotion("standard"):
            theirs = jax.nn.dot_product_attention(query, key, value)
    assert np.abs(np.asarray(ours) - expected).max() < 1e-14
    assert np.abs(np.asarray(theirs) - expected).max() > 1e-9


# --- errors ---


SWAP = "heads come before the positions in query, key and value, swap these two axes"
ERRORS = {
    "heads": ({"query": jnp.ones((B, N, T, D))}, f"multiple of the 3 heads of key.*{SWAP}"),
    "mask_swapped": ({"mask": jnp.ones((B, T, N, K), bool)}, f"mask must broadcast to.*{SWAP}"),
    "bias": ({"bias": jnp.ones((B, N, S, T))}, r"bias must broadcast to \[2, 6, 5, 7\].*5\]"),
    "mask": ({"mask": jnp.ones((T, S))}, "mask must be boolean"),
    "key": ({"key": jnp.ones((3, S, K, D))}, r"query and key must be.*got \[2, 5.*\[3, 7"),
    "value": ({"value": jnp.ones((B, S, 2, D))}, r"value must be \[\*B, S, K, Dv\].*\[2, 7, 2, 11"),
    "feature": ({"key": jnp.ones((B, S, K, 4))}, "to match score ScaledDot"),
    "params": ({"score": "additive"}, "params must be"),
    "axis": ({"score": "general", "params": {"kernel": jnp.ones((K, D, D))}}, "kernel.*broadcast"),
    "scale": ({"scale": 0.3, "score": "dot"}, "scale must be None.*got 0.3 with score Dot"),
    "two_scales": ({"scale": 0.3, "score": ScaledDot(0.3)}, "scale must be None"),
    "scales": ({"scale": jnp.ones(N)}, "scale must be None, or one number"),
    "xla": ({"implementation": "xla"}, "one of reference.*got jax.nn's 'xla': leave it out"),
    "cudnn": ({"implementation": "cudnn"}, "call jax.nn.dot_product_attention"),
    "unknown": ({"implementation": "fast"}, "implementation must be None or one of"),
    "window": ({"local_window_size": (1, 2, 3)}, r"local_window_size must be.*got \(1, 2, 3\)"),
    "negative": ({"local_window_size": (-1, 2)}, "each at least 0"),
    "length": ({"query_seq_lengths": jnp.array(3)}, r"query_seq_lengths must be integers \[2\]"),
    "lengths": ({"key_value_seq_lengths": "all"}, "key_value_seq_lengths must be an array; got s"),
    "text": ({"query": "tokens"}, "query must be an array; got str"),
    "list": ({"scale": [0.3]}, r"scale must be None, or one number.*got \[0.3\]"),
    "set": ({"bias": {0.5}}, "bias must be an array; got set"),
    "float": ({"key_value_seq_lengths": jnp.ones(B)}, r"integers \[2\]; got float32 \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument(case):
    arguments, message = ERRORS[case]
    arrays = dict(zip(("query", "key", "value"), qkv(), strict=True))
    with pytest.raises(ValueError, match=message):
        dot_product_attention(**(arrays | arguments))


def test_no_examples():
    output = dot_product_attention(*qkv(batch=(0,)))
    assert output.shape == (0, T, N, D)
