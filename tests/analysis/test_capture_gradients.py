"""`capture_gradients`, against biases of zeros, `attention_gradients` and `jax.value_and_grad`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture_cases import DV, MASK, B, D, S, T, close, normal
from conformance import TILE, quick_jit

import attention_jax as aj
from attention_jax.analysis import attention_gradients, capture_gradients


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


# --- one attention ---


def test_one_attention():
    """In tiles, against a bias of zeros in the reference."""

    def loss(point, factor, bias=None, implementation="tiled"):
        output = aj.attention(
            **point, mask=MASK, score="general", bias=bias, implementation=implementation,
            block_sizes=TILE,
        )  # fmt: skip
        return factor * number_of(output), {"output": output}

    @quick_jit
    def all_ways(point, bias):
        found = capture_gradients(loss, point, 2.0)
        of_reference = functools.partial(loss, implementation="reference")
        given, gradients = jax.value_and_grad(of_reference, (0, 2), has_aux=True)(point, 2.0, bias)
        doutput = found.gradients["attention"].doutput
        by_hand = attention_gradients(**point, doutput=doutput, score="general", mask=MASK)
        return found, given, *gradients, by_hand

    with jax.enable_x64(True):
        found, given, dparams, dbias, by_hand = all_ways(point(), jnp.zeros((B, T, S)))
        close((found.loss, found.auxiliary), given)
        close(found.dparams, dparams)
        seen, gradient = found.attentions["attention"], found.gradients["attention"]
        close(seen.output, found.auxiliary["output"])
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
        # Nor the derivatives of these gradients, a NaN cotangent of a query without keys included.

        def squares(x, loss):
            return jnp.sum(capture_gradients(loss, x).gradients["attention"].dlogits ** 2)

        def blind(point):
            output = aj.attention(**point, mask=MASK, score="general")
            return number_of(output) + jnp.nan * jnp.sum(output[:, 0])

        second = quick_jit(jax.grad(squares), static_argnums=1)
        expected = second(clean, loss)
        close(second(dirty, loss), expected)
        close(second(clean, blind), expected)


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
    "scan, reversed": functools.partial(scanned, reverse=True),
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


doubled_backwards = jax.custom_vjp(attend)
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


def test_gradients_that_reach_both_calls_of_an_adapted_loss():
    """The loss after a step of gradient descent, with something added to each output."""

    def loss(w):
        return jnp.sum(aj.attention(x @ w, x, x) ** 2)

    def plain_loss(w, shift=0.0):
        return jnp.sum((jax.nn.softmax(x @ w @ x.T / np.sqrt(D)) @ x + shift) ** 2)

    def adapted(shifts, w, loss=plain_loss):
        return loss(w - 0.1 * jax.grad(loss)(w, *shifts[:1]), *shifts[1:])

    @quick_jit
    def all_ways(w, shifts):
        captured = capture_gradients(functools.partial(adapted, (), loss=loss), w)
        return captured, jax.grad(adapted, (0, 1))(shifts, w)

    with jax.enable_x64(True):
        x, w, shift = normal(0, T, D), jnp.eye(D) + 0.1, jnp.zeros((T, D))
        captured, (dshifts, dw) = all_ways(w, (shift, shift))
    gradients = captured.gradients
    assert list(gradients) == ["attention", "attention#2"]
    close([gradient.doutput for gradient in gradients.values()], list(dshifts), 1e-10)
    close(captured.dparams, dw, 1e-10)
