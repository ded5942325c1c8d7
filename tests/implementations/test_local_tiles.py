"""Windows in tiles: the status of tiles, the number of tiles visited, and mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.centers import monotonic_centers
from attention_jax.functional.local import local_attention, window_mask
from attention_jax.implementations import Inputs, Options, tiling
from attention_jax.implementations.choice import chosen_block_sizes

T, S = 5, 7


@functools.partial(jax.jit, static_argnums=1)
def every_tile(centers, radius, t=3, s=4):
    """Of all tiles [t, s] at any place: claimed and true emptiness and fullness."""

    def of_tile(centers, first_query, first_key):
        where = first_query + jnp.arange(t), first_key + jnp.arange(s)
        mask = window_mask(centers, radius)
        allowed = jnp.broadcast_to(mask.allowed(*where), (t, s))
        return mask.tile_status(*where), (~allowed.any(), allowed.all())

    for axes in ((None, None, 0), (None, 0, None), (0, None, None)):
        of_tile = jax.vmap(of_tile, axes)
    return of_tile(centers, jnp.arange(T - t + 1), jnp.arange(S - s + 1))


@pytest.mark.parametrize("kind", ["float", "int", "monotonic"])
def test_the_status_of_tiles_is_correct(kind):
    rng = np.random.default_rng(0)
    first = rng.uniform(-6, S + 6, (80, 1))
    spread = np.array([0.3, 2.0, 9.0])[rng.integers(0, 3, (80, 1))]
    steps = np.arange(T) if kind == "monotonic" else spread * rng.normal(size=(80, T))
    centers = jnp.asarray(first + steps, jnp.float32)
    centers = centers if kind == "float" else centers.astype(jnp.int32)
    told = 0
    for radius in (0, 1, 3, 9):
        claims, truths = jax.tree.map(np.asarray, every_tile(centers, radius))
        for claimed, true in zip(claims, truths, strict=True):
            assert not np.any(claimed & ~true)
            assert 2 * claimed.sum() >= true.sum()
            told += claimed.sum()
            if kind == "monotonic":  # of centers side by side all there is to tell
                np.testing.assert_array_equal(claimed, true)
    assert told > 100
    # Of a row of NaN (a query of padding) nothing is known, and it sees nothing.
    unknown = window_mask(jnp.array([1.0, jnp.nan]), 2)
    assert not any(unknown.tile_status(jnp.arange(2), jnp.arange(2)))
    assert unknown.materialize(2, 4).sum() == 4


@pytest.mark.parametrize("length", [2048, 4096])
def test_tiles_visited_are_linear_in_the_length(length):
    score, tokens = aj.ScaledDot(), jnp.ones((length, 4))
    mask = window_mask(monotonic_centers(length), 64)
    inputs = Inputs(tokens, tokens, tokens, {}, mask, None, None)
    blocks = chosen_block_sizes(score, inputs)
    assert (blocks.query, blocks.key) == (128, 128)
    schedule = jax.jit(lambda inputs: tiling.prepare(Options(score, blocks), inputs)[2].schedule)(
        inputs
    )
    # A tile of 128 queries sees its own 128 keys and 64 to either side.
    tiles = length // 128
    assert schedule.visited.sum() == 3 * tiles - 2
    assert not schedule.full.any()


PAIRED: list = []


class CountedDot(aj.Dot):
    """It writes down every tile that it is asked for."""

    pair_vjp = aj.Score.pair_vjp
    round_query = aj.Dot.round_query
    round_key = aj.Dot.round_key
    finite_slopes = aj.Dot.finite_slopes

    def pair(self, params, q_features, k_features):
        jax.debug.callback(lambda: PAIRED.append(q_features.shape[0] * k_features.shape[0]))
        return super().pair(params, q_features, k_features)


@pytest.mark.parametrize("implementation", ["tiled"])
def test_only_pairs_in_windows_are_computed_once(implementation):
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4)), jnp.float32)

    def pairs_computed(sigma):
        for _ in range(2):  # in the first call the score is also checked on tokens of its own
            PAIRED.clear()
            jax.block_until_ready(
                local_attention(
                    tokens, tokens, tokens, centers=monotonic_centers(64), radius=4, sigma=sigma,
                    score=CountedDot(), implementation=implementation,
                    block_sizes=aj.BlockSizes(8, 8),
                )
            )  # fmt: skip
            jax.effects_barrier()
        return sum(PAIRED)

    pairs_computed(None)  # a score that was not seen before is checked on pairs of its own
    assert pairs_computed(None) == (3 * 8 - 2) * 64
    assert pairs_computed(2.0) == (3 * 8 - 2) * 64


# --- mistakes ---
