"""The Lanczos iteration step by step, for any loop that supplies the products with a matrix."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
LanczosCarry = tuple[Array, Array]  # the basis [m, P], zeros in rows to come; the scale []


class SpectrumEdges(NamedTuple):
    """The Ritz values of m Lanczos steps; m <= P, the number of parameters."""

    smallest: Array  # [], ritz_values[0]: at least the smallest eigenvalue, up to rounding
    largest: Array  # [], ritz_values[-1]: at most the largest eigenvalue, up to rounding
    ritz_values: Array  # [m], ascending
    residuals: Array  # [m], |H y - ritz_value y|: an eigenvalue lies within this distance


class LanczosRow(NamedTuple):
    """What one step adds to the tridiagonal matrix."""

    diagonal: Array  # []
    beta: Array  # [], the norm of the remainder
    coupling: Array  # [], beta, or 0 where the vectors so far span an invariant subspace


class Lanczos:
    """Lanczos for a symmetric matrix [P, P]; `hessian_spectrum_edges` explains it.

    Args:
        size: the number of steps m, at most P.
        point: any vector [P], for the size and the dtype.
        rng: one PRNG key, for the first vector and those that follow an invariant subspace.
    """

    def __init__(self, size: int, point: Array, rng: Array):
        self.size, self.point, self.rng = size, point, rng

    def start(self) -> LanczosCarry:
        """The state before the first step."""
        point = self.point
        basis = jnp.zeros((self.size, point.size), point.dtype).at[0].set(self._random_unit(0))
        return basis, jnp.zeros((), point.dtype)

    def vector(self, carry: LanczosCarry, j: Array) -> Array:
        """The vector [P] whose product with the matrix step j needs."""
        return carry[0][j]

    def update(
        self, carry: LanczosCarry, j: Array, image: Array
    ) -> tuple[LanczosCarry, LanczosRow]:
        """Step j, given the product `image` [P]."""
        basis, scale = carry
        epsilon = float(jnp.finfo(self.point.dtype).eps)
        diagonal = dot(basis[j], image)
        remainder = _without(basis, image)
        beta = jnp.linalg.norm(remainder)
        scale = jnp.maximum(scale, jnp.linalg.norm(image))
        # A remainder of this size is rounding, and has no meaningful direction. False for NaN.
        invariant = beta <= 10 * epsilon * scale
        vector = jnp.where(invariant, self._random_unit(j + 1), _unit(remainder))
        # Orthogonalise twice: the division by a small norm enlarges rounding errors.
        vector = _unit(_without(basis, _unit(_without(basis, vector))))
        basis = basis.at[j + 1].set(vector, mode="drop")  # the last step has no next row
        return (basis, scale), LanczosRow(diagonal, beta, jnp.where(invariant, 0, beta))

    def edges(self, rows: LanczosRow) -> SpectrumEdges:
        """The eigenvalues of the tridiagonal matrix; the rows of all steps are stacked, [m]."""
        off_diagonal = jnp.diag(rows.coupling[:-1], 1)
        matrix = jnp.diag(rows.diagonal) + off_diagonal + off_diagonal.T
        ritz_values, vectors = jnp.linalg.eigh(matrix)
        residuals = rows.beta[-1] * jnp.abs(vectors[-1])
        return SpectrumEdges(ritz_values[0], ritz_values[-1], ritz_values, residuals)

    def _random_unit(self, j: Array | int) -> Array:
        rng = jax.random.fold_in(self.rng, j)
        return _unit(jax.random.normal(rng, self.point.shape, self.point.dtype))


def dot(left: Array, right: Array) -> Array:
    return jnp.dot(left, right, precision="highest")


def _without(basis: Array, vector: Array) -> Array:
    """`vector` [P] minus its projections on the rows of `basis` [m, P]."""
    return vector - dot(dot(basis, vector), basis)


def _unit(vector: Array) -> Array:
    norm = jnp.linalg.norm(vector)
    return vector / jnp.where(norm == 0, 1, norm)
