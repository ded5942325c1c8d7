"""Derivatives as users compose them: in tiles and in a ring as by JAX's own rules of the reference.

The parameters and a bias depend on the query, so that each derivative is one of theirs too.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import assert_close, quick_jit
from derivative_compositions import COMPOSITIONS, K, Q, V
from score_cases import SCORE_CASES, slow_unless

import attention_jax as aj

SCORES = {**aj.SCORES, "own": SCORE_CASES["own"].score}
OPTIONS = ("none", "dropout", "bias", "statistics")
# Lengths 5 and 7 are padded to this, which two devices split into two chunks each.
LENGTH, TILE = 8, aj.BlockSizes(2, 3)


def table() -> np.ndarray:
    """Returns a causal mask with an empty row and padding, bool [LENGTH, LENGTH]."""
    rows, keys = np.indices((LENGTH, LENGTH))
    return (keys < rows) & (rows < len(Q)) & (keys < len(K))


def function_of(score_name, option, implementation):
    """Returns f(q, k, v): attention, whose parameters and bias depend on the query."""
    score = SCORES[score_name]
    params = score.init(jax.random.key(3), 3, 3)

    def f(q, k, v):
        size = 1 + jnp.tanh(q[0, 0]) / 4
        arguments = {
            "score": score,
            "params": jax.tree.map(lambda leaf: leaf.astype(q.dtype) * size, params),
            "mask": table(),
            "return_statistics": option == "statistics",
        }
        if option == "dropout":
            arguments |= {"dropout_rate": 0.3, "dropout_rng": jax.random.key(5)}
        if option == "bias":
            stored = jnp.sin(q[:, :1] - k[None, :, 1])
            stored = jnp.pad(stored, ((0, LENGTH - len(q)), (0, LENGTH - len(k))))
            arguments["bias"] = aj.alibi_bias(size / 3) + stored
        tokens = [jnp.pad(x, ((0, LENGTH - len(x)), (0, 0))) for x in (q, k, v)]
        if implementation == "ring":
            mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
            attend = functools.partial(aj.ring_attention, mesh=mesh)
        else:
            attend = functools.partial(aj.attention, implementation=implementation)
        results = attend(*tokens, block_sizes=TILE, **arguments)
        if option != "statistics":
            return results[: len(q)]
        output, statistics = results
        entropy, has_keys = statistics.entropy, statistics.logsumexp > -jnp.inf
        logsumexp = jnp.where(has_keys, statistics.logsumexp, 0)
        return (output * jnp.cos(entropy)[:, None] + jnp.tanh(logsumexp)[:, None])[: len(q)]

    return f


# Compositions that no other contains, with scores that compile in little time.
FAST = [
    ("grad of grad", "general", "statistics", "tiled"),
    ("jvp of while_loop", "own", "bias", "tiled"),
    ("linearize", "softcap", "none", "ring"),
]


def sample():
    """Each composition with each option in tiles, with other scores, and with one in a ring."""
    for (c, name), (o, option) in itertools.product(enumerate(COMPOSITIONS), enumerate(OPTIONS)):
        score = list(SCORES)[(2 * o + c) % len(SCORES)]
        yield name, score, option, "tiled"
        if o == (c + 1) % len(OPTIONS) and not name.startswith("third"):
            yield name, score, option, "ring"


@pytest.mark.parametrize(
    ("name", "score_name", "option", "implementation"), slow_unless(FAST, [*FAST, *sample()])
)
def test_compositions(name, score_name, option, implementation):
    @quick_jit
    def run(q, k, v):
        return [
            COMPOSITIONS[name][0](function_of(score_name, option, each))(q, k, v)
            for each in (implementation, "reference")
        ]

    with jax.enable_x64(True):
        assert_close("", *jax.device_get(run(Q, K, V)), 1e-10, 1.0)
