"""What `capture` sees, against NumPy, `attention_weights` and what modules say of themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, quick_jit
from flax import nnx

import attention_jax as aj
from attention_jax import nn
from attention_jax.analysis import capture
from attention_jax.analysis.interpretation import points_in
from attention_jax.functional.capture_point import capturing

B, T, S, D, DV = 2, 5, 7, 3, 2
TILE = aj.BlockSizes(query=2, key=3)
# Query 0 sees nothing; key 6 of the second example is seen by none.
MASK = aj.causal_mask(-1) & aj.padding_mask(jnp.array([7, 6]))
ALLOWED = np.array(
    [[[j < i and j < length for j in range(S)] for i in range(T)] for length in (7, 6)]
)
every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def tokens():
    """query [B, T, D], and of all examples key [S, D] and value [S, DV]."""
    return normal(0, B, T, D), normal(1, S, D), normal(2, S, DV)


def numpy_softmax(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


def numpy_weights(query, key):
    """Of scaled dot, nothing masked."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    return numpy_softmax(query @ np.swapaxes(key, -1, -2) / np.sqrt(key.shape[-1]))


def close(got, expected, tolerance=1e-12):
    assert got.shape == np.shape(expected)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def only(captured):
    """The one attention of a function."""
    assert list(captured.attentions) == ["attention"]
    return captured.attentions["attention"]


# --- one call ---


@every_implementation
def test_one_call(implementation):
    with jax.enable_x64(True):
        query, key, value = tokens()
        bias = normal(3, B, T, S)

        def attend(query, key, value, bias):
            return aj.attention(
                query, key, value, mask=MASK, bias=bias, implementation=implementation,
                block_sizes=TILE,
            )  # fmt: skip

        arrays = (query, key, value, bias)

        @quick_jit
        def all_ways(*arrays):
            return (
                attend(*arrays),
                capture(attend, *arrays),
                capture(attend, *arrays, matrices=False),
            )

        expected, captured, without_matrices = all_ways(*arrays)
        seen, lean = only(captured), only(without_matrices)
        close(captured.output, expected, 1e-15)
        np.testing.assert_array_equal(seen.output, captured.output)
        np.testing.assert_array_equal(seen.mask, ALLOWED)

        logits = np.asarray(query) @ np.asarray(key).T / np.sqrt(D) + np.asarray(bias)
        assert np.all(np.isneginf(np.asarray(seen.logits)[~ALLOWED]))
        close(np.asarray(seen.logits)[ALLOWED], logits[ALLOWED])
        exponentials = np.exp(logits) * ALLOWED
        totals = exponentials.sum(-1)
        weights = exponentials / np.where(totals == 0, 1, totals)[..., None]
        close(seen.weights, weights)
        close(seen.weights, aj.attention_weights(query, key, mask=MASK, bias=bias))
        close(captured.output, weights @ np.asarray(value))
        with np.errstate(divide="ignore"):
            close(seen.statistics.logsumexp, np.log(totals))
        close(seen.statistics.entropy, -np.sum(weights * np.log(np.where(weights, weights, 1)), -1))
        close(seen.statistics.max_logit, np.where(ALLOWED, logits, -np.inf).max(-1))
        for name, array in (("query", query), ("key", key), ("value", value)):
            full = np.broadcast_to(array, (B, *array.shape[-2:]))
            np.testing.assert_array_equal(getattr(seen, name), full, err_msg=name)

        assert (lean.logits, lean.weights, lean.mask) == (None, None, None)
        for got, full in zip(lean.statistics, seen.statistics, strict=True):
            close(got, full)


def test_narrow_inputs_are_seen_in_the_compute_dtype():
    query, key, value = (x.astype(jnp.bfloat16) for x in tokens())
    seen = only(capture(aj.attention, query, key, value))
    assert seen.output.dtype == seen.query.dtype == jnp.bfloat16
    assert seen.weights.dtype == seen.logits.dtype == jnp.float32
    close(seen.weights, numpy_weights(query.astype(jnp.float32), key.astype(jnp.float32)), 1e-6)


def test_dropout_leaves_the_weights_as_they_were():
    query, key, value = tokens()
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    captured = capture(aj.attention, query, key, value, **options)
    np.testing.assert_array_equal(captured.output, aj.attention(query, key, value, **options))
    close(only(captured).weights, numpy_weights(query, key), 1e-6)
    assert not np.allclose(captured.output, only(captured).weights @ value)


def test_a_score_of_a_users_own():
    @dataclasses.dataclass(frozen=True)
    class Minus(aj.Score):
        def pair(self, params, q_features, k_features):
            return -jnp.abs(q_features[:, None, :] - k_features[None, :, :]).sum(-1)

    query, key, value = tokens()
    seen = only(capture(aj.attention, query, key, value, score=Minus()))
    distances = np.abs(np.asarray(query)[:, :, None] - np.asarray(key)).sum(-1)
    close(seen.logits, -distances, 1e-6)
    close(seen.weights, numpy_softmax(-distances), 1e-6)


# --- it leaves nothing behind ---


def test_a_function_compiled_before_has_points_while_captured_and_not_after():
    query, key, value = tokens()
    traces = []

    @jax.jit
    def attend(query):
        traces.append(capturing() is not None)
        return aj.attention(query, key, value)

    expected = attend(query)
    captured = capture(attend, query)
    close(only(captured).weights, numpy_weights(query, key), 1e-6)
    np.testing.assert_array_equal(captured.output, expected)
    np.testing.assert_array_equal(attend(query), expected)
    assert traces == [False, True]  # and the program without points is found again
    assert points_in(jax.make_jaxpr(attend)(query).jaxpr) == 0


def test_a_function_that_fails_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0)
    assert capturing() is None
    query, key, value = tokens()
    assert points_in(jax.make_jaxpr(aj.attention)(query, key, value).jaxpr) == 0


def test_a_module_is_copied_and_its_random_stream_stays():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs
            options = {"dropout_rate": 0.5, "keep_rngs": False}
            self.attend = nn.Attention("general", D, D, **options, rngs=rngs)

        def __call__(self, query, key):
            return self.attend(query, key, dropout_rng=self.rngs.dropout())

        def twice(self, query, key):
            return self(query, key), self(query, key)

    def model():
        return Noisy(nnx.Rngs(params=0, dropout=1))

    query, key, _ = (x.astype(jnp.float32) for x in tokens())
    module = model()
    captured = capture(module, query, key)
    np.testing.assert_array_equal(captured.output, capture(module, query, key).output)
    np.testing.assert_allclose(captured.output, module(query, key), rtol=1e-6)
    assert int(module.rngs.dropout.count[...]) == 1  # of the call that was not captured
    (first, second), attentions = capture(model().twice, query, key)
    assert list(attentions) == ["attention", "attention#2"]
    assert np.any(first != second)


# --- names ---


def test_names():
    query, key, value = tokens()

    def attend(query):
        return aj.attention(query, key, value)

    def model(query):
        attend(query)
        with jax.named_scope("block"):
            with jax.named_scope("self"):
                attend(query * 2)
            jax.vmap(jax.named_scope("mapped")(attend))(query * 3)
            jax.jit(jax.named_scope("jitted")(attend))(query * 4)
            with jax.named_scope("self"):
                attend(query * 5)
        jax.checkpoint(attend)(query * 6)
        return jax.vmap(lambda query: jax.named_scope("own")(jax.vmap(attend))(query[None]))(query)

    attentions = capture(model, query).attentions
    assert list(attentions) == [
        "attention", "block/self", "block/mapped", "block/jitted", "block/self#2", "attention#2",
        "own",
    ]  # fmt: skip
    for factor, seen in enumerate(list(attentions.values())[:6], start=1):
        close(seen.weights, numpy_weights(factor * np.asarray(query), key), 1e-6)
    assert attentions["own"].weights.shape == (B, 1, T, S)
    jitted = jax.jit(lambda query: capture(model, query).attentions)(query)
    assert sorted(jitted) == sorted(attentions)


# --- attention inside of transformations ---


def unrolled(query, key, reverse=False):
    """What the scan below attends with, step by step in NumPy."""
    state, weights = np.asarray(query[0], np.float64), {}
    for i in reversed(range(B)) if reverse else range(B):
        weights[i] = numpy_weights(state + query[i], key)
        state = weights[i] @ np.asarray(key)
    return np.stack([weights[i] for i in range(B)])


def scanned(query, key, reverse=False):
    def step(state, x):
        output = aj.attention(state + x, key, key)
        return output, jnp.sum(output)

    final, sums = jax.lax.scan(step, query[0], query, reverse=reverse)
    return final + sums[:1, None]


@jax.custom_vjp
def with_own_vjp(query, key):
    return aj.attention(query, key, key)


with_own_vjp.defvjp(lambda *x: (with_own_vjp(*x), None), lambda _, d: (d, None))


@jax.custom_jvp
def with_own_jvp(query, key):
    return aj.attention(query, key, key)


with_own_jvp.defjvp(lambda x, dx: (with_own_jvp(*x), dx[0]))


def plain(query, key):
    return aj.attention(query, key, key)


INSIDE = {
    "jit": (jax.jit(plain), numpy_weights),
    "vmap": (jax.vmap(plain, (0, None)), numpy_weights),
    "vmap, keys of its own": (
        lambda query, key: jax.vmap(plain)(query, jnp.stack([key, 2 * key])),
        lambda query, key: np.stack([numpy_weights(x, n * key) for n, x in enumerate(query, 1)]),
    ),
    "vmap, queries shared": (
        lambda query, key: jax.vmap(plain, (None, 0))(query[0], jnp.stack([key, 2 * key])),
        lambda query, key: np.stack([numpy_weights(query[0], n * key) for n in (1, 2)]),
    ),
    "vmap, last axis": (
        lambda query, key: jax.vmap(plain, (2, None), 2)(jnp.moveaxis(query, 0, 2), key),
        numpy_weights,
    ),
    "scan": (scanned, unrolled),
    "scan, reversed": (
        lambda query, key: scanned(query, key, reverse=True),
        lambda query, key: unrolled(query, key, reverse=True),
    ),
    "map": (lambda query, key: jax.lax.map(lambda x: plain(x, key), query), numpy_weights),
    "checkpoint": (jax.checkpoint(plain), numpy_weights),
    "custom_vjp": (with_own_vjp, numpy_weights),
    "custom_jvp": (with_own_jvp, numpy_weights),
    "scan in vmap": (
        jax.vmap(scanned, (1, None)),
        lambda query, key: np.stack([unrolled(query[:, i], key) for i in range(3)], axis=1),
    ),
    "vmap in scan in checkpoint in jit": (
        jax.jit(jax.checkpoint(lambda query, key: jax.lax.scan(
            lambda c, x: (c, jax.vmap(plain, (0, None))(x, key)), 0, query[None]
        )[1])),
        lambda query, key: numpy_weights(query, key)[None],
    ),
    "grad": (
        lambda query, key: jax.grad(lambda query: plain(query, key).sum())(query), numpy_weights
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INSIDE)
def test_inside_of_transformations(case):
    function, expected = INSIDE[case]
    with jax.enable_x64(True):
        # With an axis in the middle for what is mapped over it: heads, say.
        query = normal(4, B, 3, T, D) if case == "scan in vmap" else normal(4, B, T, D)
        key = normal(5, S, D)

        @quick_jit
        def both(query, key):
            return capture(function, query, key), function(query, key)

        captured, output = both(query, key)
        close(only(captured).weights, expected(np.asarray(query), np.asarray(key)))
        close(captured.output, output)


def test_what_cannot_be_given_out_is_an_error():
    query, key, value = tokens()

    def loop(query):
        return jax.lax.while_loop(
            lambda x: x.sum() < 1e3, lambda x: 1 + jnp.abs(aj.attention(x, key, key)), query
        )

    def branch(query):
        return jax.lax.cond(
            query.sum() > 0, lambda: aj.attention(query, key, value), lambda: query[..., :DV]
        )

    for name, function in (("while", loop), ("cond", branch)):
        with pytest.raises(NotImplementedError, match=f"attention inside a {name} cannot be"):
            capture(function, query)
    # Without attention in them they are as good as any.
    captured = capture(lambda query: aj.attention(jax.lax.cond(
        query.sum() > 0, lambda: query, lambda: -query), key, value), query)  # fmt: skip
    close(only(captured).output, aj.attention(query * np.sign(query.sum()), key, value), 1e-6)


# --- capture inside of transformations ---


def test_captured_values_differentiate_and_map():
    with jax.enable_x64(True):
        query, key, value = tokens()

        def entropy(query):
            seen = only(capture(aj.attention, query, key, value))
            return jnp.sum(seen.statistics.entropy) + jnp.sum(seen.weights**3)

        def direct(query):
            logits = query @ key.T / D**0.5
            weights = jnp.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
            return jnp.sum(-weights * jnp.log(weights)) + jnp.sum(weights**3)

        @quick_jit
        def all_ways(query):
            of_each = jax.vmap(jax.value_and_grad(direct))(query)
            return jax.vmap(jax.value_and_grad(entropy))(query), of_each, jax.grad(entropy)(query)

        mapped, expected, gradient = all_ways(query)
        close(mapped[0], expected[0])
        close(mapped[1], expected[1])
        close(gradient, expected[1])


def test_a_capture_inside_a_capture_sees_and_is_seen():
    query, key = jnp.ones((3, 2)), jnp.arange(10.0).reshape(5, 2)

    def regularised(query):
        inner = capture(lambda query: aj.attention(query, key, key), query)
        entropy = inner.attentions["attention"].statistics.entropy
        return inner.output, jnp.mean(entropy)

    (output, entropy), attentions = capture(regularised, query)
    np.testing.assert_allclose(attentions["attention"].weights, aj.attention_weights(query, key))
    np.testing.assert_allclose(output, aj.attention(query, key, key), rtol=1e-6)
    np.testing.assert_allclose(attentions["attention"].statistics.entropy.mean(), entropy)


@pytest.mark.parametrize(("what", "came"), [(3, "3"), (nnx.Linear, "the class Linear")])
def test_what_cannot_be_called_is_named(what, came):
    with pytest.raises(ValueError, match=f"function must be a function, .*; got {came}"):
        capture(what, 2)
