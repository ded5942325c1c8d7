"""The rule of a `custom_jvp` or `custom_vjp` in a user's score belongs to its program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import attention

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


def doubled(x):
    return 2 * x


def product_with_rule(kind, slope_of):
    """2 q . k, with a derivative that the user says: `slope_of()` times that of q . k."""
    double = getattr(jax, kind)(doubled)
    if kind == "custom_jvp":
        double.defjvp(lambda primals, tangents: (2 * primals[0], slope_of() * tangents[0]))
    else:
        double.defvjp(lambda x: (2 * x, None), lambda _, cotangent: (slope_of() * cotangent,))
    return lambda q, k: double(q @ k.T)


@pytest.mark.parametrize(
    ("kind", "implementation"), [("custom_jvp", "tiled"), ("custom_vjp", "reference")]
)
def test_the_rule_of_a_derivative_is_that_of_now(kind, implementation):
    slope = 2.0
    score = product_with_rule(kind, lambda: slope)

    def gradient(score):
        def loss(query):
            output = attention(query, X, X, score=score, implementation=implementation)
            return jnp.sum(output**2)

        return jax.grad(loss)(X)

    of_two = gradient(score)
    slope = 6.0
    np.testing.assert_allclose(gradient(score), 3 * of_two, rtol=2e-5, atol=1e-5)


def test_the_rule_of_a_second_derivative_is_that_of_now():
    curvature = 0.0

    @jax.custom_jvp
    def slope(x):
        return 0 * x + 2

    slope.defjvp(lambda primals, tangents: (0 * primals[0] + 2, curvature * tangents[0]))

    double = jax.custom_jvp(doubled)
    double.defjvp(lambda primals, tangents: (2 * primals[0], slope(primals[0]) * tangents[0]))

    def score(q, k):
        return double(q @ k.T)

    def second_derivative():
        def loss(scale):
            return jnp.sum(attention(scale * X, X, X, score=score) ** 2)

        return jax.jit(jax.grad(jax.grad(loss)))(1.0)

    of_line = second_derivative()
    curvature = 3.0
    assert not np.isclose(second_derivative(), of_line)


def test_rules_that_cannot_be_differentiated_are_no_errors_in_a_call():
    double = jax.custom_vjp(doubled)

    def bwd(_, cotangent):
        raise TypeError("a rule of the user")

    double.defvjp(lambda x: (2 * x, None), bwd)

    def score(q, k):
        return double(q @ k.T)

    np.testing.assert_allclose(
        attention(X, X, X, score=score), attention(2 * X, X, X, score="dot"), rtol=2e-5, atol=2e-6
    )
    with pytest.raises(TypeError, match="a rule of the user"):
        jax.grad(lambda query: attention(query, X, X, score=score).sum())(X)
