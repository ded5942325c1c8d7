"""Coverage attention: logits depend on how much earlier queries attended to each key."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype, cast_floats
from attention_jax.core.serialization import exported
from attention_jax.functional.attention import capturing
from attention_jax.functional.checks import checked_call, checked_floats, hinted
from attention_jax.positions.contract import Bias, Mask
from attention_jax.scores import DEFAULT_SCORE, Params, Score, ScoreLike, get_score
from attention_jax.scores.projected_keys import key_feature_shapes
from attention_jax.scores.wrapped import LogitMap
from attention_jax.tiles import Inputs, Options
from attention_jax.tiles.options import vmap_over_batch
from attention_jax.whole.masked_softmax import masked_softmax
from attention_jax.whole.query_chunks import Chunk, allowed_only, attend_in_order

Array = jax.Array


@exported
class CoverageResult(NamedTuple):
    """The results of `coverage_attention`."""

    output: Array  # [*B, T, Dv] in the query's dtype
    weights: Array | None  # [*B, T, S] in the query's dtype; None unless requested
    coverage: Array  # [*B, S] after the last query, in the compute dtype
    loss: Array  # [*B, T] sum_j min(weights_tj, coverage_tj), in the compute dtype


@hinted
def coverage_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: ScoreLike = DEFAULT_SCORE,
    params: Params = None,
    coverage_kernel: Array,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    coverage: Array | None = None,
    return_weights: bool = True,
) -> CoverageResult:
    """Attention in query order, where each query knows how much earlier queries attended to a key.

        coverage_tj = coverage_j + sum_{t' < t} weights_t'j
        logits_tj   = pair(q_features_t, k_features_j + coverage_tj coverage_kernel) + bias_tj
        weights_t   = softmax_j(logits_tj where mask_tj)
        output_t    = sum_j weights_tj value_j
        loss_t      = sum_j min(weights_tj, coverage_tj)

    The features are the projections of the tokens by the score, computed once before the first
    query. With `Additive` the logits are v . tanh(Wq q_t + Wk k_j + coverage_tj coverage_kernel);
    a dot product adds coverage_tj (q_features_t . coverage_kernel).

    Coverage makes queries sequential: T steps, in training too. The queries are computed in chunks
    of 64, or of sqrt(T) if that is more. The gradient saves the coverage before each chunk and
    recomputes the rest, so that only the weights, if they are returned, take memory T S.

    A query whose keys are all masked gets output 0, weights 0 and loss 0 and does not change the
    coverage. It sends gradient 0 for any cotangents of these three results, NaN included. (The
    coverage after the last query belongs to no single query: a NaN cotangent of its entry j reaches
    entry j of the argument `coverage`, and every query that may attend to key j.) A key or query
    that no allowed pair contains (padding) may hold anything, NaN included, and so may its
    coverage.

    Args:
        query: float [*B, T, Dq], in the order in which the queries attend.
        key, value, params, mask, bias: as in `attention`; the key is an array.
        score: as in `attention`; its features of keys are one array [S, Fk].
        coverage_kernel: float [Fk], with Fk = `coverage_kernel_size(...)`; may have leading axes
            that broadcast to *B. Zeros give the result of `attention`.
        coverage: float [*B, S], at least 0: the coverage after earlier queries, from which to
            continue; may lack batch axes. None for zeros.
        return_weights: whether to return the weights [*B, T, S] too.

    Returns:
        `CoverageResult`, its weights None with `return_weights=False`. The compute dtype is
        float32, or float64 if any input is.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure, or the score's features of
            keys are not one array [S, Fk].

    >>> keys = jnp.ones((2, 1))  # equal keys; query 0 may attend to key 0 only
    >>> result = coverage_attention(
    ...     keys, keys, keys, score="dot", coverage_kernel=-jnp.log(jnp.array([3.0])),
    ...     mask=jnp.array([[True, False], [True, True]]),
    ... )
    >>> result.weights.round(2)
    Array([[1.  , 0.  ],
           [0.25, 0.75]], dtype=float32)
    >>> result.loss.round(2)
    Array([0.  , 0.25], dtype=float32)

    Source: See, Liu and Manning 2017, equations 10-13: their s_t, h_i, c^t_i, a^t_i, w_c, covloss_t
    are query_t, key_i, coverage_ti, weights_ti, coverage_kernel, loss_t; their W_s, W_h, v are the
    query_kernel, key_kernel, v of `Additive`, which has no b_attn. Other scores extend it.
    """
    pairs = {"score": score, "params": params, "mask": mask, "bias": bias}
    options, inputs = checked_call(query, key, value, **pairs)
    batch_shape, sizes = inputs.query.shape[:-2], (inputs.query.shape[-1], inputs.key.shape[-1])
    feature_dim = coverage_kernel_size(options.score, *sizes, inputs.params)
    kernel = checked_floats("coverage_kernel", coverage_kernel, (feature_dim,), batch_shape)
    coverage = _checked_coverage(coverage, inputs.key.shape[-2], batch_shape)
    capture = capturing.value
    all_weights = return_weights or (capture is not None and capture.matrices)
    result = _coverage_attention(options, all_weights, inputs, kernel, coverage)
    if capture is not None:
        output = capture.point(inputs, result.output, weights=result.weights)
        result = result._replace(output=output)
    return result if return_weights else result._replace(weights=None)


def coverage_loss(weights: Array, coverage: Array | None = None) -> Array:
    """The coverage loss: how much each query attends to keys that earlier queries attended to.

        loss_t = sum_j min(weights_tj, coverage_j + sum_{t' < t} weights_t'j)

    It lies between 0 (no key twice) and 1, and applies to the weights of any attention. For the
    weights of `coverage_attention` it equals the `loss` of the result.

    Args:
        weights: float [*B, T, S].
        coverage: float [*B, S], the coverage after earlier queries; may lack batch axes. None for
            zeros.

    Returns:
        loss [*B, T] in float32, or float64 if any input is.

    Raises:
        ValueError: an argument has the wrong shape or dtype.

    >>> coverage_loss(jnp.array([[1.0, 0.0], [0.25, 0.75], [0.5, 0.5]]))
    Array([0.  , 0.25, 1.  ], dtype=float32)

    Source: See, Liu and Manning 2017, equation 12 (their a^t, c^t are weights_t and the sum).
    """
    weights = checked_floats("weights", weights, ("T", "S"), None)
    batch_shape, source_length = weights.shape[:-2], weights.shape[-1]
    coverage = _checked_coverage(coverage, source_length, batch_shape)
    dtype = accumulator_dtype(weights, coverage)
    weights = weights.astype(dtype)
    first = jnp.broadcast_to(coverage.astype(dtype), (*batch_shape, source_length))
    before = jnp.concatenate([first[..., None, :], weights[..., :-1, :]], axis=-2)
    before = before[..., : weights.shape[-2], :]  # drops `first` if T is 0
    return jnp.sum(jnp.minimum(weights, jnp.cumsum(before, axis=-2)), axis=-1)


def coverage_kernel_size(
    score: str | Score, query_dim: int, key_dim: int, params: Params = None
) -> int:
    """Fk: the number of key features of a score.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k) or
            (params, q, k), see `scores.FunctionScore`.
        query_dim: Dq.
        key_dim: Dk.
        params: the score's parameters, if their shapes determine Fk (A of `Additive`).

    Returns:
        the size of `coverage_kernel`.

    Raises:
        ValueError: the features of keys are not one floating-point array [S, Fk].

    >>> coverage_kernel_size("dot", 4, 4)
    4

    Source: See, Liu and Manning 2017, below equation 11: w_c is "of same length as v".
    """
    score, length = get_score(score), 2
    params = {} if params is None else params
    features = key_feature_shapes(score, params, query_dim, key_dim, length)
    shape: tuple[int, ...] = getattr(features, "shape", ())
    if len(shape) != 2 or shape[0] != length or not jnp.issubdtype(features.dtype, jnp.floating):
        raise ValueError(
            "score must project keys to one floating-point array [S, Fk], to which coverage is"
            f" added; got {features} for {length} keys from score {score}"
        )
    return int(shape[1])


def _checked_coverage(
    coverage: Array | None, source_length: int, batch_shape: tuple[int, ...]
) -> Array:
    """The coverage [..., S] before the first query, zeros for None; ValueError for other shapes."""
    if coverage is None:
        return jnp.zeros(source_length, jnp.float32)
    return checked_floats("coverage", coverage, (source_length,), batch_shape)


# --- the compiled function ---


class _FromZero(LogitMap):
    """A score whose tokens keep their offset: with coverage, its features depend on it."""

    translation_invariant = False

    def map_logits(self, logits: Array) -> Array:
        return logits


@functools.partial(jax.jit, static_argnums=(0, 1))
def _coverage_attention(
    options: Options, all_weights: bool, inputs: Inputs, kernel: Array, coverage: Array
) -> CoverageResult:
    score = options.score
    score = _FromZero(score) if score.translation_invariant else score
    # `inputs.compute_dtype` would leave out the kernel and the coverage.
    dtype = accumulator_dtype(*jax.tree.leaves(inputs._replace(mask=None)), kernel, coverage)
    inputs = inputs._replace(value=inputs.value.astype(dtype))

    def one_example(inputs: Inputs, kernel: Array, coverage: Array) -> CoverageResult:
        kernel, coverage = cast_floats((kernel, coverage), inputs.compute_dtype)

        def compute_weights(chunk: Chunk, coverage: Array) -> tuple[Array, Array, Array]:
            # Checkpointed: otherwise each step would save its keys with coverage, t S Fk floats.
            @functools.partial(jax.checkpoint, prevent_cse=False)
            def step(coverage: Array, row: dict[str, Any]) -> tuple[Array, tuple[Array, Array]]:
                row = jax.lax.optimization_barrier(row)  # else jax 0.12 reads it for each pair
                # The minimum of two zeros sends half of its gradient to each argument. The
                # coverage of a masked key must get none.
                allowed = row["allowed"]
                seen = allowed_only(allowed, coverage[None])
                keys = chunk.keys + jnp.outer(seen, kernel).astype(chunk.keys.dtype)
                logits = chunk._replace(keys=keys, **row).logits()
                weights = allowed_only(allowed, masked_softmax(logits, allowed))[0]
                return coverage + weights, (weights, jnp.sum(jnp.minimum(weights, seen[0])))

            rows = {"queries": chunk.queries, "allowed": chunk.allowed, "bias": chunk.bias}
            rows = jax.tree.map(lambda leaf: leaf[:, None], rows)
            coverage, (weights, loss) = jax.lax.scan(step, coverage, rows, chunk.positions.size)
            return coverage, weights, loss

        output, weights, loss, coverage = attend_in_order(
            score, inputs, compute_weights, coverage, return_weights=all_weights
        )
        if loss is None:
            loss = jnp.zeros(output.shape[0], inputs.compute_dtype)
        return CoverageResult(output, weights, coverage, loss)

    return vmap_over_batch(options, one_example, inputs, (kernel, 1), (coverage, 1))
