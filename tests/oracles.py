"""Random arrays and a softmax in NumPy, from which tests compute what they expect."""

import chex
import jax
import numpy as np


def normal(*shape, seed=0, dtype=np.float32):
    """Independent standard normal numbers, the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def softmax(logits, allowed=True):
    """The softmax of the allowed logits of each row, in float64; 0 in a row without any."""
    logits = np.where(allowed, np.float64(logits), -np.inf)
    largest = logits.max(-1, keepdims=True, initial=-1e300)
    exponentials = np.exp(logits - largest)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / np.where(total == 0, 1, total)


def softmax_gradient(weights, dweights):
    """The gradient of logits, dL_ij = A_ij (dA_ij - sum_k A_ik dA_ik)."""
    return weights * (dweights - (weights * dweights).sum(-1, keepdims=True))


def assert_close(name, got, expected, tolerance, terms=0.0):
    """Equal trees, shapes and infinities, and errors within tolerance * max |expected| of a leaf.

    Args:
        name: in the error, before the path of the leaf.
        got, expected: trees of arrays.
        tolerance: relative to the largest entry of each expected leaf.
        terms: the size of the terms whose sums the entries are, if it is larger.
    """

    def check(path, got, expected):
        what = name + jax.tree_util.keystr(path)
        got, expected = (np.asarray(array).astype(np.float64) for array in (got, expected))
        assert got.shape == expected.shape, f"{what}: shape {got.shape}, not {expected.shape}"
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(got[~finite], expected[~finite], err_msg=what)
        scale = np.max(np.abs(expected[finite]), initial=terms)
        error = np.max(np.abs(got[finite] - expected[finite]), initial=0.0)
        assert error <= tolerance * scale, f"{what}: error {error:.3g} at scale {scale:.3g}"

    chex.assert_trees_all_equal_structs(got, expected)
    jax.tree_util.tree_map_with_path(check, got, expected)


def complex_step(total, inputs):
    """The gradient of a function by each number of a tree: Im f(x + ih) / h, exact to rounding.

    Args:
        total: of a tree with a leading axis, of size 1 or of P perturbations; its imaginary part
            at each of them, [P].
        inputs: tree of float64 arrays.
    """
    leaves, structure = jax.tree.flatten(inputs)
    gradients = []
    for number, leaf in enumerate(leaves):
        moved = [other[None].astype(complex) for other in leaves]
        directions = np.eye(leaf.size).reshape(leaf.size, *leaf.shape)
        moved[number] = leaf + 1e-30j * directions
        slopes = np.broadcast_to(total(jax.tree.unflatten(structure, moved)), leaf.size) / 1e-30
        gradients.append(slopes.reshape(leaf.shape))
    return jax.tree.unflatten(structure, gradients)
