"""`capture` with transformations of JAX: inside of the captured function, and around `capture`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture_cases import DV, B, D, S, T, close, normal, numpy_weights, only, tokens
from conformance import quick_jit

import attention_jax as aj
from attention_jax.analysis import capture

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
        close(mapped[0], expected[0])
        close(mapped[1], expected[1])
        close(gradient, expected[1])
