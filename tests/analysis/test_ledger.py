"""What attention costs, against counts by hand and known programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attention_jax import BlockSizes, Score, attention, causal_mask, get_score
from attention_jax.analysis import ledger

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
    cost = ledger.score_cost(name, query_dim, key_dim)
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
    cost = ledger.score_cost(Lengthy(), 7, 7)
    assert cost.parameters == 169
    assert cost.pair == ledger.Operations(14 + 1, 0)


def test_flops_per_query_share_the_keys():
    cost = ledger.ScoreCost(
        0, ledger.Operations(2, 0), ledger.Operations(30, 0), ledger.Operations(5, 1)
    )
    assert cost.flops_per_query(7) == 2 + 7 * (30 + 5)
    assert cost.flops_per_query(7, target_length=3) == 2 + 7 * (10 + 5)


def powers(x, count):
    return jax.lax.scan(lambda power, _: (power @ x, None), x, length=count)[0]


def of_one_column(x):
    return jax.lax.map(lambda row: jax.lax.scan(lambda y, z: (y + z, None), row[0], row)[0], x)


# x: [8, 8], of which a product has 1,024 operations.
LOOPS = {
    "loop": (lambda x: powers(x, 10), 10 * 1024),
    "loop in loop": (of_one_column, 8 * 8),
    "twice": (lambda x: powers(powers(x, 2), 3), 5 * 1024),
    "unused": (lambda x: (powers(x, 10), x + 1)[1], 64),
    "vmap": (jax.vmap(lambda x: jax.lax.scan(lambda y, z: (y + z, None), 0.0, x)[0]), 64),
    "branch": (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: powers(x, 10), jnp.tanh, x),
        10 * 1024 + 2,  # a comparison, as an index
    ),
    # 10 products forwards, again for the gradient, and two each backwards; sums.
    "checkpoint": (
        lambda x: jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: powers(x, 10))(x)))(x),
        30 * 1024 + 11 * 64,
    ),
    "root": (
        lambda x: jax.lax.custom_root(
            lambda y: y - x, x, lambda _, y: powers(y, 3), lambda _, y: y
        ),
        3 * 1024,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_body_of_a_loop_counts_once_per_iteration(name):
    function, flops = LOOPS[name]
    assert (
        ledger.operation_count(function, jax.ShapeDtypeStruct((8, 8), jnp.float32)).flops == flops
    )


def test_attention_in_tiles_has_the_operations_of_the_reference():
    tokens = jax.ShapeDtypeStruct((1024, 16), jnp.float32)

    def count(implementation, tangent):
        def attend(query):
            blocks = BlockSizes(256, 128)
            return attention(query, query, query, implementation=implementation, block_sizes=blocks)

        if tangent:  # of a linear map, too
            return ledger.operation_count(lambda x: jax.jvp(attend, (x,), (x,)), tokens)
        return ledger.operation_count(attend, tokens)

    for tangent in (False, True):
        (flops, exps), (tiled_flops, tiled_exps) = (
            count(each, tangent) for each in ("reference", "tiled")
        )
        assert flops > 2 * 2 * 1024**2 * 16
        assert 0.95 * flops < tiled_flops < 1.5 * flops
        assert exps <= tiled_exps < 2.1 * exps


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y @ x, x),
        lambda x: attention(
            x, x, x, mask=causal_mask(), implementation="tiled", block_sizes=BlockSizes(4, 4)
        ),
    ],
)
def test_a_loop_of_unknown_length_is_refused(function):
    with pytest.raises(NotImplementedError, match="function"):
        ledger.operation_count(function, jax.ShapeDtypeStruct((8, 8), jnp.float32))


def test_memory_of_a_program():
    """Two products with a [512, 512] matrix between them, which has to be somewhere."""
    tall, is_cpu = jax.ShapeDtypeStruct((512, 3), jnp.float32), jax.default_backend() == "cpu"
    options = {"xla_cpu_experimental_ynn_fusion_type": ""} if is_cpu else None
    memory = ledger.program_memory(lambda x: jnp.sin(x @ x.T) @ x, tall, compiler_options=options)
    assert memory.arguments == memory.results == 4 * 512 * 3
    assert 4 * 512**2 <= memory.temporary < 4 * 4 * 512**2


def test_memory_of_attention_with_its_gradients():
    """The example of `attention_memory` has the forward pass."""
    table, token, kernel = 4 * 512**2, 4 * 512 * 7, 4 * 7 * 7
    sizes = ("general", 512, 7)
    options = {"backward": True, "block_sizes": BlockSizes(64, 64)}
    both, tiled = (
        ledger.attention_memory(*sizes, implementation=name, **options)
        for name in ("reference", "tiled")
    )
    assert both.temporary >= 2 * table  # weights, and their gradient
    assert tiled.temporary < table / 2
    # Query, key, value, kernel [7, 7] and the cotangent; the output and four gradients.
    assert both.arguments == tiled.arguments == 4 * token + kernel
    assert ledger.attention_memory(*sizes).arguments == 3 * token + kernel
    assert 4 * token + kernel <= tiled.results < 4 * token + kernel + 256  # and a tuple of pointers
