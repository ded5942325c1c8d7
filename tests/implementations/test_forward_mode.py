"""Forward mode of the tiles, and higher derivatives, are those of the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import TILE, quick_jit
from derivative_cases import DROPOUT, agree, loss_of, normal, numbers_of, point_of

import attention_jax as aj

IMPLEMENTATIONS = ("tiled", "reference")


@pytest.mark.parametrize("over", ["reverse", pytest.param("both", marks=pytest.mark.slow)])
def test_forward_mode_and_second_derivatives_are_those_of_the_reference(over):
    """Forward over reverse mode; and reverse over both of them. All are 0 if no key is real."""
    score = "own"
    point = point_of(score)
    with jax.enable_x64(True):
        some, none = (aj.causal_mask(-1) & aj.padding_mask(jnp.array(n)) for n in (6, 0))
        direction = jax.tree.map(lambda leaf: normal(*leaf.shape), point)

        def along(gradient):
            pairs = zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
            return sum(jnp.vdot(a, b) for a, b in pairs)

        def derivatives(implementation):
            loss = loss_of(score, implementation, **DROPOUT)

            def pushed(point, mask):
                return jax.jvp(lambda p: loss(p, mask), (point,), (direction,))[1]

            def product(point, mask):
                return jax.jvp(lambda p: jax.grad(loss)(p, mask), (point,), (direction,))

            def again(point, mask):
                return jax.grad(pushed)(point, mask)

            def twice(point, mask):
                return jax.grad(lambda p: along(jax.grad(loss)(p, mask)))(point)

            functions = (pushed, product) if over == "reverse" else (again, twice)
            return quick_jit(lambda *x: [f(*x) for f in functions])

        in_tiles, reference = map(derivatives, IMPLEMENTATIONS)
        got, expected = in_tiles(point, some), reference(point, some)
        without_keys = in_tiles(point, none)  # no tile is visited
    agree(got, expected)
    assert not any(map(np.any, jax.tree.leaves(without_keys)))
    if over == "both":
        agree(*got)


@pytest.mark.slow
def test_forward_mode_of_a_batch_of_different_lengths():
    with jax.enable_x64(True):
        shapes = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2), (3, 1, 7)
        arrays, tangents = ([jnp.asarray(normal(*shape)) for shape in shapes] for _ in range(2))
        lengths = jnp.array([[6], [0]])

        def derivatives(implementation):
            def run(query, key, value, bias):
                return numbers_of(
                    aj.attention(
                        query, key, value, bias=bias, mask=aj.padding_mask(lengths), **DROPOUT,
                        implementation=implementation, block_sizes=TILE, return_statistics=True,
                    )
                )  # fmt: skip

            def both(arrays, tangents):
                bias = jax.jacfwd(lambda bias: run(*arrays[:3], bias))(arrays[3])
                return jax.jvp(run, arrays, tangents), bias

            return quick_jit(both)(arrays, tangents)

        got, expected = map(derivatives, IMPLEMENTATIONS)
    agree(got, expected)


def test_a_row_without_keys_has_no_tangent_whatever_other_rows_see():
    query, key, value = (jnp.asarray(normal(*shape)) for shape in ((3, 2), (4, 2), (4, 2)))
    value = value.at[1].set(jnp.nan)  # which the second query sees
    mask = jnp.array([[False] * 4, [True] * 4, [True] * 4])

    for implementation in IMPLEMENTATIONS:

        def attend(query, value, implementation=implementation):
            return aj.attention(
                query,
                key,
                value,
                mask=mask,
                implementation=implementation,
                return_statistics=True,
            )

        tangents = (jnp.ones_like(query), jnp.ones_like(value))
        _, (output, statistics) = jax.jvp(attend, (query, value), tangents)
        assert not np.any(output[0])
        assert statistics.logsumexp[0] == statistics.entropy[0] == 0
