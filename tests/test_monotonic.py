"""Monotonic attention against a triple loop in float64, a walk by hand, and itself step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from attention_jax import causal_mask, get_score, padding_mask
from attention_jax.monotonic import monotonic_attention
from attention_jax.monotonic_walks import (
    hard_monotonic_positions,
    hard_monotonic_weights,
    monotonic_weights,
)
from attention_jax.scores import SCORES

B, T, S, DV = 2, 5, 7, 13
both_methods = pytest.mark.parametrize("method", ["parallel", "recursive"])
every_score = pytest.mark.parametrize("score", sorted(SCORES))


def numpy_weights(p, initial=None):
    """The paper's sum of products as it stands; one example, float64."""
    p = np.asarray(p, np.float64)
    previous = np.eye(p.shape[1])[0] if initial is None else np.asarray(initial, np.float64)
    weights = np.zeros_like(p)
    for i in range(p.shape[0]):
        for j in range(p.shape[1]):
            weights[i, j] = p[i, j] * sum(
                previous[k] * np.prod(1 - p[i, k:j]) for k in range(j + 1)
            )
        previous = weights[i]
    return weights


def numpy_walk(choices, start=0):
    """Algorithm 1 as a loop: positions, S where it attends to nothing."""
    positions = []
    for row in choices:
        while start < len(row) and not row[start]:
            start += 1
        positions.append(start)
    return positions


def probabilities(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape).astype(np.float32)


def arrays(score, seed=3):
    """(query, key, value, params) for one score."""
    query_dim, key_dim = (11, 11) if get_score(score).needs_equal_dims else (3, 11)
    rng = np.random.default_rng(seed)
    shapes = ((B, T, query_dim), (B, S, key_dim), (B, S, DV))
    tokens = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return *tokens, get_score(score).init(jax.random.key(5), query_dim, key_dim)


def numpy_attention(score, query, key, value, params, offset=0.0, mask=None):
    """Output and weights in float64 from the score's logits of each example."""
    logits = jnp.stack([get_score(score)(params, q, k) for q, k in zip(query, key, strict=True)])
    p = 1 / (1 + np.exp(-(np.asarray(logits, np.float64) + offset)))
    if mask is not None:
        p = np.where(mask, p, 0)
    weights = np.stack([numpy_weights(example) for example in p])
    return weights @ np.asarray(value, np.float64), weights


# --- weights from probabilities ---


@both_methods
@pytest.mark.parametrize("with_initial", [False, True])
def test_weights_are_the_papers_sum(method, with_initial):
    p = probabilities(B, 3, T, S)
    initial = probabilities(3, S, seed=1) / S if with_initial else None
    weights = monotonic_weights(p, initial, method=method)
    assert weights.shape == p.shape
    assert weights.dtype == jnp.float32
    for b, n in np.ndindex(B, 3):
        expected = numpy_weights(p[b, n], None if initial is None else initial[n])
        np.testing.assert_allclose(weights[b, n], expected, atol=1e-6)
    sums = np.sum(np.asarray(weights, np.float64), -1)
    assert np.all(np.diff(sums, axis=-1, prepend=1) <= 1e-6)  # what passes the last key is lost


@both_methods
def test_saturated_and_long_stays_exact(method):
    """Here the paper's cumulative product underflows: 211 keys, p of 0, 1 and all between."""
    p = probabilities(T, 211) ** 2
    p[:, 50:150] = 0
    p[:, 151:160] = 1
    p[1, :40] = 1 - 1e-6
    p[2] = 0.75
    weights = monotonic_weights(p, method=method)
    np.testing.assert_allclose(weights, numpy_weights(p), atol=2e-6)


@both_methods
def test_gradients_to_second_order(method):
    with jax.enable_x64(True):
        p = jnp.asarray(np.random.default_rng(2).uniform(0.1, 0.9, size=(3, 5)))
        initial = jnp.full((5,), 0.2, jnp.float64)
        weights = jax.jit(lambda *args: jnp.sin(3 * monotonic_weights(*args, method=method)))
        check_grads(weights, (p, initial), order=2, modes=["rev"], atol=1e-5, rtol=1e-5)
        check_grads(weights, (p, initial), order=1, modes=["fwd"], atol=1e-6, rtol=1e-6)


@both_methods
def test_gradients_are_finite_and_right_at_0_and_1(method):
    p = np.array([[0, 1, 0.5], [0, 0, 0], [1, 1, 1]], np.float64)
    with jax.enable_x64(True):
        cotangent = np.random.default_rng(0).normal(size=p.shape)

        def loss(p):
            return jnp.sum(monotonic_weights(p, method=method) * cotangent)

        gradient = jax.grad(loss)(jnp.asarray(p))
    # Weights are polynomials in p: differences work beyond [0, 1] too.
    expected = np.zeros_like(p)
    for index in np.ndindex(p.shape):
        step = np.zeros_like(p)
        step[index] = 1e-6
        difference = numpy_weights(p + step) - numpy_weights(p - step)
        expected[index] = np.sum(difference * cotangent) / 2e-6
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


@both_methods
def test_jit_vmap_and_batch_axes_agree(method):
    p, initial = probabilities(3, T, S), probabilities(3, S, seed=1) / S

    weights = functools.partial(monotonic_weights, method=method)
    expected = np.stack([weights(*example) for example in zip(p, initial, strict=True)])
    np.testing.assert_allclose(jax.jit(weights)(p, initial), expected, atol=1e-7)
    np.testing.assert_allclose(jax.vmap(weights)(p, initial), expected, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_computed_in_float32(dtype):
    p = jnp.asarray(probabilities(T, S), dtype)
    weights = monotonic_weights(p)
    np.testing.assert_array_equal(weights, monotonic_weights(p.astype(jnp.float32)).astype(dtype))
    assert weights.dtype == hard_monotonic_weights(p).dtype == dtype


@both_methods
def test_no_queries_and_no_keys(method):
    for shape in ((0, S), (T, 0), (B, 0, 0)):
        p = jnp.zeros(shape)
        assert monotonic_weights(p, method=method).shape == shape
        assert hard_monotonic_weights(p).shape == shape


# --- the hard form ---


def test_first_choice_at_or_after_the_last_position():
    p = jnp.array([[0.0, 0, 0, 1, 1, 0, 1, 1]])
    assert [hard_monotonic_positions(p, start).tolist() for start in (0, 4, 5)] == [[3], [4], [6]]
    assert hard_monotonic_weights(p).tolist() == [[0, 0, 0, 1, 0, 0, 0, 0]]


def test_walks_against_a_loop_and_a_half_is_chosen():
    p = probabilities(3, T, S, seed=7)
    p[:, :, 2] = 0.5
    start = np.array([0, 2, 5])
    positions = hard_monotonic_positions(p, start)
    assert positions.dtype == jnp.int32
    for example, first, found in zip(p, start, positions, strict=True):
        assert found.tolist() == numpy_walk(example >= 0.5, first)
    np.testing.assert_array_equal(hard_monotonic_positions(p >= 0.5, start), positions)
    for transform in (jax.jit, jax.vmap):
        np.testing.assert_array_equal(transform(hard_monotonic_positions)(p, start), positions)


def test_after_a_query_that_finds_nothing_none_does():
    p = jnp.array([[0.0, 1, 0], [0, 0, 0], [1, 1, 1]])
    assert hard_monotonic_weights(p).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert hard_monotonic_positions(p, 3).tolist() == [3, 3, 3]


@both_methods
def test_hard_is_soft_where_all_probabilities_are_0_or_1(method):
    choices = np.float32(probabilities(17, T, S) < 0.4)
    hard = hard_monotonic_weights(choices)
    assert 0 < np.sum(hard) < 17 * T  # some queries find a key, some do not
    np.testing.assert_array_equal(monotonic_weights(choices, method=method), hard)


# --- attention ---


@every_score
def test_attention_is_the_formula(score):
    query, key, value, params = arrays(score)
    tokens = query, key, value
    output, weights = monotonic_attention(*tokens, score=score, params=params, offset=-0.5)
    expected, expected_weights = numpy_attention(score, *tokens, params, -0.5)
    np.testing.assert_allclose(weights, expected_weights, atol=2e-6)
    np.testing.assert_allclose(output, expected, atol=5e-6)


@every_score
def test_masks_fully_masked_rows_and_padding_that_holds_nan(score):
    query, key, value, params = arrays(score)
    mask = padding_mask(jnp.array([4, S]), jnp.array([3, T]))
    table = np.asarray(mask.materialize(T, S))
    expected, expected_weights = numpy_attention(
        score, query, key, value, params, mask=np.broadcast_to(table, (B, T, S))
    )
    query, key = query.at[0, 3:].set(jnp.nan), key.at[0, 4:].set(jnp.nan)
    value = value.at[0, 4:].set(jnp.inf)

    def loss(query, key, value, params):
        output, weights = monotonic_attention(
            query, key, value, score=score, params=params, mask=mask
        )
        return jnp.sum(output**2) + jnp.sum(weights**3), (output, weights)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    gradients, (output, weights) = gradient(query, key, value, params)
    np.testing.assert_allclose(weights, expected_weights, atol=2e-6)
    np.testing.assert_allclose(output, expected, atol=5e-6)
    assert np.all(np.asarray(output)[0, 3:] == 0)
    for leaf in jax.tree.leaves(gradients):
        assert np.all(np.isfinite(leaf))
    assert all(
        np.all(np.asarray(d)[0, n:] == 0) for d, n in zip(gradients, (3, 4, 4), strict=False)
    )
    options = {"score": score, "params": params, "mask": mask}
    hard, _ = monotonic_attention(query, key, value, hard=True, **options)
    assert np.all(np.isfinite(hard))


def test_attention_gradients_in_float64():
    with jax.enable_x64(True):
        *tokens, params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.float64), arrays("additive")
        )
        query, key, value = tokens[0][0, :3], tokens[1][0, :5], tokens[2][0, :5, :2]

        @jax.jit
        def attend(query, key, value, params, offset):
            return monotonic_attention(
                query, key, value, score="additive", params=params, offset=offset,
                mask=causal_mask(offset=2),
            )  # fmt: skip

        offset = jnp.asarray(-0.25, jnp.float64)
        check_grads(attend, (query, key, value, params, offset), order=2, modes=["rev"])
        tokens = (query, key, value)
        hard = monotonic_attention(*tokens, score="additive", params=params, hard=True)
        assert attend(query, key, value, params, offset)[0].dtype == hard[0].dtype == jnp.float64
        assert jax.grad(lambda r: attend(query, key, value, params, r)[0].sum())(offset) != 0


@pytest.mark.parametrize("hard", [False, True])
def test_step_by_step_is_all_at_once(hard):
    query, key, value, params = arrays("additive", seed=13)
    options = {"score": "additive", "params": params, "offset": -0.5, "hard": hard}
    output, weights = monotonic_attention(query, key, value, **options)
    initial = None
    for i in range(T):
        one_query = query[:, i : i + 1]
        one, initial = monotonic_attention(one_query, key, value, initial=initial, **options)
        initial = initial[:, 0]
        np.testing.assert_allclose(one[:, 0], output[:, i], atol=1e-6)
        np.testing.assert_allclose(initial, weights[:, i], atol=1e-6)


def test_hard_attention_gathers_values():
    query, key, value, _ = arrays("dot", seed=17)
    output, weights = monotonic_attention(query, key, value, score="dot", offset=-1.0, hard=True)
    for b in range(B):
        for i, j in enumerate(numpy_walk(query[b] @ key[b].T >= 1)):
            expected = np.zeros(DV) if j == S else value[b, j]
            np.testing.assert_allclose(output[b, i], expected, atol=1e-6)
            assert float(weights[b, i].sum()) == (j < S)
    options = {"score": "dot", "hard": True}
    gradient = jax.grad(lambda query: monotonic_attention(query, key, value, **options)[0].sum())
    assert np.all(np.asarray(gradient(query)) == 0)


def test_noise():
    query, key, value, _ = arrays("dot")
    rng = jax.random.key(3)

    def weights(**options):
        return np.asarray(monotonic_attention(query, key, value, score="dot", **options)[1])

    plain, noisy = weights(), weights(noise_rng=rng)
    np.testing.assert_array_equal(noisy, weights(noise_rng=rng))
    assert np.all(np.max(np.abs(noisy - plain), axis=(1, 2)) > 1e-3)  # each example has its own
    np.testing.assert_allclose(weights(noise_rng=rng, noise_scale=0.0), plain, atol=1e-7)

    # The probabilities themselves: the first query at the first key, logits 0, many examples.
    zeros = jnp.zeros((1009, 1, 1))
    p = monotonic_attention(zeros, zeros, zeros, score="dot", noise_rng=rng, noise_scale=2.0)[1]
    p = np.asarray(p, np.float64)
    logits = np.log(p / (1 - p))
    assert abs(np.mean(logits)) < 0.25
    assert abs(np.std(logits) - 2) < 0.2


def test_bias_and_an_offset_for_each_head():
    query, key, value, _ = arrays("dot")
    heads = [
        jnp.stack(leaves, 1) for leaves in ([query, 2 * query, -query], [key] * 3, [value] * 3)
    ]
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(T, S)), jnp.float32)
    offsets = jnp.array([-1.0, 0.0, 0.5])
    output, weights = monotonic_attention(*heads, score="dot", offset=offsets, bias=bias)
    for n in range(3):
        one = [leaf[:, n] for leaf in heads]
        expected = monotonic_attention(*one, score="dot", bias=bias + offsets[n])
        np.testing.assert_allclose(output[:, n], expected[0], atol=1e-6)
        np.testing.assert_allclose(weights[:, n], expected[1], atol=1e-6)


def test_jit_and_vmap_of_attention():
    query, key, value, params = arrays("additive")
    options = {"score": "additive", "params": params, "mask": causal_mask(offset=2)}

    def attend(*tokens):
        return monotonic_attention(*tokens, **options)[0]

    expected = np.stack([attend(*tokens) for tokens in zip(query, key, value, strict=True)])
    np.testing.assert_allclose(jax.vmap(attend)(query, key, value), expected, atol=1e-6)
    np.testing.assert_allclose(jax.jit(attend)(query, key, value), expected, atol=1e-6)


def test_bfloat16_inputs_and_extreme_logits():
    query, key, value, _ = arrays("dot")
    narrow = [leaf.astype(jnp.bfloat16) for leaf in (query, key, value)]
    wide = monotonic_attention(*(leaf.astype(jnp.float32) for leaf in narrow), score="dot")
    for ours, theirs in zip(monotonic_attention(*narrow, score="dot"), wide, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours, theirs.astype(jnp.bfloat16))

    soft = monotonic_attention(1e4 * query, key, value, score="dot")[0]
    hard = monotonic_attention(1e4 * query, key, value, score="dot", hard=True)[0]
    np.testing.assert_allclose(soft, hard, atol=1e-6)


# --- bad input ---

P = jnp.ones((B, T, S))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: monotonic_weights(P, method="cumprod"), "one of parallel, recursive; got 'cump"),
        (lambda: monotonic_weights(P > 0), "must be floating-point; got dtype bool"),
        (lambda: monotonic_weights(P[0, 0]), r"must be \[\*B, T, S\]; got \[7\]"),
        (lambda: monotonic_weights(P, P[0]), r"\[..., 7\] and broadcast to \[2, 7\]; got \[5, 7\]"),
        (lambda: monotonic_weights(P, jnp.ones(S, int)), "initial must be floating-point"),
        (lambda: hard_monotonic_positions(P, 0.5), "start must be integers; got dtype float32"),
        (lambda: hard_monotonic_positions(P, np.arange(3)), r"start must broadcast to \[2\]"),
    ],
)
def test_wrong_weights_arguments(function, message):
    with pytest.raises(ValueError, match=message) as caught:
        function()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offset": jnp.ones(3)}, r"offset must broadcast to the batch axes \[2\]; got \[3\]"),
        ({"offset": jnp.ones(2, int)}, "offset must be floating-point; got dtype int32"),
        ({"noise_rng": 0.5}, "noise_rng must be one PRNG key"),
        ({"noise_scale": jnp.ones((1, 1))}, "noise_scale must broadcast"),
        ({"initial": jnp.ones(5)}, r"initial must be \[..., 7\]"),
        ({"hard": 1}, "hard must be True or False; got 1"),
        ({"score": "additive"}, "params must be"),
        ({"key": jnp.ones((B, S, 3))}, "to match score Dot"),
    ],
)
def test_wrong_attention_arguments(options, message):
    query, key, value, _ = arrays("dot")
    options = {"score": "dot", "key": key} | options
    with pytest.raises(ValueError, match=message):
        monotonic_attention(query, value=value, **options)
