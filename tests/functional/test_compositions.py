"""Derivatives as users compose them, of every score in tiles, against formulas in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import MADE_OF_OTHERS, assert_close, named, quick_jit
from derivative_compositions import COMPOSITIONS, K, Q, V

import attention_jax as aj

D = Q.shape[-1]
TILE = aj.BlockSizes(query=2, key=3)


def outer(combine, query, key):
    return combine(query[:, None, :], key[None, :, :])


def additive(params, query, key):
    hidden = outer(jnp.add, query @ params["query_kernel"], key @ params["key_kernel"])
    return jnp.tanh(hidden) @ params["v"]


def concat(params, query, key):
    shape = (query.shape[0], key.shape[0], D)
    both = [jnp.broadcast_to(x, shape) for x in (query[:, None, :], key[None, :, :])]
    return jnp.tanh(jnp.concatenate(both, axis=-1) @ params["kernel"]) @ params["v"]


def cosine(params, query, key):
    sizes = outer(jnp.multiply, *(jnp.sum(x**2, -1, keepdims=True) for x in (query, key)))
    return jnp.exp(params["log_scale"]) * (query @ key.T) / jnp.sqrt(sizes[..., 0])


def distance(params, query, key):
    return -jnp.sum(outer(jnp.subtract, query, key) ** 2, axis=-1) / (8 * D) ** 0.5


LOGITS = {
    "additive": additive,
    "concat": concat,
    "cosine": cosine,
    "distance": distance,
    "dot": lambda params, query, key: query @ key.T,
    "general": lambda params, query, key: query @ params["kernel"] @ key.T,
    "scaled": lambda params, query, key: query @ key.T / D**0.5,
    "softcap": lambda params, query, key: 50 * jnp.tanh(query @ key.T / D**0.5 / 50),
}


def functions_of(score_name, implementation):
    """The library and the formula, as functions of (query, key, value) that reach all parameters.

    The parameters depend on the keys, so that each derivative is one of the parameters too.
    """
    params = aj.SCORES[score_name].init(jax.random.key(2), D, D)

    def scaled_params(key):
        factor = 1 + jnp.sum(key) / 99
        return jax.tree.map(lambda leaf: factor * leaf.astype(key.dtype), params)

    def library(query, key, value):
        return aj.attention(
            query, key, value, score=score_name, params=scaled_params(key),
            implementation=implementation, block_sizes=TILE,
        )  # fmt: skip

    def plain(query, key, value):
        logits = LOGITS[score_name](scaled_params(key), query, key)
        exponentials = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
        return exponentials / exponentials.sum(-1, keepdims=True) @ value

    return library, plain


# A composition of a tile loop compiles for one or two seconds: each meets one score in a fast test.
EVERY_NTH = {"tiled": len(aj.SCORES), "reference": 4}
FAST = [("tiled", name) for name in aj.SCORES if name not in MADE_OF_OTHERS]


@pytest.mark.parametrize(
    ("score_name", "implementation", "start"),
    [
        pytest.param(name, which, start, marks=[] if (which, name) in FAST else pytest.mark.slow)
        for which in EVERY_NTH
        for start, name in enumerate(aj.SCORES)
    ],
)
def test_compositions(score_name, implementation, start):
    step = EVERY_NTH[implementation]
    names = tuple(COMPOSITIONS)[start % step :: step]

    @quick_jit
    def run(query, key, value):
        return [
            {name: COMPOSITIONS[name][0](f)(query, key, value) for name in names}
            for f in functions_of(score_name, implementation)
        ]

    with jax.enable_x64(True):
        got, expected = run(Q, K, V)
    for name, arrays in got.items():
        arrays, others = named(arrays), named(expected[name])
        assert arrays.keys() == others.keys(), name
        for path, array in arrays.items():
            assert np.all(np.isfinite(array)), name
            assert_close(f"{name} {path}", array, others[path], 1e-10)
