"""The algebra of a softmax row: its sums over keys, its statistics, and sinks.

Let M be the largest of the logits x_j so far (the *online softmax*). The sums are

    total = sum_j exp(x_j - M),    weighted = sum_j exp(x_j - M) v_j,
    moment = sum_j exp(x_j - M) (x_j - M).

When M rises by r, the first two shrink by exp(-r), and moment becomes exp(-r) (moment - r total).
The results do not depend on M, so it needs no gradient. With n the total at the end, a row has

    output = weighted / n,    logsumexp = M + log n,    entropy = log n - moment / n.

A sink is one more key, with the logit z and the value 0. The other keys then have the share

    p = sigmoid(M - z + log n)

of the weight, so that weights and output are those without the sink times p, and

    entropy with the sink = p entropy - p log p - (1 - p) log (1 - p).

So no loop over keys knows of sinks.

Source: Milakov and Gimelshein 2018, algorithm 3; Rabe and Staats 2021, section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.serialization import exported

Array = jax.Array


class RowShift(NamedTuple):
    """The numbers that are subtracted from the logits of each row, one after the other.

    Those of softmax are M alone; another normaliser may have a threshold, see `threshold.py`.
    """

    reference: Array  # [t] near the largest logit; of softmax that logit, M
    threshold: Array | None = None  # [t] None for 0

    def shifted(self, logits: Array) -> Array:
        """The logits [t, s] after the shift."""
        shifted = logits - self.reference[:, None]
        return shifted if self.threshold is None else shifted - self.threshold[:, None]


# --- rows whose keys arrive in tiles ---

LOWEST = float(jnp.finfo(jnp.float32).min)  # of kernels


class SoftmaxSums(NamedTuple):
    """The sums of a softmax over the keys so far, of each row: arrays, or a kernel's references."""

    largest: Any  # [T] M; the lowest float without keys: -inf minus -inf would be NaN
    total: Any  # [T]; 0 without keys
    moment: Any  # [T]; None where no entropy is requested

    def with_tile(
        self,
        logits: Array,
        largest: Array,
        spread: Callable[[Array], Array] = lambda rows: rows[:, None],
        sum_of_rows: Callable[[Array], Array] = lambda tile: jnp.sum(tile, axis=1),
    ) -> tuple[SoftmaxSums, Array, Array]:
        """(the sums with a tile of keys, its exp(x - M), the factor of what was summed before).

        Args:
            logits: [t, s]; -inf where masked.
            largest: rows of the largest logits of this tile, in the form of the sums' rows.
            spread: rows -> tile; a kernel has rows of another form.
            sum_of_rows: tile -> rows.
        """
        largest = jnp.maximum(self.largest, largest)
        rise = self.largest - largest
        shrink = jnp.exp(rise)
        shifted = logits - spread(largest)
        exponentials = jnp.exp(shifted)
        moment = self.moment
        if moment is not None:
            moment = shrink * (moment + where_positive(shrink, rise) * self.total)
            moment = moment + sum_of_rows(exponentials * where_positive(exponentials, shifted))
        total = shrink * self.total + sum_of_rows(exponentials)
        return SoftmaxSums(largest, total, moment), exponentials, shrink

    def summary(self) -> RowSummary:
        """The summary of the rows, whose `largest` may hold anything in a row without keys."""
        any_allowed = self.total != 0  # `> 0` would hide a NaN
        total = jnp.where(any_allowed, self.total, 1)
        log_sum, entropy = jnp.log(total), None
        if self.moment is not None:
            entropy = jnp.where(any_allowed, log_sum - self.moment / total, 0)
        return RowSummary(jnp.where(any_allowed, self.largest, -jnp.inf), log_sum, entropy)


def where_positive(exponentials: Array, shifted: Array) -> Array:
    """The shifted logits; 0 where the exponential is 0, since 0 * -inf would be NaN."""
    return jnp.where(exponentials > 0, shifted, 0.0)


# --- the results of a row ---


@exported
class AttentionStatistics(NamedTuple):
    """Statistics of each row of attention, that is of each query."""

    logsumexp: Array  # [*B, T]  log sum_j exp(logits_j) over allowed keys; -inf without keys
    entropy: Array  # [*B, T]  -sum_j w_j log w_j in nats, before dropout; 0 without keys
    max_logit: Array  # [*B, T]  largest allowed logit, without gradient; -inf without keys


class RowSummary(NamedTuple):
    """The numbers of each row of a softmax, from which statistics and sinks follow.

    All are differentiable except `largest`. M and log n stay apart, because their sum would be
    rounded: at logits of 1e4, to 1e-3 in float32.
    """

    largest: Any  # [t] M; -inf without keys. None in what a gradient saves, which is finite
    log_sum: Array  # [t] log n; 0 without keys
    entropy: Any  # [t] in nats; 0 without keys; None where it is not requested

    def statistics(self) -> AttentionStatistics:
        return AttentionStatistics(self.largest + self.log_sum, self.entropy, self.largest)

    def with_sink(self, sink: Array) -> tuple[Array, RowSummary]:
        """p [t], 0 without keys, and the summary of the rows with a sink of the logit [] `sink`."""
        empty = self.largest == -jnp.inf
        keys = jnp.where(empty, 0, self.largest)
        above = keys - sink + self.log_sum
        share = jnp.where(empty, 0, jax.nn.sigmoid(above))
        largest = jnp.maximum(keys, jax.lax.stop_gradient(sink))
        log_sum = jnp.logaddexp(keys - largest + self.log_sum, sink - largest)
        entropy = self.entropy
        if entropy is not None:
            above = jnp.clip(above, -1e3, 1e3)  # 0 times infinity would be NaN
            p, rest = jax.nn.sigmoid(above), jax.nn.sigmoid(-above)
            entropy = p * (entropy + jax.nn.softplus(-above)) + rest * jax.nn.softplus(above)
            entropy = jnp.where(empty, 0, entropy)
        largest = jnp.where(empty, -jnp.inf, largest)
        return share, RowSummary(largest, jnp.where(empty, 0, log_sum), entropy)


# --- rows that are materialised ---


def summary_of_rows(logits: Array) -> RowSummary:
    """The summary [..., T] of rows of logits [..., T, S], float32 or wider, -inf where masked."""
    largest, exponentials, total = _shifted_exponentials(logits, -1)
    moment = jnp.sum(exponentials * where_positive(exponentials, logits - largest), axis=-1)
    return SoftmaxSums(largest[..., 0], total[..., 0], moment).summary()


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax_of_rows(logits: Array, axis: int) -> Array:
    """The softmax along one axis of logits that are -inf where masked; 0 where all are."""
    _, exponentials, total = _shifted_exponentials(logits, axis)
    return exponentials / jnp.where(total == 0, 1, total)


# The Jacobian of one row is dw_j / dl_k = w_j (delta_jk - w_k), so a tangent dl becomes
#     dw_j = w_j (dl_j - sum_k w_k dl_k).
# The Jacobian is symmetric, so the same formula is the vector-Jacobian product. It is a function of
# w, so JAX can differentiate it again. It is 0 for a row without allowed keys (all w are 0), and it
# does not read the dl of masked entries.
@softmax_of_rows.defjvp
def _softmax_jvp(axis, primals, tangents):
    weights, (dlogits,) = softmax_of_rows(*primals, axis), tangents
    dlogits = jnp.where(weights > 0, dlogits, 0)
    # A product: the compiler of jaxlib 0.10.2 returns a wrong sum(weights * dlogits) for a batch of
    # tangents of the gradient, which is what `jax.hessian` computes.
    mean = jnp.vecdot(weights, dlogits, axis=axis, precision=jax.lax.Precision.HIGHEST)
    return weights, weights * (dlogits - jnp.expand_dims(mean, axis))


def _shifted_exponentials(logits: Array, axis: int) -> tuple[Array, Array, Array]:
    """The largest logit M (0 without keys), exp(logits - M), and the sum of those."""
    largest = jnp.max(logits, axis=axis, keepdims=True, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    exponentials = jnp.exp(logits - largest)
    return largest, exponentials, jnp.sum(exponentials, axis=axis, keepdims=True)
