"""The arrays that `capture` returns, against NumPy and `attention_weights`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture_cases import ALLOWED, DV, MASK, B, D, S, T, close, normal, numpy_weights, only, tokens
from conformance import ALL_IMPLEMENTATIONS, quick_jit
from flax import nnx
from oracles import softmax

import attention_jax as aj
from attention_jax import nn
from attention_jax.analysis import capture
from attention_jax.analysis.jaxpr_evaluation import points_in
from attention_jax.functional.attention import capturing

TILE = aj.BlockSizes(query=2, key=3)
every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)


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

        @quick_jit
        def both_ways(*arrays):
            return capture(attend, *arrays), capture(attend, *arrays, matrices=False)

        captured, without_matrices = both_ways(query, key, value, bias)
        seen, lean = only(captured), only(without_matrices)
        np.testing.assert_array_equal(seen.output, captured.output)
        np.testing.assert_array_equal(seen.mask, ALLOWED)

        logits = np.asarray(query) @ np.asarray(key).T / np.sqrt(D) + np.asarray(bias)
        assert np.all(np.isneginf(np.asarray(seen.logits)[~ALLOWED]))
        close(np.asarray(seen.logits)[ALLOWED], logits[ALLOWED])
        totals, weights = (np.exp(logits) * ALLOWED).sum(-1), softmax(logits, ALLOWED)
        close(seen.weights, weights)
        close(captured.output, weights @ np.asarray(value))
        with np.errstate(divide="ignore"):
            close(seen.statistics.logsumexp, np.log(totals))
        close(seen.statistics.entropy, -np.sum(weights * np.log(np.where(weights, weights, 1)), -1))
        close(seen.statistics.max_logit, np.where(ALLOWED, logits, -np.inf).max(-1))
        for name, array in (("query", query), ("key", key), ("value", value)):
            full = np.broadcast_to(array, (B, *array.shape[-2:]))
            np.testing.assert_array_equal(getattr(seen, name), full, err_msg=name)

        assert (lean.logits, lean.weights, lean.mask) == (None, None, None)
        close(lean.statistics, seen.statistics)


# --- it leaves nothing behind ---


def test_a_function_compiled_before_has_points_while_captured_and_not_after():
    query, key, value = tokens()
    traces = []

    @jax.jit
    def attend(query):
        traces.append(capturing.value is not None)
        return aj.attention(query, key, value)

    expected = attend(query)
    captured = capture(attend, query)
    close(only(captured).weights, numpy_weights(query, key), 1e-6)
    np.testing.assert_array_equal(captured.output, expected)
    np.testing.assert_array_equal(attend(query), expected)
    assert traces == [False, True]  # and the program without points is found again
    assert points_in(jax.make_jaxpr(attend)(query).jaxpr) == 0


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

    names = []

    @quick_jit
    def attentions_of(query):
        attentions = capture(model, query).attentions
        names.extend(attentions)
        return attentions

    attentions = attentions_of(query)
    assert names == [  # in the order of computation, which `jax.jit` does not keep
        "attention",
        "block/self",
        "block/mapped",
        "block/jitted",
        "block/self#2",
        "attention#2",
        "own",
    ]
    for factor, name in enumerate(names[:6], start=1):
        weights = attentions[name].weights
        close(weights, numpy_weights(factor * np.asarray(query), key), 1e-6)
    assert attentions["own"].weights.shape == (B, 1, T, S)


# --- attention inside of transformations ---


def unrolled(query, key, reverse=False):
    """The weights of `scanned`, step by step in NumPy."""
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


def plain(query, key):
    return aj.attention(query, key, key)


with_own_vjp, with_own_jvp = jax.custom_vjp(plain), jax.custom_jvp(plain)
with_own_vjp.defvjp(lambda *x: (with_own_vjp(*x), None), lambda _, d: (d, None))
with_own_jvp.defjvp(lambda x, dx: (with_own_jvp(*x), dx[0]))


def total(query, key, implementation=None):
    return jnp.sum(aj.attention(query, key, key, implementation=implementation) ** 2)


INSIDE = {
    "vmap of jit": (
        lambda query, key: jax.vmap(jax.jit(plain))(query, jnp.stack([key, 2 * key])),
        lambda query, key: np.stack([numpy_weights(x, n * key) for n, x in enumerate(query, 1)]),
    ),
    "scan, reversed": (
        lambda query, key: scanned(query, key, reverse=True),
        lambda query, key: unrolled(query, key, reverse=True),
    ),
    "checkpoint": (jax.checkpoint(plain), numpy_weights),
    "custom_vjp": (with_own_vjp, numpy_weights),
    "custom_jvp": (with_own_jvp, numpy_weights),
    "scan in vmap": (
        jax.vmap(scanned, (1, None)),
        lambda query, key: np.stack([unrolled(query[:, i], key) for i in range(3)], axis=1),
    ),
    "grad in tiles": (jax.grad(functools.partial(total, implementation="tiled")), numpy_weights),
    "hessian": (jax.hessian(total), numpy_weights),
    "grad of checkpoint in jit": (jax.jit(jax.grad(jax.checkpoint(total))), numpy_weights),
}  # fmt: skip


@pytest.mark.parametrize("case", INSIDE)
def test_inside_of_transformations(case):
    function, expected = INSIDE[case]
    with jax.enable_x64(True):
        # An axis in the middle, such as heads, for the case that maps over it.
        query = normal(4, B, 3, T, D) if case == "scan in vmap" else normal(4, B, T, D)
        key = normal(5, S, D)

        @quick_jit
        def both(query, key):
            return capture(function, query, key), function(query, key)

        captured, output = both(query, key)
        close(only(captured).weights, expected(np.asarray(query), np.asarray(key)))
        close(captured.output, output)


def test_attention_in_a_loop_or_branch_is_an_error():
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
    # A branch without attention is evaluated as usual.
    captured = capture(
        lambda query: aj.attention(
            jax.lax.cond(query.sum() > 0, lambda: query, lambda: -query), key, value
        ),
        query,
    )
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
        close(mapped, expected)
        close(gradient, expected[1])
