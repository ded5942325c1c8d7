"""The online softmax equals the softmax of the whole row, also at extreme logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit

from attention_jax.normalizers import RowSums, Softmax
from attention_jax.normalizers.contract import family_of

ROWS, KEYS, DV = 5, 11, 3
SOFTMAX = Softmax()
RNG = np.random.default_rng(6)
LOGITS, VALUES = RNG.normal(size=(ROWS, KEYS)) * 5, RNG.normal(size=(KEYS, DV))
KEEP = RNG.random((ROWS, KEYS)) < 0.6


def in_pieces(logits, values, cuts, keep=None, rate=0.0, statistics=True):
    state = RowSums.empty(SOFTMAX, ROWS, DV, logits.dtype, entropy=statistics)
    pieces = zip([0, *cuts], [*cuts, KEYS], strict=True)
    for first, last in pieces:
        kept = None if keep is None else keep[:, first:last]

        def factors_of_values(weights, kept=kept):
            return weights if kept is None else jnp.where(kept, weights / (1 - rate), 0)

        tile = logits[:, first:last], values[first:last]
        state = state.update(family_of(SOFTMAX, {}), *tile, factors_of_values)
    rows = state.finalize(SOFTMAX)
    return rows.output, rows.summary.statistics() if statistics else rows.summary


def in_numpy(logits, keep=None, rate=0.0):
    """In longdouble, row by row, over what is finite."""
    output, logsumexp, entropy = [], [], []
    for i, row in enumerate(np.asarray(logits, np.longdouble)):
        if not np.isfinite(row).any():
            output.append(np.zeros(DV)), logsumexp.append(-np.inf), entropy.append(0)
            continue
        weights = np.exp(row - row.max())
        logsumexp.append(np.log(weights.sum()) + row.max())
        weights = weights / weights.sum()
        entropy.append(-sum(w * np.log(w) for w in weights if w > 0))
        output.append((weights if keep is None else weights * keep[i] / (1 - rate)) @ VALUES)
    return tuple(np.array(x, np.float64) for x in (output, logsumexp, entropy))


@pytest.mark.parametrize("cuts", [(), (1,), (4, 5, 10)])
def test_any_cut_gives_the_softmax_of_the_row(cuts):
    with jax.enable_x64(True):
        got, statistics = in_pieces(jnp.asarray(LOGITS), jnp.asarray(VALUES), cuts, KEEP, 0.3)
        without, nothing = in_pieces(
            jnp.asarray(LOGITS), jnp.asarray(VALUES), cuts, statistics=False
        )
    output, logsumexp, entropy = in_numpy(LOGITS, KEEP, 0.3)
    np.testing.assert_allclose(got, output, atol=1e-14)
    np.testing.assert_allclose(without, in_numpy(LOGITS)[0], atol=1e-14)
    assert nothing.entropy is None
    np.testing.assert_allclose(statistics.logsumexp, logsumexp, rtol=1e-14)
    np.testing.assert_allclose(statistics.entropy, entropy, rtol=1e-13)
    np.testing.assert_array_equal(statistics.max_logit, LOGITS.max(1))


def test_rows_without_keys_and_logits_at_the_ends_of_the_floats():
    lowest = np.finfo(np.float32).min
    logits = np.float32(LOGITS)
    logits[0] = -np.inf  # no key at all
    logits[1, :4] = -np.inf  # none in the first piece,
    logits[2, 4:] = -np.inf  # or only there
    logits[3, :4] = lowest  # what many take for minus infinity: times four it overflows
    logits[3, 4] = -lowest / 2  # ... and so does the rise to here
    logits[4, [0, 7]] = 1e4, 1e4 - 1
    got, statistics = in_pieces(jnp.asarray(logits), jnp.asarray(VALUES, jnp.float32), (4, 5, 10))
    output, logsumexp, entropy = in_numpy(logits)
    np.testing.assert_allclose(got, output, atol=2e-6)
    np.testing.assert_allclose(statistics.logsumexp, logsumexp, rtol=1e-6)
    np.testing.assert_allclose(statistics.entropy, entropy, atol=2e-6)
    np.testing.assert_array_equal(statistics.max_logit, logits.max(1))
    assert np.isneginf(statistics.logsumexp[0])
    assert not got[0].any()


def test_derivatives_in_both_modes_are_finite_and_those_of_the_whole():
    def numbers(logits, cuts):
        output, statistics = in_pieces(logits, jnp.asarray(VALUES), cuts, KEEP, 0.3)
        finite = jnp.where(jnp.isfinite(statistics.logsumexp), statistics.logsumexp, 0)
        return (output**2).sum() + (statistics.entropy * finite).sum()

    with jax.enable_x64(True):
        logits = jnp.asarray(LOGITS).at[0].set(-jnp.inf).at[1, :4].set(-jnp.inf)
        logits = logits.at[2, :4].set(jnp.finfo(jnp.float64).min)
        gradient = quick_jit(jax.grad(numbers), static_argnums=1)
        once = gradient(logits, (4, 5, 10))
        np.testing.assert_allclose(once, gradient(logits, ()), atol=1e-13)
        assert np.isfinite(once).all()
        assert not once[0].any()
        assert np.all(once[3:] != 0)
        step = 1e-6  # against differences, where all is finite
        for i, j in ((3, 2), (4, 7)):
            plus, minus = (numbers(logits.at[i, j].add(d), (4, 5)) for d in (step, -step))
            np.testing.assert_allclose(once[i, j], (plus - minus) / (2 * step), atol=1e-8)
            assert abs(once[i, j]) > 1e-5

        def of_some(rows):  # with -inf and the lowest float among them
            return numbers(logits.at[:3, 3:6].set(rows), (4,))

        assert np.isfinite(quick_jit(jax.hessian(of_some))(logits[:3, 3:6])).all()


def test_the_largest_logit_has_no_gradient():
    def largest(logits):
        _, statistics = in_pieces(logits, jnp.asarray(VALUES, jnp.float32), (4,))
        return statistics.max_logit.sum()

    assert not jax.grad(largest)(jnp.asarray(LOGITS, jnp.float32)).any()


def test_a_nan_is_not_hidden():
    logits = jnp.asarray(LOGITS, jnp.float32).at[1, 6].set(jnp.nan)
    output, statistics = in_pieces(logits, jnp.asarray(VALUES, jnp.float32), (4,))
    for array in (output[:, 0], *statistics):
        np.testing.assert_array_equal(np.isnan(array), np.arange(ROWS) == 1)
