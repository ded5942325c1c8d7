"""The joint program of edges and trace, beside the eigenvalues of a known matrix."""

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import hessian_spectrum_edges, hessian_trace
from attention_jax.analysis.edges_and_trace import spectrum_edges_and_trace

SIZE, ITERATIONS, SAMPLES = 11, 5, 3
_FACTOR = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype("f4")
MATRIX = _FACTOR + _FACTOR.T


def loss(params):
    flat = jnp.concatenate([params["a"], params["b"].ravel()])
    return flat @ MATRIX @ flat / 2


PARAMS = {"a": jnp.ones(5), "b": jnp.ones((2, 3))}


def test_both_are_those_of_the_separate_functions_for_every_seed():
    rngs = jax.random.split(jax.random.key(7), (2, 3))

    def joint(first, second):
        settings = {"iterations": ITERATIONS, "samples": SAMPLES}
        return spectrum_edges_and_trace(loss, PARAMS, (first, second), **settings)

    def separate(first, second):
        edges = hessian_spectrum_edges(loss, PARAMS, first, iterations=ITERATIONS)
        return edges, hessian_trace(loss, PARAMS, second, samples=SAMPLES)

    found, expected = (jax.jit(jax.vmap(each))(*rngs) for each in (joint, separate))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected
    )


def test_with_as_many_iterations_as_parameters_all_eigenvalues_are_found():
    rngs = (jax.random.key(0), jax.random.key(1))
    edges, _ = spectrum_edges_and_trace(loss, PARAMS, rngs, iterations=99, samples=2)
    np.testing.assert_allclose(edges.ritz_values, np.linalg.eigvalsh(MATRIX), atol=1e-4)
