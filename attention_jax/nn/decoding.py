"""Greedy search, sampling and beam search with any step function, in one compiled loop.

The model is a function `step(state, tokens) -> (logits, state)`: `tokens` int32 [n] are the last
tokens of n rows (SOS at first), `logits` float [n, V] are those of the next tokens, and `state` is
any pytree of arrays [n, ...] that keeps its structure, shapes and dtypes. Rows that have ended read
PAD, and their logits are ignored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype, integer_array
from attention_jax.core.checks import check_integer, checked_number, checked_rng
from attention_jax.core.serialization import exported

Array = jax.Array
State = Any
Step = Callable[[State, Array], tuple[Array, State]]


@exported
class BeamResult(NamedTuple):
    """The hypotheses that beam search kept for each row, best first.

    If fewer than `beams` sequences exist, the rest have score -inf, length 0 and only PAD.
    """

    tokens: Array  # int32 [B, beams, max_length], PAD after EOS
    scores: Array  # float [B, beams], log-probability over length penalty, in descending order
    log_probabilities: Array  # float [B, beams], nats
    lengths: Array  # int32 [B, beams], tokens with EOS


def likeliest(t: Array, logits: Array) -> Array:
    """The tokens of greedy search at step t, int [n], from logits [n, V]."""
    # top_k rather than argmax, so that ties and signed zeros are as in `beam_search`.
    return _best_tokens(logits, 1)[:, 0]


def _best_tokens(logits: Array, count: int) -> Array:
    """The likeliest tokens, int [n, count], best first, from logits [n, V]."""
    # XLA sorts the whole vocabulary for the top of 16-bit floats on a CPU.
    return jax.lax.top_k(logits.astype(accumulator_dtype(logits)), count)[1]


def greedy_search(
    step: Step,
    state: State,
    *,
    batch_size: int,
    max_length: int,
    sos: int | Array,
    eos: int,
    pad: int,
    choose: Callable[[Array, Array], Array] = likeliest,
) -> Array:
    """Feeds back the likeliest token at every step, until every row has generated EOS.

        y_t = argmax_v logits(y_1 .. y_{t-1})_v

    Args:
        step: `step(state, tokens) -> (logits, state)`, with the last tokens int32 [n] and the
            logits float [n, V] of the next ones, for n = `batch_size` rows.
        state: the state of its first call; every array has the rows in front.
        batch_size: B.
        max_length: longest output, EOS included.
        sos: the token that every row begins with, or one per row, int [B]; not in the output. Like
            `pad`, it may be any number that `step` reads.
        eos: the token that ends a row, from 0 to V - 1.
        pad: the token that fills a row after EOS.
        choose: chooses the tokens int [B] that are fed back at step t, from logits [B, V]:
            choose(t, logits).

    Returns:
        tokens int32 [B, max_length], PAD after EOS. Ties are broken by the lowest token. A row with
        NaN among its logits at some step, or without one above -inf, has no answer: it is all PAD.

    Raises:
        ValueError: a number is out of range, or `step` has the wrong signature.

    >>> def count(state, tokens):  # generates the number after the last token
    ...     return jax.nn.one_hot(tokens + 1, 5), state
    >>> greedy_search(count, (), batch_size=1, max_length=6, sos=0, eos=4, pad=0)
    Array([[1, 2, 3, 4, 0, 0]], dtype=int32)
    """
    batch_size, max_length, eos, pad = _integers(
        batch_size=batch_size, max_length=max_length, eos=eos, pad=pad
    )
    first = first_tokens(sos, batch_size)
    state = jax.tree.map(jnp.asarray, state)
    _check_step(step, state, batch_size, eos)

    def unfinished(carried: Any) -> Array:
        t, _, _, _, ended = carried
        return (t < max_length) & ~jnp.all(ended)

    def extend(carried: Any) -> Any:
        t, state, last, tokens, ended = carried
        logits, state = step(state, last)
        lost = ~ended & ~(jnp.max(logits, axis=-1) > -jnp.inf)
        tokens, ended = jnp.where(lost[:, None], pad, tokens), ended | lost
        chosen = jnp.where(ended, pad, choose(t, logits).astype(jnp.int32))
        return t + 1, state, chosen, tokens.at[:, t].set(chosen), ended | (chosen == eos)

    tokens = jnp.full((batch_size, max_length), pad, jnp.int32)
    # `ended` is kept apart from the tokens, because PAD may be EOS.
    carried = (jnp.int32(0), state, first, tokens, jnp.zeros((batch_size,), bool))
    return jax.lax.while_loop(unfinished, extend, carried)[3]


def sample_search(
    step: Step, state: State, rng: Array, *, temperature: float = 1.0, **numbers: Any
) -> Array:
    """Feeds back a random token at every step, until every row has generated EOS.

        y_t ~ softmax(logits(y_1 .. y_{t-1}) / temperature)

    Args:
        step, state: as in `greedy_search`.
        rng: one PRNG key.
        temperature: above 0; the smaller, the likelier the likeliest token.
        numbers: `batch_size`, `max_length`, `sos`, `eos` and `pad`, as in `greedy_search`.

    Returns:
        tokens int32 [B, max_length], PAD after EOS.

    Raises:
        ValueError: a number is out of range, or `step` has the wrong signature.

    >>> def even(state, tokens):  # 1 and 2 are equally likely, 0 (EOS) is not
    ...     return jnp.tile(jnp.array([-jnp.inf, 0.0, 0.0]), (len(tokens), 1)), state
    >>> numbers = dict(batch_size=1, max_length=6, sos=0, eos=0, pad=0)
    >>> sample_search(even, (), jax.random.key(1), **numbers).shape
    (1, 6)
    """
    rng = checked_rng(rng, name="rng")
    if not checked_number("temperature", temperature) > 0:
        raise ValueError(f"temperature must be above 0; got {temperature!r}")

    def draw(t: Array, logits: Array) -> Array:
        logits = logits.astype(accumulator_dtype(logits))
        return jax.random.categorical(jax.random.fold_in(rng, t), logits / temperature)

    return greedy_search(step, state, choose=draw, **numbers)


def beam_search(
    step: Step,
    state: State,
    *,
    batch_size: int,
    beams: int,
    max_length: int,
    sos: int | Array,
    eos: int,
    pad: int,
    length_penalty: float = 0.0,
) -> BeamResult:
    """Keeps the `beams` likeliest prefixes of each row, and the best hypotheses that have ended.

        score(Y) = log P(Y) / ((5 + |Y|) / 6)^length_penalty

    Each step keeps the `beams` likeliest continuations of the live prefixes. Those that end in EOS
    are finished hypotheses, of which the `beams` best are stored beside the live prefixes. A row
    stops when it has no live prefix, or when the likeliest live prefix could not score above the
    worst of `beams` finished hypotheses even if it reached the longest length without losing
    probability. At `max_length` live prefixes count as hypotheses too. One beam gives the tokens of
    `greedy_search`, whatever the penalty.

    Args:
        step: as in `greedy_search`, for n = B * beams rows, the beams of a row adjacent.
        state: the state of its first call for n = B rows, which are the first axis of every array;
            this function repeats them for the beams. The state of a row moves with its prefix.
        batch_size: B.
        beams: hypotheses kept for each row, at least 1; may be more than V.
        max_length: longest output, EOS included.
        sos, eos, pad: as in `greedy_search`.
        length_penalty: 0 ranks by log-probability; the larger, the longer the hypotheses preferred.

    Returns:
        `BeamResult`; log-probabilities in float32 (float64 if the logits are). The scores of a row
        with NaN among the logits of a live prefix are NaN, and its tokens all PAD.

    Raises:
        ValueError: a number is out of range, or `step` has the wrong signature.

    >>> def chain(state, tokens):  # after the likeliest first token, 1, nothing is likely
    ...     table = jnp.array([[0.0, 0.5, 0.5], [0.4, 0.3, 0.3], [0.9, 0.1, 0.0], [0.0, 0.6, 0.4]])
    ...     return jnp.log(table)[tokens], state
    >>> numbers = dict(batch_size=1, max_length=2, sos=3, eos=0, pad=0)
    >>> greedy_search(chain, (), **numbers).tolist()
    [[1, 0]]
    >>> result = jax.jit(lambda: beam_search(chain, (), beams=2, **numbers))()
    >>> result.tokens.tolist(), result.scores.round(2)  # log 0.36 and log 0.24
    ([[[2, 0], [1, 0]]], Array([[-1.02, -1.43]], dtype=float32))

    Source: Wu et al. 2016, equation 14 (their alpha is `length_penalty`), without their coverage
        penalty (beta = 0); |Y| counts EOS.
    """
    batch_size, beams, max_length, eos, pad = _integers(
        batch_size=batch_size, beams=beams, max_length=max_length, eos=eos, pad=pad
    )
    first = first_tokens(sos, batch_size)
    penalty = checked_number("length_penalty", length_penalty)
    # A negative penalty would divide longer hypotheses by less, and the stopping rule would fail.
    if penalty < 0:
        raise ValueError(f"length_penalty must be at least 0; got {length_penalty!r}")
    state = jax.tree.map(lambda leaf: _for_each_beam(leaf, batch_size, beams), state)
    logits_dtype = _check_step(step, state, batch_size * beams, eos)
    dtype = accumulator_dtype(jnp.empty((), logits_dtype))

    def scores_of(log_probabilities: Array, length: Array | int) -> Array:
        return log_probabilities / ((5 + jnp.asarray(length, dtype)) / 6) ** penalty

    def unfinished(search: _BeamState) -> Array:
        return (search.t < max_length) & jnp.any(search.live > -jnp.inf)

    def extend(search: _BeamState) -> _BeamState:
        logits, state = step(search.state, search.last.reshape(-1))
        # First the best of each prefix by its logits, then the best of all: sums of
        # log-probabilities are rounded, and values that become equal keep the order of the logits.
        choices = min(beams, logits.shape[-1])
        chosen, logits = _best_tokens(logits, choices), logits.astype(dtype)
        dead = jnp.max(logits, axis=-1, keepdims=True) == -jnp.inf
        log_p = jnp.where(dead, -jnp.inf, jax.nn.log_softmax(logits))
        log_p = jnp.take_along_axis(log_p, chosen, axis=-1).reshape(batch_size, beams, choices)
        before = search.live[:, :, None]
        # The logits of an empty slot are not used, and may be NaN.
        totals = jnp.where(before == -jnp.inf, -jnp.inf, before + log_p)
        totals = totals.reshape(batch_size, beams * choices)
        totals = jnp.where(jnp.any(jnp.isnan(totals), axis=1)[:, None], jnp.nan, totals)
        live, index = jax.lax.top_k(totals, beams)
        index = index.astype(jnp.int32)
        new_tokens = jnp.take_along_axis(chosen.reshape(totals.shape), index, axis=1)
        new_tokens = new_tokens.astype(jnp.int32)
        parents = index // choices
        tokens = jnp.take_along_axis(search.tokens, parents[:, :, None], axis=1)
        tokens = tokens.at[:, :, search.t].set(new_tokens)
        rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None] * beams + parents
        state = jax.tree.map(
            lambda leaf: jnp.take(leaf, rows.reshape(-1), axis=0, mode="clip"), state
        )

        length = search.t + 1
        ended = jnp.where(new_tokens == eos, live, -jnp.inf)
        kept = _better(search.kept, _hypotheses(tokens, ended, scores_of(ended, length), length))
        # The log-probability of a live prefix can only fall; `max_length` has the largest divisor.
        live = jnp.where(new_tokens == eos, -jnp.inf, live)
        bound = scores_of(jnp.max(live, axis=1), max_length)
        # Each row stops on its own, so that its result does not depend on the other rows.
        live = jnp.where((kept.scores[:, -1] >= bound)[:, None], -jnp.inf, live)
        last = jnp.where(live > -jnp.inf, new_tokens, pad)
        return _BeamState(length, state, last, tokens, live, kept)

    shape = (batch_size, beams)
    tokens = jnp.full((*shape, max_length), pad, jnp.int32)
    nothing = jnp.full(shape, -jnp.inf, dtype)
    search = _BeamState(
        t=jnp.int32(0),
        state=state,
        last=jnp.broadcast_to(first[:, None], shape),
        tokens=tokens,
        live=nothing.at[:, 0].set(0),  # one empty prefix per row, not `beams` equal ones
        kept=_hypotheses(tokens, nothing, nothing, 0),
    )
    search = jax.lax.while_loop(unfinished, extend, search)
    scores = scores_of(search.live, max_length)
    kept = _better(search.kept, _hypotheses(search.tokens, search.live, scores, max_length))
    exists = kept.scores > -jnp.inf
    return kept._replace(
        tokens=jnp.where(exists[:, :, None], kept.tokens, pad),
        lengths=jnp.where(exists, kept.lengths, 0),
    )


class _BeamState(NamedTuple):
    """The carry of the loop of beam search."""

    t: Array  # int32 [], tokens generated so far
    state: State  # of B * beams rows
    last: Array  # int32 [B, beams], the last tokens
    tokens: Array  # int32 [B, beams, max_length], the live prefixes
    live: Array  # float [B, beams], their log-probabilities; -inf for an empty slot
    kept: BeamResult  # the best finished hypotheses, best first; score -inf for an empty slot


def _hypotheses(
    tokens: Array, log_probabilities: Array, scores: Array, length: Array | int
) -> BeamResult:
    """Hypotheses that all have the same length."""
    lengths = jnp.full(scores.shape, length, jnp.int32)
    return BeamResult(tokens, scores, log_probabilities, lengths)


def _better(kept: BeamResult, new: BeamResult) -> BeamResult:
    """The best of both, as many as in `kept`; ties go to `kept`."""
    both = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), kept, new)
    _, index = jax.lax.top_k(both.scores, kept.scores.shape[1])

    def take(array: Array) -> Array:
        return jnp.take_along_axis(array, index[:, :, None] if array.ndim == 3 else index, axis=1)

    return jax.tree.map(take, both)


# --- checks of arguments ---


def _integers(**numbers: Any) -> list[int]:
    """The numbers as Python integers; tokens are int32, and PAD is often -1."""
    return [
        check_integer(name, number, -(2**31) if name in ("eos", "pad") else 1, 2**31 - 1)
        for name, number in numbers.items()
    ]


def first_tokens(sos: Any, batch_size: int) -> Array:
    """The first token of each row, int32 [B], for one token or one for each row."""
    tokens = integer_array("sos", sos)
    if tokens.shape not in ((), (batch_size,)):
        raise ValueError(
            f"sos must be one token, or int [{batch_size}]; got an array {list(tokens.shape)}"
        )
    return jnp.broadcast_to(tokens.astype(jnp.int32), (batch_size,))


def _for_each_beam(leaf: Any, batch_size: int, beams: int) -> Array:
    """An array of the state, each row `beams` times."""
    leaf = jnp.asarray(leaf)
    if leaf.shape[:1] != (batch_size,):
        raise ValueError(f"state must have arrays [{batch_size}, ...]; got {list(leaf.shape)}")
    return jnp.repeat(leaf, beams, axis=0)


def _check_step(step: Step, state: State, rows: int, eos: int) -> jnp.dtype:
    """Returns the dtype of the step's logits, after checks of what the step returns."""
    if not callable(step):
        raise ValueError(f"step must be a function of (state, tokens); got {step!r}")
    result = jax.eval_shape(step, state, jax.ShapeDtypeStruct((rows,), jnp.int32))
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"step must return (logits, state); got {type(result).__name__}")
    logits, after = result
    if not (
        isinstance(logits, jax.ShapeDtypeStruct)
        and jnp.issubdtype(logits.dtype, jnp.floating)
        and len(logits.shape) == 2
        and logits.shape[0] == rows
    ):
        raise ValueError(f"step must return floating-point logits [{rows}, V]; got {logits}")
    if not 0 <= eos < logits.shape[1]:
        raise ValueError(f"eos must be from 0 to {logits.shape[1] - 1}, a token; got {eos}")

    before, after = (
        jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
        for tree in (state, after)
    )
    if jax.tree.flatten(after) != jax.tree.flatten(before):  # leaves and structure
        raise ValueError(f"step must return a state like the one it takes, {before}; got {after}")
    return logits.dtype
