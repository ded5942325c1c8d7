"""The curvature of a loss: products with its Hessian, and estimates of its spectrum from them.

A Hessian of P parameters has P^2 entries, but its product with a vector costs only a few gradients.
All functions here need only such products. They serve any `loss(params)` that returns one float,
for any pytree of floats: a loss through `attention` with any implementation, as a function of the
score's parameters, or the loss of a whole model.

All functions are pure and not jitted: `jax.jit(lambda params, rng: hessian_trace(loss, params,
rng))` compiles once for many calls, and its `jax.vmap` serves stacked seeds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from attention_jax.core.arrays import accumulator_dtype, float_array
from attention_jax.core.checks import check_integer, checked_rng

Array = jax.Array
Loss = Callable[[Any], Array]  # params -> float []
Product = Callable[[Array], Array]  # of a vector [P]


class SpectrumEdges(NamedTuple):
    """The Ritz values of m Lanczos steps; m <= P, the number of parameters."""

    smallest: Array  # [], ritz_values[0]: at least the smallest eigenvalue, up to rounding
    largest: Array  # [], ritz_values[-1]: at most the largest eigenvalue, up to rounding
    ritz_values: Array  # [m], ascending
    residuals: Array  # [m], |H y - ritz_value y|: an eigenvalue lies within this distance


class Estimate(NamedTuple):
    """The mean of random samples, and its standard error."""

    mean: Any  # an array
    standard_error: Any  # like `mean`; infinite for a single sample


def hessian_vector_product(loss: Loss, params: Any, vector: Any) -> Any:
    """The Hessian of a loss times a vector, exact up to rounding, without forming the Hessian.

        H v = d/dr gradient(params + r v) at r = 0

    Args:
        loss: params -> float [].
        params: a pytree of float arrays.
        vector: a pytree of float arrays with the structure and shapes of `params`.

    Returns:
        H v, a pytree like `params`, in its dtypes.

    Raises:
        ValueError: an argument has the wrong structure, shape, dtype or value, or the loss is not
            one float.

    >>> def loss(params):
    ...     return 3 * params["x"] ** 2 + params["x"] * params["y"]
    >>> product = hessian_vector_product(loss, {"x": 1.0, "y": 1.0}, {"x": 1.0, "y": 10.0})
    >>> float(product["x"]), float(product["y"])  # [[6, 1], [1, 0]] @ [1, 10]
    (16.0, 1.0)

    Source: Pearlmutter 1994: his R{gradient}, the tangent of the gradient along v, which stores no
    residuals.
    """
    params = _float_params(params)
    vector = _checked_vector(vector, params)
    return _product(loss, params, vector)


def hessian_spectrum_edges(
    loss: Loss, params: Any, rng: Array, *, iterations: int = 30
) -> SpectrumEdges:
    """The smallest and the largest eigenvalue of a loss's Hessian, by Lanczos.

        H V = V T + beta_m v_{m+1} e_m^T,    V^T V = I,    T tridiagonal [m, m]

    from a random unit v_1. T's eigenvalues are the Ritz values, and a residual is beta_m times the
    last entry of T's eigenvector. Every v is orthogonalised twice against all v before it, so that
    rounding does not repeat converged eigenvalues. Where the v span an invariant subspace (because
    an eigenvalue repeats), the next v is random again, and uncoupled in T.

    Accuracy: the edges converge first, and faster the larger their distance to the rest of the
    spectrum. An eigenvalue lies within `residuals[i]` of `ritz_values[i]`, up to rounding (a few
    times epsilon max |eigenvalue|, and the rounding of the loss's own derivatives). An eigenvalue
    further outside is not excluded, but from a random start it soon becomes unlikely. With as many
    iterations as parameters, all eigenvalues are found with their multiplicities.

    It costs `iterations` products and the memory of as many vectors of P floats.

    Args:
        loss: params -> float [].
        params: a pytree of float arrays with P numbers in all.
        rng: one PRNG key.
        iterations: at least 1; m = min(iterations, P) are made.

    Returns:
        `SpectrumEdges` in float32 (float64 if any parameter is); NaN where a derivative is.

    Raises:
        ValueError: an argument has the wrong structure, dtype or value, or the loss is not one
            float.

    >>> def loss(x):  # a saddle
    ...     return jnp.sum(jnp.array([-1.0, 2.0, 5.0]) * x**2) / 2
    >>> rng = jax.random.key(0)
    >>> edges = jax.jit(lambda x: hessian_spectrum_edges(loss, x, rng))(jnp.ones(3))
    >>> edges.ritz_values.round(4).tolist()
    [-1.0, 2.0, 5.0]

    Source: Golub and Van Loan, Matrix Computations, "The symmetric Lanczos process" (their q, r are
    v and the remainder of H v); for a network's loss, Ghorbani, Krishnan and Xiao 2019.
    """
    iterations = check_integer("iterations", iterations)
    edges, _ = edges_and_trace(loss, params, (rng, rng), iterations, 0)
    return edges


def hessian_trace(loss: Loss, params: Any, rng: Array, *, samples: int = 32) -> Estimate:
    """The trace of a loss's Hessian (the sum of its eigenvalues), estimated by random signs.

        trace H = E[z^T H z],    z_i = -1 or 1

    A sample's variance is 2 sum_{i != j} H_ij^2, so that the trace of a diagonal Hessian is exact.
    Each sample takes one product; the samples run in sequence, in the memory of one product.

    Args:
        loss: params -> float [].
        params: a pytree of float arrays.
        rng: one PRNG key.
        samples: number of sign vectors, at least 1.

    Returns:
        `Estimate` of two floats [] in float32 (float64 if any parameter is).

    Raises:
        ValueError: an argument has the wrong structure, dtype or value, or the loss is not one
            float.

    >>> rng = jax.random.key(0)
    >>> trace = jax.jit(lambda x: hessian_trace(lambda x: jnp.sum(x**3), x, rng))
    >>> estimate = trace(jnp.array([1.0, 2.0]))
    >>> float(estimate.mean), float(estimate.standard_error)  # H = diag(6 x_i)
    (18.0, 0.0)

    Source: Hutchinson 1990 (his u, A are z, H).
    """
    samples = check_integer("samples", samples)
    _, trace = edges_and_trace(loss, params, (rng, rng), 0, samples)
    return trace


# --- Lanczos and random signs ---


def edges_and_trace(
    loss: Loss,
    params: Any,
    rngs: tuple[Array, Array],
    iterations: int,
    samples: int,
) -> tuple[SpectrumEdges, Estimate]:
    """`hessian_spectrum_edges` and `hessian_trace` in one loop.

    The product with the Hessian is nearly all of the program, and one loop compiles it once.

    Args:
        loss, params: as in `hessian_spectrum_edges`.
        rngs: the PRNG keys of the two.
        iterations: of Lanczos; 0 for the trace alone, where the edges are NaN.
        samples: of random signs; 0 for the edges alone, where the trace is NaN.
    """
    edges_rng, trace_rng = (checked_rng(rng, name="rng") for rng in rngs)
    point, product = _flattened(loss, params)
    size = min(iterations, point.size)
    epsilon = float(jnp.finfo(point.dtype).eps)

    def random_unit(j: Array | int) -> Array:
        rng = jax.random.fold_in(edges_rng, j)
        return _unit(jax.random.normal(rng, point.shape, point.dtype))

    def step(carry: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], Any]:
        basis, scale = carry  # [size + 1, P], zeros in rows to come; the largest |image| []
        vector = jnp.where(j < size, basis[j], _signs(point, trace_rng, j - size))
        image = product(vector)
        remainder = _without(basis, image)
        beta, scale = jnp.linalg.norm(remainder), jnp.maximum(scale, jnp.linalg.norm(image))
        # A remainder of this size is rounding, and has no meaningful direction. False for NaN.
        invariant = beta <= 10 * epsilon * scale
        following = jnp.where(invariant, random_unit(j + 1), _unit(remainder))
        # Orthogonalise twice: the division by a small norm enlarges rounding errors.
        following = _unit(_without(basis, _unit(_without(basis, following))))
        # A row of T up to the diagonal; T is symmetric, and later rows have the other entries.
        row = _dot(basis, image)[:size]
        basis = basis.at[j + 1].set(following, mode="drop")
        return (basis, scale), (row, beta, _dot(vector, image))

    basis = jnp.zeros((size + 1, point.size), point.dtype).at[0].set(random_unit(0))
    carry = basis, jnp.zeros((), point.dtype)
    _, (rows, betas, products) = jax.lax.scan(step, carry, jnp.arange(size + samples))
    return _edges(rows[:size], betas[:size]), _mean(products[size:])


def _edges(rows: Array, betas: Array) -> SpectrumEdges:
    """The eigenvalues of T, from its lower triangle [m, m] and the norms of the remainders [m]."""
    size = len(rows)
    if size == 0:
        unknown = jnp.full((), jnp.nan, betas.dtype)
        return SpectrumEdges(unknown, unknown, betas, betas)
    ritz_values, vectors = jnp.linalg.eigh(jnp.tril(rows) + jnp.tril(rows, -1).T)
    residuals = betas[-1] * jnp.abs(vectors[-1])
    return SpectrumEdges(ritz_values[0], ritz_values[-1], ritz_values, residuals)


def _signs(point: Array, rng: Array, number: Array) -> Array:
    return jax.random.rademacher(jax.random.fold_in(rng, number), point.shape, point.dtype)


def _mean(samples: Array) -> Estimate:
    """The mean over the first axis; a single sample has no estimate of the variance."""
    count = len(samples)
    if count == 0:
        return Estimate(jnp.nan, jnp.inf)
    offsets = samples - samples[:1]  # equal samples have exactly their mean, and no error
    mean = samples[0] + jnp.mean(offsets, axis=0)
    if count == 1:
        return Estimate(mean, jnp.full_like(mean, jnp.inf))
    return Estimate(mean, jnp.std(offsets, axis=0, ddof=1) / count**0.5)


def _dot(left: Array, right: Array) -> Array:
    return jnp.dot(left, right, precision="highest")


def _without(basis: Array, vector: Array) -> Array:
    """`vector` [P] minus its projections on the rows of `basis` [m, P]."""
    return vector - _dot(_dot(basis, vector), basis)


def _unit(vector: Array) -> Array:
    norm = jnp.linalg.norm(vector)
    return vector / jnp.where(norm == 0, 1, norm)


# --- products ---


def _product(loss: Loss, params: Any, vector: Any) -> Any:
    """H v, for checked arguments."""

    def checked(params: Any) -> Array:
        value = float_array("loss(params)", loss(params))
        if value.shape != ():
            raise ValueError(f"loss(params) must be one float []; got {list(value.shape)}")
        return value

    return jax.jvp(jax.grad(checked), (params,), (vector,))[1]


def _flattened(loss: Loss, params: Any) -> tuple[Array, Product]:
    """(params as one vector [P], the product with the Hessian at params)."""
    params = _float_params(params)
    # One wide dtype, for sums over the whole vector; the loss gets the params in their own dtypes.
    dtype = accumulator_dtype(*jax.tree.leaves(params))
    point, restore = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(dtype), params))

    def flat_loss(point: Array) -> Array:
        narrow = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), restore(point), params)
        return loss(narrow)

    return point, lambda vector: _product(flat_loss, point, vector)


# --- checks of arguments ---


def _float_params(params: Any) -> Any:
    params = _float_arrays("params", params)
    if sum(leaf.size for leaf in jax.tree.leaves(params)) == 0:
        raise ValueError(
            f"params must hold at least one number; got {params!r}: for a score without parameters,"
            " take the tokens or the parameters of a model"
        )
    return params


def _checked_vector(vector: Any, params: Any) -> Any:
    vector = _float_arrays("vector", vector)
    got, expected = (
        (jax.tree.structure(tree), [leaf.shape for leaf in jax.tree.leaves(tree)])
        for tree in (vector, params)
    )
    if got != expected:
        raise ValueError(f"vector must be {expected}, as params are; got {got}")
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), vector, params)


def _float_arrays(name: str, tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: float_array(f"{name}{jax.tree_util.keystr(path)}", leaf), tree
    )
