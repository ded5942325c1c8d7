"""The summary of a row of softmax, from which statistics and sinks follow without its logits.

With the largest logit M and n = sum_j exp(x_j - M), a row has

    logsumexp = M + log n,    entropy = log n - sum_j exp(x_j - M) (x_j - M) / n.

A sink is one more key, with the logit z and the value 0. The other keys then have the share

    p = sigmoid(M - z + log n)

of the weight, so that weights and output are those without the sink times p, and

    entropy with the sink = p entropy - p log p - (1 - p) log (1 - p).

So no loop over keys knows of sinks. M and log n stay apart, because their sum would be rounded: at
logits of 1e4, to 1e-3 in float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export

Array = jax.Array


class AttentionStatistics(NamedTuple):
    """Statistics of each row of attention, that is of each query."""

    logsumexp: Array  # [*B, T]  log sum_j exp(logits_j) over allowed keys; -inf without keys
    entropy: Array  # [*B, T]  -sum_j w_j log w_j in nats, before dropout; 0 without keys
    max_logit: Array  # [*B, T]  largest allowed logit, without gradient; -inf without keys


export.register_namedtuple_serialization(
    AttentionStatistics, serialized_name="attention_jax.AttentionStatistics"
)


class RowSummary(NamedTuple):
    """The numbers of each row of a softmax; differentiable except `largest`."""

    largest: Array  # [t] M; -inf without keys
    log_sum: Array  # [t] log n; 0 without keys
    entropy: Array | None  # [t] in nats; 0 without keys; None where it is not requested

    @classmethod
    def of_sums(cls, largest: Array, total: Array, excess: Array | None) -> RowSummary:
        """The summary of rows [t] with sums of exp(x - M) and, for the entropy, exp(x - M) (x - M).

        `largest` may hold anything in a row without keys, whose total is 0.
        """
        any_allowed = total != 0  # `> 0` would hide a NaN
        total = jnp.where(any_allowed, total, 1)
        log_sum = jnp.log(total)
        entropy = None if excess is None else jnp.where(any_allowed, log_sum - excess / total, 0)
        return cls(jnp.where(any_allowed, largest, -jnp.inf), log_sum, entropy)

    def statistics(self) -> AttentionStatistics:
        assert self.entropy is not None  # it was requested
        return AttentionStatistics(self.largest + self.log_sum, self.entropy, self.largest)

    def share(self, sink: Array) -> Array:
        """p: the weight [t] that a sink with the logit [] leaves to the keys; 0 without keys."""
        return jnp.where(self.largest == -jnp.inf, 0, jax.nn.sigmoid(self._above(sink)))

    def with_sink(self, sink: Array) -> RowSummary:
        """The summary of the rows with the sink as one more key."""
        empty = self.largest == -jnp.inf
        keys = jnp.where(empty, 0, self.largest)
        largest = jnp.maximum(keys, jax.lax.stop_gradient(sink))
        log_sum = jnp.logaddexp(keys - largest + self.log_sum, sink - largest)
        entropy = self.entropy
        if entropy is not None:
            above = jnp.clip(self._above(sink), -1e3, 1e3)  # 0 times infinity would be NaN
            share, rest = jax.nn.sigmoid(above), jax.nn.sigmoid(-above)
            entropy = share * (entropy + jax.nn.softplus(-above)) + rest * jax.nn.softplus(above)
            entropy = jnp.where(empty, 0, entropy)
        largest = jnp.where(empty, -jnp.inf, largest)
        return RowSummary(largest, jnp.where(empty, 0, log_sum), entropy)

    def _above(self, sink: Array) -> Array:
        """M - z + log n, [t]; 0 without keys."""
        return jnp.where(self.largest == -jnp.inf, 0, self.largest - sink + self.log_sum)


# --- rows that are materialised ---


def summary_of_rows(logits: Array, mask: Array | None = None) -> RowSummary:
    """The summary of each row of `logits` over its allowed entries.

    Args:
        logits: float32 or wider, [..., T, S]; -inf counts as masked.
        mask: bool of the same shape, or None.

    Returns:
        `RowSummary` of shape [..., T].
    """
    largest, exponentials, total = _shifted_exponentials(logits, mask, -1)
    # l_j - max, or 0 where the weight is 0: 0 * -inf would be NaN, while x log x goes to 0.
    shifted = jnp.where(exponentials > 0, logits - largest, 0)
    excess = jnp.sum(exponentials * shifted, axis=-1)
    return RowSummary.of_sums(largest[..., 0], total[..., 0], excess)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax_of_rows(logits: Array, mask: Array | None, axis: int) -> Array:
    """The softmax over the allowed entries along one axis; 0 where there are none."""
    _, exponentials, total = _shifted_exponentials(logits, mask, axis)
    return exponentials / jnp.where(total == 0, 1, total)


# The Jacobian of one row is dw_j / dl_k = w_j (delta_jk - w_k), so a tangent dl becomes
#     dw_j = w_j (dl_j - sum_k w_k dl_k).
# The Jacobian is symmetric, so the same formula is the vector-Jacobian product. It is a function of
# w, so JAX can differentiate it again. It is 0 for a row without allowed keys (all w are 0), and it
# does not read the dl of masked entries.
@softmax_of_rows.defjvp
def _softmax_jvp(axis, primals, tangents):
    logits, mask = primals
    dlogits = tangents[0]
    weights = softmax_of_rows(logits, mask, axis)
    dlogits = jnp.where(weights > 0, dlogits, 0)
    mean = jnp.sum(weights * dlogits, axis=axis, keepdims=True)
    return weights, weights * (dlogits - mean)


def _shifted_exponentials(
    logits: Array, mask: Array | None, axis: int
) -> tuple[Array, Array, Array]:
    """The largest allowed logit M (0 without keys), exp(logits - M), and the sum of those."""
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    largest = jnp.max(logits, axis=axis, keepdims=True, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    exponentials = jnp.exp(logits - largest)
    return largest, exponentials, jnp.sum(exponentials, axis=axis, keepdims=True)
