"""`capture_gradients`, against biases of zeros, `attention_gradients` and `jax.value_and_grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, quick_jit

import attention_jax as aj
from attention_jax.analysis import attention_gradients, capture_gradients

B, T, S, D, DV = 2, 5, 7, 3, 2
TILE = aj.BlockSizes(query=2, key=3)
# Query 0 sees nothing; key 6 of the second example is seen by none.
MASK = aj.causal_mask(-1) & aj.padding_mask(jnp.array([7, 6]))
every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def point():
    return {
        "query": normal(0, B, T, D),
        "key": normal(1, S, D),
        "value": normal(2, B, S, DV),
        "params": {"kernel": normal(3, D, D)},
    }


def number_of(output):
    """A loss that no two entries enter alike."""
    return jnp.sum(jnp.sin(output) * jnp.cos(jnp.arange(output.size).reshape(output.shape)))


def close(got, expected, tolerance=1e-12):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


# --- one attention ---


@every_implementation
def test_one_attention(implementation):
    def loss(point, factor, bias=None):
        output = aj.attention(
            **point,
            mask=MASK,
            score="general",
            bias=bias,
            implementation=implementation,
            block_sizes=TILE,
        )
        return factor * number_of(output), {"output": output}

    @quick_jit
    def all_ways(point, bias):
        found = capture_gradients(loss, point, 2.0)
        given, gradients = jax.value_and_grad(loss, (0, 2), has_aux=True)(point, 2.0, bias)
        doutput = found.gradients["attention"].doutput
        by_hand = attention_gradients(**point, doutput=doutput, score="general", mask=MASK)
        return found, given, *gradients, by_hand

    with jax.enable_x64(True):
        found, given, dparams, dbias, by_hand = all_ways(point(), jnp.zeros((B, T, S)))
        close((found.loss, found.auxiliary), given, 1e-14)
        close(found.dparams, dparams)
        seen, gradient = found.attentions["attention"], found.gradients["attention"]
        close(seen.output, given[1]["output"], 1e-14)
        output = np.asarray(seen.output)
        weights = np.cos(np.arange(output.size).reshape(output.shape))
        close(gradient.doutput, 2 * weights * np.cos(output))
        # The gradient of logits is that of zeros added to them.
        close(gradient.dlogits, dbias)
        close(gradient.dweights, by_hand.dweights)
        close(gradient.dlogits, by_hand.dlogits)
        assert np.any(gradient.dlogits)


def test_nan_in_padding_reaches_nothing():
    with jax.enable_x64(True):
        clean = point()
        unseen = np.zeros((B, S, 1), bool)
        unseen[1, 6] = True  # nothing after key T - 2 is seen by any query at all
        unseen[:, T - 1 :] = True
        dirty = {**clean, "value": jnp.where(unseen, jnp.nan, clean["value"])}
        dirty["query"] = clean["query"].at[:, 0].set(jnp.nan)

        def loss(point):
            return number_of(aj.attention(**point, mask=MASK, score="general"))

        expected, got = (
            quick_jit(capture_gradients, static_argnums=0)(loss, x) for x in (clean, dirty)
        )
        close(got.dparams, expected.dparams)
        close(got.gradients, expected.gradients)


# --- attention inside of transformations: a bias of zeros for each call is the other side ---


def attend(query, bias):
    return aj.attention(query, query, query, bias=bias)


def scanned(query, bias, reverse=False):
    def step(state, x):
        output = attend(jnp.sin(state) + x[0], x[1])
        return output, jnp.sum(output)

    state, sums = jax.lax.scan(step, query[0], (query, bias), reverse=reverse)
    return state + sums[1]


INSIDE = {
    "vmap": jax.vmap(attend),
    "checkpoint": jax.jit(jax.checkpoint(attend)),
    "scan": scanned,
    "scan, reversed": lambda query, bias: scanned(query, bias, reverse=True),
    "scan of checkpoint in vmap": lambda query, bias: jax.vmap(
        jax.checkpoint(scanned), (None, 1), 1
    )(query, bias[:, None]),
}


@pytest.mark.parametrize("case", INSIDE)
def test_inside_of_transformations(case):
    function = INSIDE[case]

    @quick_jit
    def both(query, bias):
        def loss(query, bias):
            return number_of(function(jnp.tanh(query), bias))

        return capture_gradients(loss, query, bias), jax.grad(loss, (0, 1))(query, bias)

    with jax.enable_x64(True):
        found, (dquery, dbias) = both(normal(0, B, T, D), jnp.zeros((B, T, T)))
        close(found.dparams, dquery)
        dlogits = found.gradients["attention"].dlogits
        close(dlogits.reshape(dbias.shape), dbias)
        assert np.all(np.any(dlogits, axis=(-1, -2)))


@jax.custom_vjp
def doubled_backwards(query, bias):
    return attend(query, bias)


doubled_backwards.defvjp(
    lambda query, bias: (attend(query, bias), bias),
    lambda bias, doutput: (2 * doutput, jnp.zeros_like(bias)),
)


def test_a_gradient_rule_of_ones_own_is_kept():
    """Of parameters; what is in the call gets what the call, as it is computed, would send it."""

    def loss(query, bias, attend=doubled_backwards):
        return number_of(attend(jnp.tanh(query), bias))

    @quick_jit
    def all_ways(query, bias):
        plain = jax.grad(lambda bias: loss(query, bias, attend))(bias)
        return capture_gradients(loss, query, bias), jax.grad(loss)(query, bias), plain

    with jax.enable_x64(True):
        found, dquery, dbias = all_ways(normal(0, T, D), jnp.zeros((T, T)))
        close(found.dparams, dquery)
        close(found.gradients["attention"].dlogits, dbias)
