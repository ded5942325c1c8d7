"""Checks of test_no_mesh.py: several devices are visible, and no array is sharded."""

from __future__ import annotations

import functools
import itertools
import sys

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
from conformance import (
    ALL_IMPLEMENTATIONS,
    ALL_MASKS,
    ALL_SCORES,
    MADE_OF_OTHERS,
    MASK_OF_SCORE,
    check_conformance,
    no_jit,
)

import attention_jax as aj


def eager_and_jitted(implementation, score):
    """Output, statistics and gradients of a batch are those of NumPy, in float32."""
    for jit in (no_jit, None):
        check_conformance(implementation, score, MASK_OF_SCORE[score], jit=jit, poison=True)


def eager_under_every_mask(implementation, score):
    for mask in ALL_MASKS:
        check_conformance(implementation, score, mask, jit=no_jit, as_table=True)


def additive_in_loops():
    """Additive attention of a size that has loops over features, by either formula of tanh."""
    rng = np.random.default_rng(0)
    q, k, v, dq, doutput = (rng.normal(size=(2, 60, 4)).astype(np.float32) for _ in range(5))
    shapes = {"query_kernel": (4, 6), "key_kernel": (4, 6), "v": (6,)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}

    def expected(q, k, v, dq, doutput):
        features = (q @ params["query_kernel"])[:, None] + (k @ params["key_kernel"])[None]
        exponentials = np.exp(np.tanh(features) @ params["v"])
        weights = exponentials / exponentials.sum(1, keepdims=True)
        doffsets = doutput @ v.T - ((weights @ v) * doutput).sum(1, keepdims=True)
        slopes = (1 - np.tanh(features) ** 2) * params["v"]
        dlogits = np.einsum("tsa,da,td->ts", slopes, params["query_kernel"], dq)
        gradient = np.einsum("ts,tsa,da->td", weights * doffsets, slopes, params["query_kernel"])
        dweights = weights * (dlogits - (weights * dlogits).sum(1, keepdims=True))
        return weights @ v, gradient, dweights @ v

    def found(q, k, v, dq, doutput):
        def of_query(q):
            return aj.attention(q, k, v, score="additive", params=floats, implementation="tiled")

        output, pull_back = jax.vjp(of_query, q)
        return output, *pull_back(doutput), jax.jvp(of_query, (q,), (dq,))[1]

    floats = jax.tree.map(jnp.float32, params)
    for factor, function in itertools.product((1, 1e3), (found, jax.jit(found))):
        scaled = q.copy()
        scaled[1, 3] *= np.float32(factor)
        arrays = scaled, k, v, dq, doutput
        examples = [expected(*(array[n].astype(np.float64) for array in arrays)) for n in range(2)]
        results = function(*map(jnp.asarray, arrays))
        for ours, parts in zip(results, zip(*examples, strict=True), strict=True):
            np.testing.assert_allclose(ours, np.stack(parts), 2e-5, 2e-5)


def of_every_score(check):
    return {
        f"{check.__name__}-{implementation}-{score}": functools.partial(
            check, implementation, score
        )
        for implementation, score in itertools.product(ALL_IMPLEMENTATIONS, ALL_SCORES)
    }


TABLE = of_every_score(eager_and_jitted)
SLOW_IN_TABLE = [f"eager_and_jitted-tiled-{score}" for score in MADE_OF_OTHERS]
CHECKS = {
    "additive_in_loops": additive_in_loops,
    **{name: check for name, check in TABLE.items() if name not in SLOW_IN_TABLE},
}
SLOW = {
    **{name: TABLE[name] for name in SLOW_IN_TABLE},
    **of_every_score(eager_under_every_mask),
}

if __name__ == "__main__":
    eight_devices.run({**CHECKS, **SLOW}, sys.argv[1:])
