"""How curved a loss is: products with its Hessian, and what they say of the spectrum.

A Hessian of P parameters has P^2 entries, a product of it with a vector costs a few gradients. All
that is here but `dense_hessian` is made of such products, for any `loss(params)` that gives one
float and any pytree of floats: a loss through `attention` in its score's parameters, whatever the
implementation, or that of a whole model.

Everything is pure and nothing is jitted: `jax.jit(lambda params, rng: hessian_trace(loss, params,
rng))` compiles once for many calls, and its `jax.vmap` serves stacked seeds.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from attention_jax.core.arrays import accumulator_dtype, float_array
from attention_jax.core.checks import checked_rng

Array = jax.Array
Loss = Callable[[Any], Array]  # params -> float []
Product = Callable[[Array], Array]  # of a vector [P]

_OUTER = ("forward", "reverse")


class SpectrumEdges(NamedTuple):
    """What m steps of Lanczos say of a Hessian's eigenvalues; m <= P, the number of parameters."""

    smallest: Array  # [], ritz_values[0]: never below the smallest eigenvalue, but for rounding
    largest: Array  # [], ritz_values[-1]: never above the largest
    ritz_values: Array  # [m], ascending
    residuals: Array  # [m], |H y - ritz_value y|: an eigenvalue is as near as that, or nearer


class Estimate(NamedTuple):
    """The mean of random samples, and how far it may be from what it estimates."""

    mean: Any
    standard_error: Any  # as `mean`; infinite for a single sample


def hessian_vector_product(loss: Loss, params: Any, vector: Any, *, outer: str = "forward") -> Any:
    """The Hessian of a loss times a vector, exact to rounding, without the Hessian.

        H v = d/dr gradient(params + r v) at r = 0

    Args:
        loss: params -> float [].
        params: a pytree of float arrays.
        vector: a pytree of float arrays with the structure and shapes of `params`.
        outer: how the gradient is differentiated. "forward" takes its tangent along `vector`, which
            saves nothing; "reverse" pulls `vector` back through it, which is the same since H is
            symmetric, for a gradient that has no forward mode.

    Returns:
        H v, a pytree like `params`, in its dtypes.

    Raises:
        ValueError: an argument has the wrong structure, shape, dtype or value, or the loss gives
            other than one float.

    >>> def loss(params):
    ...     return 3 * params["x"] ** 2 + params["x"] * params["y"]
    >>> product = hessian_vector_product(loss, {"x": 1.0, "y": 1.0}, {"x": 1.0, "y": 10.0})
    >>> float(product["x"]), float(product["y"])  # [[6, 1], [1, 0]] @ [1, 10]
    (16.0, 1.0)

    Source: Pearlmutter 1994: his R{gradient}, the derivative along v, is "forward" here.
    """
    params = _checked_params(params)
    vector = _checked_vector(vector, params)
    return _product(loss, params, vector, _checked_outer(outer))


def hessian_spectrum_edges(
    loss: Loss, params: Any, rng: Array, *, iterations: int = 30, outer: str = "forward"
) -> SpectrumEdges:
    """The smallest and the largest eigenvalue of a loss's Hessian, by Lanczos.

        H V = V T + beta_m v_{m+1} e_m^T,    V^T V = I,    T tridiagonal [m, m]

    from a random unit v_1; T's eigenvalues are the Ritz values, and a residual is beta_m times the
    last entry of T's eigenvector. Every v is made orthogonal to all before it, and again, so that
    rounding brings no ghosts of eigenvalues that were found already. Where the v so far span an
    invariant subspace (an eigenvalue that repeats), the next is random again, uncoupled in T.

    Accuracy: the edges are found first, the faster the further they stand apart from the rest.
    Within `residuals[i]` of `ritz_values[i]` lies an eigenvalue, but for rounding (a few times
    epsilon max |eigenvalue|, and that of the loss's own derivatives). That none lies further
    outside is not proven by this, but becomes likely fast: the start is random. With as many
    iterations as parameters, all eigenvalues are found, each as often as it occurs.

    Costs `iterations` products and holds that many vectors of P floats.

    Args:
        loss: params -> float [].
        params: a pytree of float arrays with P numbers in all.
        rng: one PRNG key.
        iterations: at least 1; no more than P are made, m = min(iterations, P).
        outer: as in `hessian_vector_product`.

    Returns:
        `SpectrumEdges` in float32 (float64 if any parameter is); NaN where a derivative is.

    Raises:
        ValueError: an argument has the wrong structure, dtype or value, or the loss gives other
            than one float.

    >>> def loss(x):  # a saddle
    ...     return jnp.sum(jnp.array([-1.0, 2.0, 5.0]) * x**2) / 2
    >>> edges = hessian_spectrum_edges(loss, jnp.ones(3), jax.random.key(0))
    >>> edges.ritz_values.round(4).tolist()
    [-1.0, 2.0, 5.0]

    Source: Golub and Van Loan, Matrix Computations, "The symmetric Lanczos process" (their q, r are
    v and what is left of H v); of a network's loss, Ghorbani, Krishnan and Xiao 2019.
    """
    iterations = _checked_count("iterations", iterations)
    rng = checked_rng(rng, name="rng")
    point, product, _ = _flattened(loss, params, outer)
    size, dtype = min(iterations, point.size), point.dtype
    epsilon = float(jnp.finfo(dtype).eps)

    def draw(j: Array | int) -> Array:
        return _unit(jax.random.normal(jax.random.fold_in(rng, j), point.shape, dtype))

    def step(carried: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], Any]:
        basis, scale = carried  # [m, P], zeros from row j + 1 on
        image = product(basis[j])
        diagonal = _dot(basis[j], image)
        rest = _without(basis, image)
        beta = jnp.linalg.norm(rest)
        scale = jnp.maximum(scale, jnp.linalg.norm(image))
        # What is left is rounding: its direction says nothing, and may be 0. Not where it is NaN.
        broken = beta <= 10 * epsilon * scale
        following = jnp.where(broken, draw(j + 1), _unit(rest))
        # Again, since the division enlarges what rounding has left of the basis; twice is enough.
        following = _unit(_without(basis, _unit(_without(basis, following))))
        basis = basis.at[j + 1].set(following, mode="drop")  # dropped where there is no next row
        return (basis, scale), (diagonal, beta, jnp.where(broken, 0, beta))

    basis = jnp.zeros((size, point.size), dtype).at[0].set(draw(0))
    start = basis, jnp.zeros((), dtype)
    _, (diagonal, betas, coupled) = jax.lax.scan(step, start, jnp.arange(size))
    beside = jnp.diag(coupled[:-1], 1)
    ritz_values, vectors = jnp.linalg.eigh(jnp.diag(diagonal) + beside + beside.T)
    residuals = betas[-1] * jnp.abs(vectors[-1])
    return SpectrumEdges(ritz_values[0], ritz_values[-1], ritz_values, residuals)


def hessian_trace(
    loss: Loss, params: Any, rng: Array, *, samples: int = 32, outer: str = "forward"
) -> Estimate:
    """The trace of a loss's Hessian (the sum of its eigenvalues), estimated from random signs.

        trace H = E[z^T H z],    z_i = -1 or 1

    A sample's variance is 2 sum_{i != j} H_ij^2: a diagonal Hessian's trace is exact. One product a
    sample, one after another: memory is that of one product.

    Args:
        loss: params -> float [].
        params: a pytree of float arrays.
        rng: one PRNG key.
        samples: how many sign vectors, at least 1.
        outer: as in `hessian_vector_product`.

    Returns:
        `Estimate` of two floats [] in float32 (float64 if any parameter is).

    Raises:
        ValueError: an argument has the wrong structure, dtype or value, or the loss gives other
            than one float.

    >>> estimate = hessian_trace(lambda x: jnp.sum(x**3), jnp.array([1.0, 2.0]), jax.random.key(0))
    >>> float(estimate.mean), float(estimate.standard_error)  # 6 x_i on the diagonal, 0 beside it
    (18.0, 0.0)

    Source: Hutchinson 1990 (his u, A are z, H).
    """
    samples = _checked_count("samples", samples)
    rng = checked_rng(rng, name="rng")
    point, product, _ = _flattened(loss, params, outer)
    zero = jnp.zeros((), point.dtype)

    def sample(signs: Array) -> Array:
        return _dot(signs, product(signs))

    return _mean_over_signs(sample, zero, point, rng, samples)


def hessian_diagonal(
    loss: Loss, params: Any, rng: Array, *, samples: int = 32, outer: str = "forward"
) -> Estimate:
    """The diagonal of a loss's Hessian, each parameter's own curvature, from random signs.

        H_ii = E[z_i (H z)_i],    z_i = -1 or 1

    A sample's variance is sum_{j != i} H_ij^2: it needs many samples where parameters interact. One
    product a sample, one after another: memory is that of one product and two vectors like params.

    Args:
        loss, params, rng, samples, outer: as in `hessian_trace`.

    Returns:
        `Estimate` of two pytrees with the structure and shapes of `params`, in float32 (float64 if
        any parameter is).

    Raises:
        ValueError: an argument has the wrong structure, dtype or value, or the loss gives other
            than one float.

    >>> estimate = hessian_diagonal(lambda x: jnp.sum(x**3), jnp.arange(3.0), jax.random.key(0))
    >>> estimate.mean
    Array([ 0.,  6., 12.], dtype=float32)

    Source: Bekas, Kokiopoulou and Saad 2007; for signs the sum of squares that they divide by is
    the number of samples.
    """
    samples = _checked_count("samples", samples)
    rng = checked_rng(rng, name="rng")
    point, product, restore = _flattened(loss, params, outer)
    zeros = jnp.zeros_like(point)

    def sample(signs: Array) -> Array:
        return signs * product(signs)

    return Estimate(*map(restore, _mean_over_signs(sample, zeros, point, rng, samples)))


def dense_hessian(
    loss: Loss, params: Any, *, max_parameters: int = 2048, outer: str = "forward"
) -> Array:
    """The Hessian of a loss itself, for few parameters; one product a column.

        H_ij = d^2 loss / dp_i dp_j,    p = ravel_pytree(params)[0]

    Args:
        loss: params -> float [].
        params: a pytree of float arrays with P numbers in all.
        max_parameters: the largest P that is served; the array has P^2 entries.
        outer: as in `hessian_vector_product`.

    Returns:
        H [P, P] in float32 (float64 if any parameter is), symmetric to rounding. The parameters
        come in the order of `jax.flatten_util.ravel_pytree`.

    Raises:
        ValueError: P is larger than `max_parameters`, an argument has the wrong structure, dtype or
            value, or the loss gives other than one float.

    >>> dense_hessian(lambda params: params["x"] ** 2 * params["y"], {"x": 1.0, "y": 3.0})
    Array([[6., 2.],
           [2., 0.]], dtype=float32)

    Source: Pearlmutter 1994, of each unit vector.
    """
    max_parameters = _checked_count("max_parameters", max_parameters)
    point, product, _ = _flattened(loss, params, outer)
    if point.size > max_parameters:
        raise ValueError(
            f"params must hold at most max_parameters={max_parameters} numbers for a dense Hessian;"
            f" got {point.size} (hessian_spectrum_edges, hessian_trace and hessian_diagonal serve"
            " any number)"
        )
    columns = jax.lax.map(
        lambda j: product(jnp.zeros_like(point).at[j].set(1)), jnp.arange(point.size)
    )
    return columns.T


# --- products, and what is made of them ---


def _product(loss: Loss, params: Any, vector: Any, outer: str) -> Any:
    """H v of trees that fit."""

    def checked(params: Any) -> Array:
        value = float_array("loss(params)", loss(params))
        if value.shape != ():
            raise ValueError(f"loss(params) must be one float []; got {list(value.shape)}")
        return value

    gradient = jax.grad(checked)
    if outer == "forward":
        return jax.jvp(gradient, (params,), (vector,))[1]
    return jax.vjp(gradient, params)[1](vector)[0]


def _flattened(loss: Loss, params: Any, outer: str) -> tuple[Array, Product, Callable]:
    """Params as one vector [P], the product with the Hessian there, and [P] -> tree."""
    params, outer = _checked_params(params), _checked_outer(outer)
    # In one wide dtype: sums over all of the vector are to come, and casts are differentiable.
    dtype = accumulator_dtype(*jax.tree.leaves(params))
    point, restore = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(dtype), params))

    def flat_loss(point: Array) -> Array:
        narrow = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), restore(point), params)
        return loss(narrow)

    return point, lambda vector: _product(flat_loss, point, vector, outer), restore


def _mean_over_signs(
    sample: Product, zeros: Array, point: Array, rng: Array, samples: int
) -> Estimate:
    """Mean of `sample`, an array like `zeros`, over vectors of signs like `point`.

    Updated sample by sample (Welford), so that none is kept.
    """

    def step(carried: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], None]:
        mean, squares = carried
        sign_rng = jax.random.fold_in(rng, number)
        value = sample(jax.random.rademacher(sign_rng, point.shape, point.dtype))
        difference = value - mean
        mean = mean + difference / (number + 1).astype(point.dtype)
        return (mean, squares + difference * (value - mean)), None

    (mean, squares), _ = jax.lax.scan(step, (zeros, zeros), jnp.arange(samples))
    if samples == 1:  # one sample says nothing of the others
        return Estimate(mean, jnp.full_like(mean, jnp.inf))
    return Estimate(mean, jnp.sqrt(squares / (samples * (samples - 1))))


def _dot(left: Array, right: Array) -> Array:
    return jnp.dot(left, right, precision="highest")


def _without(basis: Array, vector: Array) -> Array:
    """What is left of [P] without its parts along the rows of [m, P]."""
    return vector - _dot(_dot(basis, vector), basis)


def _unit(vector: Array) -> Array:
    norm = jnp.linalg.norm(vector)
    return vector / jnp.where(norm == 0, 1, norm)


# --- what users get wrong ---


def _checked_params(params: Any) -> Any:
    params = _float_arrays("params", params)
    if sum(leaf.size for leaf in jax.tree.leaves(params)) == 0:
        raise ValueError(f"params must hold at least one number; got {params!r}")
    return params


def _checked_vector(vector: Any, params: Any) -> Any:
    expected, got = jax.tree.structure(params), jax.tree.structure(vector)
    if expected != got:  # type: ignore[operator]
        raise ValueError(f"vector must have the structure of params, {expected}; got {got}")

    def check(path: Any, leaf: Array, like: Array) -> Array:
        where = jax.tree_util.keystr(path)
        if leaf.shape != like.shape:
            raise ValueError(
                f"vector{where} must be {list(like.shape)}, as params{where} is; got"
                f" {list(leaf.shape)}"
            )
        return leaf.astype(like.dtype)

    return jax.tree_util.tree_map_with_path(check, _float_arrays("vector", vector), params)


def _float_arrays(name: str, tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: float_array(f"{name}{jax.tree_util.keystr(path)}", leaf), tree
    )


def _checked_count(name: str, count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
        raise ValueError(f"{name} must be a Python integer of at least 1; got {count!r}")
    return int(count)


def _checked_outer(name: Any) -> str:
    if name not in _OUTER:
        raise ValueError(f"outer must be one of {', '.join(_OUTER)}; got {name!r}")
    return str(name)
