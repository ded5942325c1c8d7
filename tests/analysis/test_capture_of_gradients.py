"""Capture of functions that take gradients inside, and of functions without attention."""

import jax
import jax.numpy as jnp
import numpy as np
from conformance import quick_jit

import attention_jax as aj
from attention_jax import analysis

T, D = 5, 3
X = np.random.default_rng(0).normal(size=(T, D)).astype(np.float32)
W = np.eye(D, dtype=np.float32) + np.float32(0.1)


def weights_of(w):
    return softmax((X @ np.asarray(w)) @ X.T / np.sqrt(D))


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def loss(w, implementation=None):
    return jnp.sum(aj.attention(X @ w, X, X, implementation=implementation) ** 2)


def plain_loss(w, shift=0.0):
    return jnp.sum((jax.nn.softmax(X @ w @ X.T / np.sqrt(D)) @ X + shift) ** 2)


def adapted(loss):
    """A step of gradient descent, and then the loss."""

    def meta_loss(w):
        return loss(w - 0.1 * jax.grad(loss)(w))

    return meta_loss


# Name -> (function that takes gradients, number of calls of attention).
FUNCTIONS = {
    "grad": (jax.grad(loss), 1),
    "grad in tiles": (jax.grad(lambda w: loss(w, "tiled")), 1),
    "value_and_grad in jit": (jax.jit(jax.value_and_grad(loss)), 1),
    "hessian": (jax.hessian(loss), 1),
    "jvp of grad": (lambda w: jax.jvp(jax.grad(loss), (w,), (w,)), 1),
    "grad of checkpoint": (jax.grad(jax.checkpoint(loss)), 1),
    "grad of checkpoint in jit": (jax.jit(jax.grad(jax.checkpoint(loss))), 1),
    "adapted": (adapted(loss), 2),
    "grad of adapted": (jax.grad(adapted(loss)), 2),
}
plain_gradient = quick_jit(jax.grad(plain_loss))


def assert_near(got, expected, name):
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4, err_msg=name)


def test_each_call_is_seen_once():
    names = {}

    @quick_jit
    def all_of_them(w):
        results = {}
        for name, (function, _) in FUNCTIONS.items():
            captured = analysis.capture(function, w)
            names[name] = list(captured.attentions)
            weights = [seen.weights for seen in captured.attentions.values()]
            results[name] = captured.output, function(w), weights
        return results

    results = all_of_them(W)
    after = W - 0.1 * plain_gradient(W)
    for name, (_, calls) in FUNCTIONS.items():
        output, expected, weights = results[name]
        assert_near(output, expected, name)
        assert names[name] == ["attention", "attention#2"][:calls], name
        np.testing.assert_allclose(weights[0], weights_of(W), rtol=1e-5, err_msg=name)
        if calls == 2:
            expected = weights_of(after)
            np.testing.assert_allclose(weights[1], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_gradients_that_reach_both_calls_of_an_adapted_loss():
    def shifted(shifts):
        """The same with something added to each output of attention."""
        after = W - 0.1 * jax.grad(plain_loss)(W, shifts[0])
        return plain_loss(after, shifts[1])

    @quick_jit
    def all_ways(w):
        captured = analysis.capture_gradients(adapted(loss), w)
        shifts = (jnp.zeros((T, D)), jnp.zeros((T, D)))
        return captured, jax.grad(shifted)(shifts), jax.grad(adapted(plain_loss))(w)

    captured, (first, second), expected = all_ways(W)
    gradients = captured.gradients
    np.testing.assert_allclose(gradients["attention"].doutput, first, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradients["attention#2"].doutput, second, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(captured.dparams, expected, rtol=1e-4, atol=1e-4)
