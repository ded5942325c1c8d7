"""The size of logits against least squares in float64 NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attention_jax import Multiplied, analysis, attention, get_score

B, N, T, S = 2, 3, 11, 13
RNG = np.random.default_rng(0)
QUERIES, KEYS = np.arange(T)[:, None], np.arange(S)
CAUSAL = QUERIES >= KEYS  # the first query has one key, and the last two keys have no query
MASKS = {
    "none": None,
    "causal": CAUSAL,
    "window": abs(QUERIES - KEYS) <= 1,
    "documents": (QUERIES // 4 == KEYS // 4) & CAUSAL,
    "random": RNG.random((B, N, T, S)) < 0.25,
    "empty": np.zeros((T, S), bool),
}
OF_QUERY, OF_KEY, OF_PAIR = (RNG.normal(size=(B, N, *shape)) for shape in ((T, 1), (1, S), (T, S)))
LOGITS = np.float32(4 * OF_QUERY + OF_KEY + 0.6 * OF_PAIR)
COUNTED = RNG.random((B, 1, T)) < 0.7
logit_size = quick_jit(analysis.logit_size, static_argnames="axis")


def sums_of(logits, allowed):
    """Squares within rows and beside both factors, degrees of freedom, pairs: of one example."""
    allowed = allowed & (allowed.sum(1, keepdims=True) > 1)
    at, pairs = np.nonzero(allowed), np.float64(logits[allowed])
    rows, keys = (np.eye(size)[index] for size, index in zip((T, S), at, strict=True))
    sums = [len(pairs)]
    for factors in (rows, np.hstack([rows, keys])):
        fit, _, rank, _ = np.linalg.lstsq(factors, pairs, rcond=None)
        sums += [np.sum((pairs - factors @ fit) ** 2), len(pairs) - rank]
    return np.array(sums)


def size_of(logits, allowed, axis):
    sums = [
        [sums_of(*pair) for pair in zip(*each, strict=True)]
        for each in zip(logits, allowed, strict=True)
    ]
    sums = np.moveaxis(np.array(sums).sum(axis), -1, 0)
    pairs, within, free, of_pairs, free_of_pairs = sums
    with np.errstate(invalid="ignore"):
        share = np.where(free_of_pairs > 0, of_pairs / free_of_pairs / (within / free), 0)
        return np.sqrt(np.where(pairs > 0, within / pairs, 0)), share


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_sizes_in_numpy(mask):
    full = np.broadcast_to(True if mask is None else mask, LOGITS.shape)
    counted = full & COUNTED[..., None]
    for axis in (0, (), (0, 1)):
        expected = size_of(LOGITS, full, axis)
        got = logit_size(np.where(full, LOGITS, np.float32(np.nan)), mask, axis=axis)
        chex.assert_trees_all_close(tuple(got), expected, rtol=2e-5, atol=1e-6)
    # Minus infinity is a mask, and a query that does not count may hold anything.
    masked = np.where(full, np.where(COUNTED[..., None], LOGITS, np.nan), -np.inf)
    got = logit_size(masked.astype(np.float32), rows=COUNTED, axis=0)
    chex.assert_trees_all_close(tuple(got), size_of(LOGITS, counted, 0), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mask", ["none", "causal", "window", "documents"])
def test_the_share_is_0_for_keys_alone_and_1_for_pairs_in_expectation(mask):
    size = functools.partial(logit_size, mask=MASKS[mask], axis=(0, 1))
    assert size(np.float32(4 * OF_QUERY + OF_KEY)).query_share < 1e-10
    many = RNG.normal(size=(40, 40, T, S)).astype(np.float32)
    np.testing.assert_allclose(size(many).query_share, 1, atol=0.02)
    mixed = many + 2 * RNG.normal(size=(40, 40, 1, S)).astype(np.float32)
    np.testing.assert_allclose(size(mixed).query_share, 0.2, atol=0.02)


def test_two_derivatives_along_a_direction():
    """Against central differences; entries that do not count send no gradient."""
    allowed = MASKS["random"] & COUNTED[..., None]

    def sizes(logits):
        return tuple(analysis.logit_size(logits, MASKS["random"], rows=COUNTED, axis=0))

    @quick_jit
    def both_orders(logits):
        slope = lambda x: jax.jvp(sizes, (x,), (OF_PAIR,))  # noqa: E731
        return jax.jvp(slope, (logits,), (OF_PAIR,))

    with jax.enable_x64(True):
        logits, step = np.where(allowed, np.float64(LOGITS), np.nan), 1e-4
        _, got = both_orders(logits)
        after, before = (both_orders(logits + sign * step * OF_PAIR)[0] for sign in (1, -1))
    after, before = jax.device_get((after, before))
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), after, before)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)
    gradient = quick_jit(jax.grad(lambda x: sum(map(jnp.sum, sizes(x)))))(np.float32(logits))
    np.testing.assert_array_equal(np.asarray(gradient)[~allowed], 0)
    chex.assert_tree_all_finite(gradient)


def test_a_factor_gives_the_logits_of_a_model_the_wanted_deviation():
    tokens = RNG.normal(size=(2, B, 7, 4)).astype(np.float32)

    def two_calls(score):
        return sum(attention(x, x, x, score=score, mask=np.tri(7, dtype=bool)) for x in tokens)

    def sizes(score):
        attentions = analysis.capture(two_calls, score).attentions.items()
        return {name: logit_size(each.logits, rows=COUNTED[0, :, :7]) for name, each in attentions}

    factor = float(analysis.logit_factor(sizes("l2"), 0.25))
    after = [size.deviation for size in sizes(Multiplied(get_score("l2"), factor)).values()]
    assert np.shape(after) == (2, B)
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(after))), 0.25, rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("cut", [P("data"), P(None, "data")], ids=str)
def test_logits_on_a_mesh(kind, cut):
    """Explicit axes, and `shard_map` over Auto axes: numbers and gradients as without a mesh."""

    def share(logits):
        return analysis.logit_size(logits, CAUSAL).query_share

    def both(share):
        return quick_jit(lambda x: (share(x), jax.grad(lambda x: share(x).sum())(x)))

    mesh = jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])
    local = jax.shard_map(share, mesh=mesh, in_specs=cut, out_specs=cut)
    logits = jax.device_put(LOGITS[:, :2], NamedSharding(mesh, cut))
    got = both(share if kind == AxisType.Explicit else local)(logits)
    chex.assert_trees_all_close(got, both(share)(LOGITS[:, :2]), rtol=1e-5, atol=1e-6)
