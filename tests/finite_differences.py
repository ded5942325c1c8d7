"""First and second derivatives against central differences, by `jax.test_util.check_grads`."""

import jax
import numpy as np
from jax.test_util import check_grads


def check_derivatives(functions, *point, forward=True):
    """Asserts that the derivatives of each function at the point equal central differences.

    To be used under `enable_x64`.

    Args:
        functions: a function of `*point` that returns a tree of float64 arrays, or
            {name: function}.
        point: trees of arrays.
        forward: True checks reverse mode, forward mode and the four compositions of two of them.
            False checks reverse mode and reverse over reverse mode.
    """
    point = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), point)
    modes = ["fwd", "rev"] if forward else ["rev"]
    for function in [functions] if callable(functions) else functions.values():
        check_grads(jax.jit(function), point, order=2, modes=modes, atol=1e-6, rtol=1e-6, eps=3e-5)
