"""The comparison with central differences fails for wrong rules, and says where."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finite_differences import check_derivatives

POINT = np.array([0.3, -1.2, 0.7]), {"scale": np.array([2.0, 0.5, 1.1])}


def product(x, params):
    return x * jnp.cos(params["scale"])


def with_backward(backward):
    """Returns `product` with the rule `backward(x, scale, cotangent)` for reverse mode alone."""
    function = jax.custom_vjp(product)
    function.defvjp(
        lambda x, params: (product(x, params), (x, params["scale"])),
        lambda residuals, cotangent: backward(*residuals, cotangent),
    )
    return function


def right(x, scale, cotangent):
    return cotangent * jnp.cos(scale), {"scale": -cotangent * x * jnp.sin(scale)}


def wrong_sign(x, scale, cotangent):
    return cotangent * jnp.cos(scale), {"scale": cotangent * x * jnp.sin(scale)}


def constant_scale(x, scale, cotangent):
    return right(x, jax.lax.stop_gradient(scale), cotangent)


@jax.custom_jvp
def product_of_tangents(x, params):
    return product(x, params)


@product_of_tangents.defjvp
def _wrong_tangent(primals, tangents):
    """The right first derivative, but its own derivative takes `params` for constants."""
    stopped = jax.lax.stop_gradient(primals[1])
    return product_of_tangents(*primals), jax.jvp(product, (primals[0], stopped), tangents)[1]


def test_right_derivatives_pass():
    with jax.enable_x64(True):
        check_derivatives(
            {"product": product, "sum": lambda x, params: x + params["scale"]}, *POINT
        )
        check_derivatives(with_backward(right), *POINT, forward=False)


@pytest.mark.parametrize(
    ("function", "forward", "message"),
    [
        (with_backward(wrong_sign), False, "reverse mode, leaf [1]['scale']: error"),
        (with_backward(constant_scale), False, "reverse over reverse mode, leaf [1]"),
        (product_of_tangents, True, "forward over forward mode: error"),
        (lambda x, params: x**2, False, "reverse mode, leaf [1]['scale']: the derivative is 0"),
    ],
    ids=["sign", "constant", "tangent", "unused leaf"],
)
def test_a_failure_names_function_mode_and_leaf(function, forward, message):
    message = re.escape(f"wrong: {message}")
    with jax.enable_x64(True), pytest.raises(AssertionError, match=message):
        check_derivatives({"right": product, "wrong": function}, *POINT, forward=forward)
