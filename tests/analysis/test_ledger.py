"""What attention costs, against counts by hand and known programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attention_jax import BlockSizes, Score, get_score
from attention_jax.analysis.ledger import (
    Operations,
    ScoreCost,
    attention_memory,
    program_memory,
    score_cost,
)

DQ, DK = 3, 11


# By hand: a product of [1, m] and [m, n] is 2 m n; (query, key, pair), flops and transcendentals.
COSTS = {
    "dot": (7, 7, (0, 0), (0, 0), (14, 0)),
    "scaled": (7, 7, (7, 0), (0, 0), (14, 0)),
    "general": (DQ, DK, (2 * DQ * DK, 0), (0, 0), (2 * DK, 0)),
    # A additions and A tanh, and a product with v.
    "additive": (DQ, DK, (2 * DQ * DK, 0), (2 * DK * DK, 0), (3 * DK, DK)),
    # Divided and multiplied by the cap, and a tanh.
    "softcap": (7, 7, (7, 0), (0, 0), (14 + 2, 1)),
}


@pytest.mark.parametrize("name", COSTS)
def test_operations_counted_by_hand(name):
    query_dim, key_dim, *expected = COSTS[name]
    with jax.enable_x64(True):  # its shapes, in float64, are not those of a later call
        get_score(name).param_shapes({}, query_dim, key_dim)
    cost = score_cost(name, query_dim, key_dim)
    assert [tuple(side) for side in (cost.query, cost.key, cost.pair)] == expected
    parameters = {"general": DQ * DK, "additive": DQ * DK + DK * DK + DK}
    assert cost.parameters == parameters.get(name, 0)


@dataclasses.dataclass(frozen=True)
class Lengthy(Score):
    """Has a cost that no token pays: it is left out of the cost of a pair."""

    def init(self, rng, query_dim, key_dim):
        return {"table": jnp.ones((13, 13))}

    def pair(self, params, q_features, k_features):
        return (q_features @ k_features.T) * jnp.sum(params["table"] @ params["table"])


def test_a_users_own_score():
    cost = score_cost(Lengthy(), 7, 7)
    assert cost.parameters == 169
    assert cost.pair == Operations(14 + 1, 0)


def test_flops_per_query_share_the_keys():
    cost = ScoreCost(0, Operations(2, 0), Operations(30, 0), Operations(5, 1))
    assert cost.flops_per_query(7) == 2 + 7 * (30 + 5)
    assert cost.flops_per_query(7, target_length=3) == 2 + 7 * (10 + 5)


def test_memory_of_a_program():
    """Two products with a [512, 512] matrix between them, which has to be somewhere."""
    tall = jax.ShapeDtypeStruct((512, 3), jnp.float32)

    def through_the_square(x):
        return jnp.sin(x @ x.T) @ x

    options = (
        {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.default_backend() == "cpu" else None
    )
    memory = program_memory(through_the_square, tall, compiler_options=options)
    assert memory.arguments == memory.results == 4 * 512 * 3
    assert 4 * 512**2 <= memory.temporary < 4 * 4 * 512**2


def test_memory_of_attention_in_tiles_and_materialised():
    table = 4 * 512**2

    def held(implementation, backward):
        return attention_memory(
            "general",
            512,
            7,
            implementation=implementation,
            backward=backward,
            block_sizes=BlockSizes(64, 64),
        )

    forward, both = held("reference", False), held("reference", True)
    assert forward.temporary >= table
    assert both.temporary >= 2 * table  # weights, and their gradient
    tiled = held("tiled", True)
    assert tiled.temporary < table / 2
    # Query, key, value, kernel [7, 7] and the cotangent; the output and four gradients.
    token, kernel = 4 * 512 * 7, 4 * 7 * 7
    assert both.arguments == tiled.arguments == 4 * token + kernel
    assert forward.arguments == 3 * token + kernel
    assert 4 * token + kernel <= tiled.results < 4 * token + kernel + 256  # and a tuple of pointers
