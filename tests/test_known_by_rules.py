"""The rules of the functions in a user's score belong to its program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import attention_jax as aj
from attention_jax import attention
from attention_jax.parts.digests import program_digest
from attention_jax.parts.user_code import UserCode

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


def doubled(x):
    return 2 * x


def with_rule(kind, slope_of):
    """x -> 2 x, with a derivative that the user says: `slope_of()` times the cotangent."""
    if kind == "custom_jvp":
        double = jax.custom_jvp(doubled)
        double.defjvp(lambda primals, tangents: (2 * primals[0], slope_of() * tangents[0]))
        return double
    of_library = kind == "library"
    double = aj.custom_vjp(doubled, twin=doubled) if of_library else jax.custom_vjp(doubled)
    double.defvjp(lambda x: (2 * x, None), lambda _, cotangent: (slope_of() * cotangent,))
    return double


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("custom_jvp", "tiled"), ("custom_vjp", "reference"), ("library", "tiled")],
)
def test_the_rule_of_a_derivative_is_that_of_now(kind, implementation):
    double = with_rule(kind, lambda: slope)

    def score(q, k):
        return double(q @ k.T)

    def gradient(score):
        def loss(query):
            output = attention(query, X, X, score=score, implementation=implementation)
            return jnp.sum(output**2)

        return jax.grad(loss)(X)

    slope = 2.0
    of_two = gradient(score)
    slope = 6.0
    np.testing.assert_allclose(gradient(score), 3 * of_two, rtol=2e-5, atol=1e-5)


def batched(x, number):
    double = jax.custom_batching.custom_vmap(doubled)
    double.def_vmap(lambda size, is_batched, x: (number * x, True))
    return double(x)


def with_functions(fwd=lambda x: (2 * x, x), twin=doubled):
    double = aj.custom_vjp(doubled, twin=twin)
    double.defvjp(fwd, lambda x, cotangent: (cotangent * x,))
    return double


def beside_a_loop(x, number):
    """The program as a whole has no derivative of reverse mode."""
    steps = jax.lax.while_loop(lambda i: i < 5, lambda i: i + 1, x[0, 0])
    return with_rule("custom_vjp", lambda: number)(x) + steps


def block(x, number):
    """A kernel whose blocks are chosen by the number."""

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    place = pl.BlockSpec((1, 5), lambda i: (int(number), 0))
    return pl.pallas_call(copy, x, grid=(3,), in_specs=[place], out_specs=place)(x)


HIDDEN = {
    "a rule in a loop": lambda x, number: jax.lax.scan(
        lambda x, _: (with_rule("library", lambda: number)(x), None), x, length=2
    )[0],
    "a rule beside a loop": beside_a_loop,
    "a batch of the library's rule": lambda x, number: jax.vmap(
        with_rule("library", lambda: number)
    )(x),
    "the residuals": lambda x, number: with_functions(fwd=lambda x: (2 * x, number * x))(x),
    "the twin": lambda x, number: with_functions(twin=lambda x: number * x)(x),
    "a rule of batches": batched,
    "custom_gradient": lambda x, number: jax.custom_gradient(
        lambda x: (2 * x, lambda cotangent: (number * cotangent,))
    )(x),
    "custom_root": lambda x, number: jax.lax.custom_root(
        lambda y: y - x, x, lambda f, y: y, lambda f, y: number * y
    ),
    "linear_call": lambda x, number: jax.custom_derivatives.linear_call(
        lambda _, x: 2 * x, lambda _, cotangent: number * cotangent, (), x
    ),
    "the blocks of a kernel": block,
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_the_text_of_a_program_does_not_show(kind):
    def digest(number):
        logits = jax.ShapeDtypeStruct((3, 5), jnp.float32)
        return program_digest(
            UserCode("score", "mine", ""), lambda x: HIDDEN[kind](x, number), logits
        )

    of_one = digest(1.0)
    assert digest(1.0) == of_one != digest(2.0)


def test_a_python_function_is_refused_if_its_result_is_read():
    def score(q, k, call):
        logits = q @ k.T
        call(logits)
        return logits

    read = functools.partial(jax.pure_callback, abs, jax.ShapeDtypeStruct((3, 5), jnp.float32))
    with pytest.raises(ValueError, match=r"score .* must not read the result of a Python function"):
        attention(X, X, X, score=functools.partial(score, call=read))
    printed = []
    call = functools.partial(jax.experimental.io_callback, printed.append, None)
    attention(X, X, X, score=functools.partial(score, call=call))
    assert printed


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
