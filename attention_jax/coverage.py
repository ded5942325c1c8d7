"""Coverage: attention that remembers where it has looked, so that it need not look there twice."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.biases import Bias
from attention_jax.capture_point import capture_point, seen_from_outside
from attention_jax.checks import checked_inputs
from attention_jax.float_array import float_array
from attention_jax.implementations import Inputs
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.implementations.contract import cast_floats
from attention_jax.implementations.reference import without_padding
from attention_jax.masks import Mask
from attention_jax.position_functions import broadcasts
from attention_jax.scores import Params, Score, get_score
from attention_jax.softmax import accumulator_dtype, masked_softmax

Array = jax.Array


class CoverageResult(NamedTuple):
    """What attention with coverage gives: where it looked, and what it cost to look there again."""

    output: Array  # [*B, T, Dv] in the query's dtype
    weights: Array  # [*B, T, S] in the query's dtype
    coverage: Array  # [*B, S] after the last query, in the compute dtype
    loss: Array  # [*B, T] sum_j min(weights_tj, coverage_tj), in the compute dtype


def coverage_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: str | Score = "additive",
    params: Params = None,
    coverage_kernel: Array,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    coverage: Array | None = None,
) -> CoverageResult:
    """Attention whose queries come in order, each knowing how much every key was attended to.

        coverage_tj = coverage_j + sum_{t' < t} weights_t'j
        logits_tj   = pair(q_features_t, k_features_j + coverage_tj coverage_kernel) + bias_tj
        weights_t   = softmax_j(logits_tj where mask_tj)
        output_t    = sum_j weights_tj value_j
        loss_t      = sum_j min(weights_tj, coverage_tj)

    The features are what the score's `project` makes of the tokens, once, before the first query.
    With `Additive` the logits are v . tanh(Wq q_t + Wk k_j + coverage_tj coverage_kernel); a dot
    product gets coverage_tj (q_features_t . coverage_kernel) more.

    One query waits for another: T steps in a row, whatever the hardware. The gradient saves [T, S]
    floats, the coverage at each step, and computes the rest of a step again.

    A query that may attend to nothing gets output 0 and loss 0, leaves the coverage as it is and
    sends gradient 0. A key or query that no allowed pair contains (padding) may hold anything, NaN
    included, and so may its coverage.

    Args:
        query: float [*B, T, Dq], in the order in which they attend.
        key: float [*B, S, Dk]; batch axes that are missing or of size 1 are shared, not copied.
        value: float [*B, S, Dv]; the same.
        score: a name in `SCORES`, "module:Name", or a `Score` whose `project` gives keys [S, Fk].
        params: the score's parameters, as its `init` makes them; leaves may have leading axes that
            broadcast to *B. May be left out if the score has none.
        coverage_kernel: float [Fk], of the size that `coverage_kernel_size` says; may have leading
            axes that broadcast to *B. With zeros this is `attention`.
        mask: a `Mask`, or bool broadcastable to [*B, T, S]; True = may attend.
        bias: a `Bias`, or float broadcastable to [*B, T, S], added to the logits.
        coverage: float [*B, S], at least 0: the coverage that earlier queries left, to go on from;
            may lack batch axes. None for zeros.

    Returns:
        `CoverageResult`. The compute dtype is float32, or float64 if any input is.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure, or the score's features of
            keys are not one array [S, Fk].

    >>> keys = jnp.ones((2, 1))  # no key is better than the other, but the first is seen first
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
    query_kernel, key_kernel, v of `Additive`, which has no b_attn. Other scores are ours.
    """
    score = get_score(score)
    inputs = checked_inputs(score, query, key, value, params, mask, bias)
    *batch_shape, _, query_dim = inputs.query.shape
    source_length, key_dim = inputs.key.shape[-2:]
    feature_dim = coverage_kernel_size(score, query_dim, key_dim, inputs.params)
    coverage_kernel = _checked_vector(
        "coverage_kernel", coverage_kernel, feature_dim, tuple(batch_shape)
    )
    if coverage is None:
        coverage = jnp.zeros(source_length, inputs.compute_dtype)
    coverage = _checked_vector("coverage", coverage, source_length, tuple(batch_shape))
    result = _attend(score, inputs, coverage_kernel, coverage)
    seen = functools.partial(seen_from_outside, inputs, result.output, result.weights)
    return result._replace(output=capture_point(result.output, seen))


def coverage_loss(weights: Array, coverage: Array | None = None) -> Array:
    """How much each query attends to what those before it have attended to.

        loss_t = sum_j min(weights_tj, coverage_j + sum_{t' < t} weights_t'j)

    Between 0 (nothing twice) and 1. Of any attention's weights; of those of `coverage_attention`
    it is the `loss` that came with them.

    Args:
        weights: float [*B, T, S].
        coverage: float [*B, S], what earlier queries left; may lack batch axes. None for zeros.

    Returns:
        loss [*B, T] in float32, or float64 if any input is.

    Raises:
        ValueError: an argument has the wrong shape or dtype.

    >>> coverage_loss(jnp.array([[1.0, 0.0], [0.25, 0.75], [0.5, 0.5]]))
    Array([0.  , 0.25, 1.  ], dtype=float32)

    Source: See, Liu and Manning 2017, equation 12 (their a^t, c^t are weights_t and the sum).
    """
    weights = float_array("weights", weights)
    if weights.ndim < 2:
        raise ValueError(f"weights must be [*B, T, S]; got {list(weights.shape)}")
    *batch_shape, _, source_length = weights.shape
    if coverage is None:
        coverage = jnp.zeros(source_length, weights.dtype)
    coverage = _checked_vector("coverage", coverage, source_length, tuple(batch_shape))
    dtype = accumulator_dtype(weights, coverage)
    weights = weights.astype(dtype)
    first = jnp.broadcast_to(coverage.astype(dtype), (*batch_shape, source_length))
    before = jnp.concatenate([first[..., None, :], weights[..., :-1, :]], axis=-2)
    before = before[..., : weights.shape[-2], :]  # no query, no coverage before it
    return jnp.sum(jnp.minimum(weights, jnp.cumsum(before, axis=-2)), axis=-1)


def coverage_kernel_size(
    score: str | Score, query_dim: int, key_dim: int, params: Params = None
) -> int:
    """Fk: the number of features that the score's `project` makes of a key.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`.
        query_dim: Dq.
        key_dim: Dk.
        params: the score's parameters, where a size is theirs (A of `Additive`).

    Returns:
        the size of `coverage_kernel`.

    Raises:
        ValueError: the features of keys are not one floating-point array [S, Fk].

    >>> coverage_kernel_size("dot", 4, 4)
    4

    Source: See, Liu and Manning 2017, below equation 11: w_c is "of same length as v".
    """
    score = get_score(score)

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    expected = score.param_shapes({} if params is None else params, query_dim, key_dim)
    length = 2
    features: Any = jax.eval_shape(
        score.project,
        jax.tree.map(lambda leaf: float32(*leaf.shape), expected),
        float32(1, query_dim),
        float32(length, key_dim),
    )[1]
    shape: tuple[int, ...] = getattr(features, "shape", ())
    if len(shape) != 2 or shape[0] != length or not jnp.issubdtype(features.dtype, jnp.floating):
        raise ValueError(
            f"score must project keys to one floating-point array [S, Fk], for coverage to be added"
            f" to; {score} makes of {length} keys {features}"
        )
    return int(shape[1])


# --- the compiled function behind the door ---


@functools.partial(jax.jit, static_argnums=0)
def _attend(score: Score, inputs: Inputs, kernel: Array, coverage: Array) -> CoverageResult:
    # Not inputs.compute_dtype in one example: kernel and coverage are floats that came in too.
    dtype = accumulator_dtype(*jax.tree.leaves(inputs._replace(mask=None)), kernel, coverage)
    attend = functools.partial(_one_example, score, dtype)
    return vmap_over_batch(score, attend, inputs, (kernel, 1), (coverage, 1))


def _one_example(
    score: Score, dtype: jnp.dtype, inputs: Inputs, kernel: Array, coverage: Array
) -> CoverageResult:
    shape = (inputs.query.shape[0], inputs.key.shape[0])
    mask = None if inputs.mask is None else inputs.mask.materialize(*shape)
    # As in implementations/reference.py, whose comments say why: never 0, nor the same twice.
    query = without_padding(inputs.query.astype(dtype), mask, of="queries", filler=1)
    key = without_padding(inputs.key.astype(dtype), mask, of="keys", filler=2)
    value = without_padding(inputs.value.astype(dtype), mask, of="keys", filler=0)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), inputs.params)
    q_features, k_features = score.project(params, query, key)
    kernel = kernel.astype(k_features.dtype)
    bias = None if inputs.bias is None else cast_floats(inputs.bias, dtype).materialize(*shape)

    # Checkpointed: without it each step would save its k_features with coverage, T S Fk floats.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(coverage: Array, row: Any) -> tuple[Array, tuple[Array, Array]]:
        q_features, allowed, bias = row
        # The minimum of two zeros sends half of its gradient to either: to a coverage that no
        # allowed pair reads, none must go.
        seen = coverage if allowed is None else jnp.where(allowed, coverage, 0)
        covered = k_features + seen.astype(kernel.dtype)[:, None] * kernel[None, :]
        one_query = jax.tree.map(lambda leaf: leaf[None], q_features)
        logits = score.pair(params, one_query, covered).astype(dtype)
        if logits.shape != (1, shape[1]):
            raise ValueError(
                f"score {score} must give logits {[1, shape[1]]} of one query;"
                f" got {list(logits.shape)}"
            )
        weights = masked_softmax(logits[0] if bias is None else logits[0] + bias, allowed)
        return coverage + weights, (weights, jnp.sum(jnp.minimum(weights, seen)))

    coverage, (weights, loss) = jax.lax.scan(
        step, coverage.astype(dtype), (q_features, mask, bias), length=shape[0]
    )
    output = jnp.matmul(weights, value, precision="highest")
    narrow = inputs.query.dtype
    return CoverageResult(output.astype(narrow), weights.astype(narrow), coverage, loss)


def _checked_vector(name: str, value: Any, size: int, batch_shape: tuple[int, ...]) -> Array:
    array = float_array(name, value)
    # `broadcasts` alone would let a last axis of size 1 pass.
    if array.shape[-1:] != (size,) or not broadcasts(array.shape[:-1], batch_shape):
        axes = f", with batch axes that broadcast to {list(batch_shape)}" if batch_shape else ""
        raise ValueError(f"{name} must be {[size]}{axes}; got {list(array.shape)}")
    return array
