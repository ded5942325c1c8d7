"""Errors of the curvature functions: each names the argument, what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.analysis import (
    dense_hessian,
    hessian_diagonal,
    hessian_spectrum_edges,
    hessian_trace,
    hessian_vector_product,
)

RNG = jax.random.key(3)


def cube(x):
    return jnp.sum(x**3)


BAD_PARAMS = [
    ({"x": jnp.ones(2), "n": jnp.arange(3)}, r"params\['n'\] must be floating-point; got dtype"),
    ({"x": "abc"}, r"params\['x'\] must be an array; got str"),
    ({}, r"params must hold at least one number; got \{\}"),
    ({"x": jnp.ones((0, 3))}, "params must hold at least one number"),
]
BAD_LOSSES = [
    (lambda x: x, r"loss\(params\) must be one float \[\]; got \[3\]"),
    (lambda x: jnp.int32(1), r"loss\(params\) must be floating-point; got dtype int32"),
    (lambda x: {"loss": jnp.sum(x)}, r"loss\(params\) must be an array; got dict"),
]
RANDOM = [hessian_spectrum_edges, hessian_trace, hessian_diagonal]


@pytest.mark.parametrize("of_params", [dense_hessian, hessian_vector_product, *RANDOM])
def test_bad_losses_and_parameters(of_params):
    def function(loss, params, **options):
        more = {dense_hessian: [], hessian_vector_product: [params]}.get(of_params, [RNG])
        return of_params(loss, params, *more, **options)

    with pytest.raises(ValueError, match="outer must be one of forward, reverse; got 'both'"):
        function(cube, jnp.ones(3), outer="both")
    for params, message in BAD_PARAMS:
        with pytest.raises(ValueError, match=message):
            function(lambda _: 0.0, params)
    for loss, message in BAD_LOSSES:
        for outer in ("forward", "reverse"):
            with pytest.raises(ValueError, match=message):
                function(loss, jnp.ones(3), outer=outer)


@pytest.mark.parametrize("function", RANDOM)
def test_bad_counts_and_rngs(function):
    count = "iterations" if function is hessian_spectrum_edges else "samples"
    for bad in (0, -1, 2.0, True, "3", None):
        with pytest.raises(ValueError, match=f"{count} must be (an integer|at least 1); got"):
            function(cube, jnp.ones(3), RNG, **{count: bad})
    for rng in (3, jax.random.split(RNG, 2)):
        with pytest.raises(ValueError, match="rng must be one PRNG key"):
            function(cube, jnp.ones(3), rng)


@pytest.mark.parametrize(
    "vector", [{"x": np.ones(3)}, {"x": np.ones(2), "y": 1.0}, {"x": np.arange(3), "y": 1.0}]
)
def test_bad_vectors(vector):
    with pytest.raises(ValueError, match="vector"):
        hessian_vector_product(lambda _: 0.0, {"x": jnp.ones(3), "y": 1.0}, vector)


def test_a_dense_hessian_of_too_many_parameters():
    message = r"at most max_parameters=2048 numbers .*; got 2049 \(use hessian_spectrum_edges"
    with pytest.raises(ValueError, match=message):
        dense_hessian(cube, jnp.ones(2049))
    with pytest.raises(ValueError, match="at most max_parameters=2 numbers"):
        dense_hessian(cube, jnp.ones(3), max_parameters=2)
    with pytest.raises(ValueError, match="max_parameters must be at least 1; got 0"):
        dense_hessian(cube, jnp.ones(3), max_parameters=0)
