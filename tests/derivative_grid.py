r"""Every derivative of `attention` and `ring_attention`, for every score, mask and option.

The other side is implementation "reference", in float64. The three masks are one batch of tables,
and all compositions of one case are one program: compiling is what takes the time. A script that
test_derivative_grid.py runs on several devices made of the CPU; with names, it runs these cases:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python tests/derivative_grid.py own-bias-tiled
"""

from __future__ import annotations

import functools
import itertools
import sys

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
from conformance import quick_jit
from derivative_compositions import COMPOSITIONS, K, Q, V
from score_cases import SCORE_CASES

import attention_jax as aj
from attention_jax.implementations import ring, tiled

SCORES = {**aj.SCORES, "own": SCORE_CASES["own"].score}
OPTIONS = ("none", "dropout", "bias", "statistics")
RULES = {"tiled": tiled._attend, "ring": ring._attend}
# Lengths 5 and 7, and padding to lengths that two devices can have two chunks of.
ROWS, KEYS = 8, 8
TILE = aj.BlockSizes(2, 3)


def tables() -> np.ndarray:
    """Bool [3, ROWS, KEYS]: no mask, causal with a row that sees nothing, padding."""
    rows, keys = np.arange(ROWS)[:, None], np.arange(KEYS)[None, :]
    real = (rows < len(Q)) & (keys < len(K))
    return np.stack([real, real & (keys < rows), real & (keys < 4) & (rows != 2)])


def function_of(score_name, option, implementation):
    """f(table, q, k, v): attention, whose parameters and bias move with the query."""
    score = SCORES[score_name]
    params = score.init(jax.random.key(3), 3, 3)

    def f(table, q, k, v):
        size = 1 + jnp.tanh(q[0, 0]) / 4
        arguments = {
            "score": score,
            "params": jax.tree.map(lambda leaf: leaf.astype(q.dtype) * size, params),
            "mask": table,
            "return_statistics": option == "statistics",
        }
        if option == "dropout":
            arguments |= {"dropout_rate": 0.3, "dropout_rng": jax.random.key(5)}
        if option == "bias":
            stored = jnp.pad(jnp.sin(q[:, :1] - k[:, 1]), ((0, ROWS - len(q)), (0, KEYS - len(k))))
            arguments["bias"] = aj.alibi_bias(size / 3) + stored
        tokens = [
            jnp.pad(x, ((0, n - len(x)), (0, 0))) for x, n in ((q, ROWS), (k, KEYS), (v, KEYS))
        ]
        if implementation == "ring":
            mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
            found = aj.ring_attention(*tokens, mesh=mesh, block_sizes=TILE, **arguments)
        else:
            arguments["implementation"] = implementation
            found = aj.attention(*tokens, block_sizes=TILE, **arguments)
        if option != "statistics":
            return found[: len(q)]
        output, statistics = found
        entropy, some = statistics.entropy, statistics.logsumexp > -jnp.inf
        logsumexp = jnp.where(some, statistics.logsumexp, 0)
        return (output * jnp.cos(entropy)[:, None] + jnp.tanh(logsumexp)[:, None])[: len(q)]

    return f


def derivatives(score_name, option, implementation, names):
    f = function_of(score_name, option, implementation)

    def of_table(table):
        return {name: COMPOSITIONS[name][0](functools.partial(f, table))(Q, K, V) for name in names}

    return quick_jit(jax.vmap(of_table))(tables())


@functools.cache
def expected(score_name, option):
    return jax.device_get(derivatives(score_name, option, "reference", tuple(COMPOSITIONS)))


def is_the_reference(score_name, option, implementation, names=tuple(COMPOSITIONS)):
    with jax.enable_x64(True):
        others = expected(score_name, option)
        rule, traced = RULES[implementation], []
        by_hand = rule.bwd

        def counted(*arguments):
            traced.append(None)
            return by_hand(*arguments)

        rule.bwd = counted
        try:
            for name in names:
                traced.clear()
                got = derivatives(score_name, option, implementation, (name,))[name]
                for one, other in zip(*map(jax.tree.leaves, (got, others[name])), strict=True):
                    scale = max(1.0, np.abs(other).max())
                    np.testing.assert_allclose(one, other, rtol=0, atol=1e-10 * scale, err_msg=name)
                assert bool(traced) == COMPOSITIONS[name][1], (name, len(traced))
        finally:
            rule.bwd = by_hand


GRID = {
    "-".join(case): functools.partial(is_the_reference, *case)
    for case in itertools.product(SCORES, OPTIONS, RULES)
}

if __name__ == "__main__":
    eight_devices.run(GRID, sys.argv[1:])
