"""The origin from which tokens are taken where a score does not change with it.

If a score e is translation invariant, e(q - c, k - c) = e(q, k) for every vector c. A squared
distance that is computed as |q|^2 + |k|^2 - 2 q . k rounds three terms of the size of the tokens,
so it loses digits where all tokens share an offset. With a c near the keys, the terms are no larger
than the distances.

Derivatives take c for a constant, although it is computed from the keys. They are right in every
order: (q, k, c) -> e(q - c, k - c) does not depend on c, so all its derivatives by c are 0.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def origin_of(
    key: Array, used: Array | None = None, axis: str | None = None, *, short: bool = False
) -> Array:
    """The mean of the keys in each feature where it is far from 0, otherwise 0; without a gradient.

        c_d = mean_j k_jd   if c_d^2 > mean_j (k_jd - c_d)^2,   0 otherwise

    In the second case c would reduce the squares by less than half, and subtracting it may round
    tokens: bfloat16 tokens around 0 are not rounded again. Each feature decides for itself, because
    a score may weigh them, as `elliptical` does.

    Args:
        key: [S, D], float32 or float64.
        used: bool [S]; the others may hold anything, NaN included. None if all are used.
        axis: a mesh axis whose devices share the origin; each has other keys.
        short: whether to round c to bfloat16. Differences of bfloat16 tokens and c are then numbers
            of bfloat16 for most tokens that are nearer to c than to 0.

    Returns:
        c [1, D].
    """

    def total(*rows: Array) -> list[Array]:
        local = [row.sum(axis=0) for row in rows]
        return local if axis is None else jax.lax.psum(local, axis)

    key = jax.lax.stop_gradient(key)
    used = jnp.ones(key.shape[0], bool) if used is None else used
    key = jnp.where(used[:, None], key, 0)
    weights = used.astype(key.dtype)
    (count,) = total(weights)
    weights = weights / jnp.maximum(count, 1)
    # Queries and keys must lose the same vector. XLA may compute what follows the sum twice, once
    # for each side, also after a barrier, so nothing after it is rounded in more than one way.
    means = total(key * weights[:, None], key * key * weights[:, None])
    mean, square = jax.lax.optimization_barrier(means)
    if short:
        mean = jax.lax.reduce_precision(mean, exponent_bits=8, mantissa_bits=7)
    return jnp.where(2 * mean * mean > square, mean, 0)[None]
