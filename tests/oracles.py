"""Random arrays and a softmax in NumPy, from which tests compute what they expect."""

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
