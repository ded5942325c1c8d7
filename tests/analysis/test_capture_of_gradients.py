"""Capture of functions that take gradients inside, and of functions without attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import analysis, nn

T, D = 5, 3
X = np.random.default_rng(0).normal(size=(T, D)).astype(np.float32)
W = jnp.eye(D) + 0.1


def weights_of(w):
    logits = (X @ np.asarray(w)) @ X.T / np.sqrt(D)
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


def repeated(w):
    return jax.lax.scan(lambda c, _: (jax.grad(loss)(c), None), w, None, length=2)[0]


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (jax.grad(loss), 1),
        (jax.grad(lambda w: loss(w, "tiled")), 1),
        (jax.jit(jax.value_and_grad(loss)), 1),
        (jax.hessian(loss), 1),
        (lambda w: jax.jvp(jax.grad(loss), (w,), (w,)), 1),
        (jax.grad(jax.checkpoint(loss)), 1),
        (jax.jit(jax.grad(jax.checkpoint(loss))), 1),
        (adapted(loss), 2),
        (jax.grad(adapted(loss)), 2),
    ],
)
def test_each_call_is_seen_once(function, calls):
    output, attentions = analysis.capture(function, W)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), output, function(W)
    )
    assert list(attentions) == ["attention", "attention#2"][:calls]
    np.testing.assert_allclose(attentions["attention"].weights, weights_of(W), rtol=1e-5)
    if calls == 2:
        after = W - 0.1 * jax.grad(plain_loss)(W)
        weights = attentions["attention#2"].weights
        np.testing.assert_allclose(weights, weights_of(after), rtol=1e-4, atol=1e-5)


def test_gradients_in_a_loop():
    _, attentions = analysis.capture(repeated, W)
    expected = [weights_of(W), weights_of(jax.grad(plain_loss)(W))]
    np.testing.assert_allclose(attentions["attention"].weights, expected, rtol=1e-4, atol=1e-5)


def test_gradients_that_reach_both_calls_of_an_adapted_loss():
    captured = analysis.capture_gradients(adapted(loss), W)

    def shifted(shifts):
        """The same with something added to each output of attention."""
        after = W - 0.1 * jax.grad(plain_loss)(W, shifts[0])
        return plain_loss(after, shifts[1])

    first, second = jax.grad(shifted)((jnp.zeros((T, D)), jnp.zeros((T, D))))
    gradients = captured.gradients
    np.testing.assert_allclose(gradients["attention"].doutput, first, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradients["attention#2"].doutput, second, rtol=1e-4, atol=1e-4)
    expected = jax.grad(adapted(plain_loss))(W)
    np.testing.assert_allclose(captured.dparams, expected, rtol=1e-4, atol=1e-4)


def test_a_module_whose_gradient_flax_takes():
    module = nn.Attention("general", D, D, rngs=nnx.Rngs(0))

    def gradient(module, x, *, scale):
        return nnx.grad(lambda module: scale * jnp.sum(module(x, x) ** 2))(module)

    output, attentions = analysis.capture(gradient, module, jnp.asarray(X), scale=2.0)
    kernel = module.params["kernel"][...]
    expected = jax.nn.softmax(X @ kernel @ X.T)
    np.testing.assert_allclose(attentions["attention"].weights, expected, rtol=1e-4)
    direct = gradient(module, jnp.asarray(X), scale=2.0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), output, direct
    )


def test_no_attention_is_an_error():
    for function in (
        lambda w: jnp.sum(w),
        lambda w: aj.attention_weights(X @ w, X)[0, 0],
        lambda w: jnp.sum(jax.nn.dot_product_attention(*[(X @ w)[:, None]] * 3)),
    ):
        message = "function must call attention that can be captured: .* it calls none"
        with pytest.raises(ValueError, match=message):
            analysis.capture(function, W)
        with pytest.raises(ValueError, match="loss must call attention that can be captured"):
            analysis.capture_gradients(function, W)
