"""Hessians of known spectrum: products, the edges of the spectrum, the trace."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from conformance import quick_jit
from jax.flatten_util import ravel_pytree

from attention_jax.analysis import hessian_spectrum_edges, hessian_trace, hessian_vector_product

RNG = jax.random.key(3)


def symmetric(eigenvalues, seed=0):
    """A matrix of that spectrum, in a random basis."""
    size = len(eigenvalues)
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]
    return (basis * np.asarray(eigenvalues)) @ basis.T


def quadratic(matrix):
    """params -> x^T matrix x / 2 + sum(x), of all numbers x of any tree."""

    def loss(params):
        x = ravel_pytree(params)[0]
        return x @ (jnp.asarray(matrix, x.dtype) @ x) / 2 + jnp.sum(x)

    return loss


normal = functools.partial(oracles.normal, seed=1, dtype=float)


def tree_of(vector):
    """A tree of several shapes, a scalar among them, that ravels to the vector (at least 8)."""
    return {"a": vector[:6].reshape(2, 3), "b": (vector[6], vector[7:])}


# --- quadratic forms: the Hessian is the matrix ---


def test_a_quadratic_form_has_its_matrix():
    eigenvalues = np.sort(normal(23))
    matrix = symmetric(eigenvalues)
    with jax.enable_x64(True):
        params, vector, other = (tree_of(normal(23, seed=s)) for s in (1, 2, 3))
        loss = quadratic(matrix)

        @quick_jit
        def all_of_it(params, vector, other):
            product = functools.partial(hessian_vector_product, loss, params)
            # More iterations than parameters: the whole spectrum.
            edges = hessian_spectrum_edges(loss, params, RNG, iterations=50)
            return [product(vector), product(other)], edges

        products, edges = jax.device_get(all_of_it(params, vector, other))
        chex.assert_trees_all_equal_shapes(products[0], params)
        flat, flat_other, image, image_of_other = (
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
            for tree in (vector, other, *products)
        )
    np.testing.assert_allclose(image, matrix @ flat, atol=1e-13)
    np.testing.assert_allclose(flat_other @ image, flat @ image_of_other, rtol=1e-12)
    np.testing.assert_allclose(edges.ritz_values, eigenvalues, atol=1e-12)
    np.testing.assert_allclose(edges.residuals, np.zeros(23), atol=1e-12)
    assert (edges.smallest, edges.largest) == tuple(edges.ritz_values[[0, -1]])


def test_edges_that_stand_apart_are_found_early_and_residuals_bound_the_rest():
    bulk = np.random.default_rng(5).uniform(-1, 1, size=197)
    eigenvalues, tolerance = np.sort(np.concatenate([[-4, 9, 10], bulk])), 1e-5
    loss = quadratic(symmetric(eigenvalues))

    @quick_jit
    def of_two_lengths(params):
        return [hessian_spectrum_edges(loss, params, RNG, iterations=m) for m in (20, 80)]

    edges, long = jax.device_get(of_two_lengths(jnp.asarray(normal(200), np.float32)))
    assert edges.largest.dtype == edges.ritz_values.dtype == np.float32
    np.testing.assert_allclose([edges.smallest, edges.largest], [-4, 10], rtol=tolerance)
    for found in (edges, long):  # inside the spectrum, and no better than the residuals say
        assert np.all(np.diff(found.ritz_values) > 0)
        distances = np.abs(found.ritz_values[:, None] - eigenvalues).min(1)
        assert np.all(distances <= found.residuals + 10 * tolerance)
        assert np.all(np.abs(found.ritz_values - 3) <= 7 + 10 * tolerance)
    assert np.max(edges.residuals) > 0.01
    # Once an edge has converged, rounding brings no second copy of it.
    assert np.sum(long.ritz_values > 8) == 2
    assert np.sum(long.ritz_values < -2) == 1


def test_invariant_subspaces():
    spectra = [[2] * 5 + [-1] * 4 + [0] * 3, [0] * 12, [1] * 12, [0] * 11 + [-3]]
    params = jnp.asarray(normal(12), np.float32)

    @quick_jit
    def of_two_lengths(matrix):
        find = functools.partial(hessian_spectrum_edges, quadratic(matrix), params, RNG)
        return [find(iterations=m) for m in (12, 3)]

    for eigenvalues in spectra:
        of_lengths = jax.device_get(of_two_lengths(symmetric(eigenvalues)))
        for edges in of_lengths:
            ends = [edges.smallest, edges.largest]
            np.testing.assert_allclose(ends, [min(eigenvalues), max(eigenvalues)], atol=1e-5)
            np.testing.assert_allclose(edges.residuals[[0, -1]], [0, 0], atol=1e-5)
        # As many iterations as parameters: each eigenvalue as often as it occurs.
        np.testing.assert_allclose(of_lengths[0].ritz_values, np.sort(eigenvalues), atol=1e-5)


# --- random signs ---


def test_the_trace_lies_within_its_error_and_the_error_is_that_of_theory():
    matrix = symmetric(np.linspace(-1, 5, 20))
    squares = matrix**2 - np.diag(np.diag(matrix) ** 2)
    samples = 2000
    with jax.enable_x64(True):
        estimate = quick_jit(lambda x: hessian_trace(quadratic(matrix), x, RNG, samples=samples))
        trace = jax.device_get(estimate(normal(20)))
    assert abs(trace.mean - np.trace(matrix)) <= 4 * trace.standard_error
    expected = np.sqrt(2 * squares.sum() / samples)
    np.testing.assert_allclose(trace.standard_error, expected, rtol=0.1)


def test_narrow_parameters_give_wide_numbers():
    """The trace of a diagonal Hessian is exact."""
    params = {"x": np.arange(1, 4).astype(jnp.bfloat16), "y": np.ones((2, 1), np.float16)}

    def loss(params):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return jnp.sum(wide["x"] ** 3) + 2 * jnp.sum(wide["y"] ** 2)

    trace, product = jax.device_get(
        quick_jit(
            lambda params: (
                hessian_trace(loss, params, RNG, samples=3),
                hessian_vector_product(loss, params, {"x": np.ones(3), "y": np.ones((2, 1))}),
            )
        )(params)
    )
    assert trace.mean.dtype == jnp.float32
    assert tuple(trace) == (6 * (1 + 2 + 3) + 2 * 4, 0)
    assert (product["x"].dtype, product["y"].dtype) == (jnp.bfloat16, jnp.float16)
    np.testing.assert_array_equal(product["x"].astype(np.float32), [6, 12, 18])
