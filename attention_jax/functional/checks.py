"""Checks of the arguments of attention functions, made before anything compiles.

Each raises a ValueError that names the argument, what was expected, and what was given.
"""

from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import (
    accumulator_dtype,
    any_array,
    broadcasts,
    float_array,
    pad_rank,
)
from attention_jax.core.checks import check_integer, checked_fraction, checked_rng, with_hints
from attention_jax.kernels import IMPLEMENTATIONS
from attention_jax.normalizers import DEFAULT_NORMALIZER, NormalizerLike, get_normalizer
from attention_jax.parts import known_normalizer, known_positions, known_score
from attention_jax.positions.contract import Bias, Mask, as_bias, as_mask
from attention_jax.scores import (
    DEFAULT_SCORE,
    KeyLike,
    Params,
    ProjectedKeys,
    Score,
    ScoreLike,
    get_score,
)
from attention_jax.scores.projected_keys import key_feature_shapes
from attention_jax.tiles import BlockSizes, Inputs, Options

Array = jax.Array


class WeightsArguments(TypedDict, total=False):
    """The types of the keyword arguments that weights depend on."""

    score: ScoreLike
    params: Params
    mask: Mask | Array | None
    bias: Bias | Array | None
    normalizer: NormalizerLike
    normalizer_params: Params


class AttentionArguments(WeightsArguments, total=False):
    """The types of the keyword arguments that `attention` and `ring_attention` share."""

    dropout_rate: float
    dropout_rng: Array | None
    block_sizes: BlockSizes | None


# What to write in place of the arguments of jax.nn's attention, Flax's `attention_fn` and PyTorch.
hinted = with_hints(
    {
        "is_causal": "mask=causal_mask(), or call interop.dot_product_attention",
        "scale": "score=ScaledDot(scale=...), or call interop.dot_product_attention",
        "query_seq_lengths": "mask=padding_mask(key_lengths, query_lengths)",
        "key_value_seq_lengths": "mask=padding_mask(key_lengths, query_lengths)",
        "local_window_size": "mask=local_mask(left, right)",
        "broadcast_dropout": "Flax attention_fn=interop.flax_attention_fn(score, params)",
        # True = ignore, in torch's layer alone
        "attn_mask": "mask=attn_mask as in scaled_dot_product_attention, mask=~attn_mask as in"
        " MultiheadAttention, or bias=attn_mask if it is float",
        "key_padding_mask": "mask=token_mask(~key_padding_mask), True = a real token",
        "need_weights": "return_weights to a layer, or call attention_weights; leave it out for"
        " no weights",
        "average_attn_weights": "the mean over heads yourself: weights.mean(axis=-3)",
    }
)
NO_VALUE: Any = object()  # in place of the value, for a call that computes weights alone


def checked_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    score: ScoreLike = DEFAULT_SCORE,
    params: Params = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    normalizer: NormalizerLike = DEFAULT_NORMALIZER,
    normalizer_params: Params = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    block_sizes: BlockSizes | None = None,
    return_statistics: bool = False,
) -> tuple[Options, Inputs]:
    """The arguments of a call, with JAX arrays; ValueError unless their shapes and dtypes match.

    Parts that a user wrote are traced here, and become `Known`. `value` may be `NO_VALUE`.
    """
    score, normalizer = get_score(score), get_normalizer(normalizer)
    query = checked_floats("query", query, ("T", "Dq"), None)
    batch, (target_length, query_dim) = query.shape[:-2], query.shape[-2:]
    if isinstance(key, ProjectedKeys):
        key = jax.tree.map(lambda leaf: any_array("key.features", leaf), key)
        check_axes("key", key, ("S", "Dk"), batch)
    else:
        key = checked_floats("key", key, ("S", "Dk"), batch)
    source_length, key_dim = key.shape[-2:]
    if value is NO_VALUE:
        value = jnp.zeros((*key.shape[:-1], 1), query.dtype)
    matching = f" to match key {list(key.shape)}"
    value = checked_floats("value", value, (source_length, "Dv"), batch, matching)
    for name, size in (("query", query_dim), ("key", key_dim)):
        if size == 0:
            raise ValueError(f"{name} must have at least one feature; got [..., 0]")
    check_equal_dims(score, query, key)

    # What a user wrote is traced for the lengths and the compute dtype of the call.
    dtype = compute_dtype(query, key, value, params, bias, normalizer_params)
    lengths = target_length, source_length
    score = known_score(score, params, query_dim, key_dim, dtype, lengths)
    params = checked_params(score, params, query_dim, key_dim, batch)
    if isinstance(key, ProjectedKeys):
        _check_features(score, params, key, query_dim)
    normalizer = known_normalizer(normalizer, dtype, lengths)
    normalizer_params = _checked_tree(
        "normalizer_params",
        {} if normalizer_params is None else normalizer_params,
        normalizer.param_shapes(),
        f"normalizer {normalizer}",
        "normalizer_params=normalizer.init(rng)",
        batch,
    )

    positions: dict[str, Any] = {
        "mask": None if mask is None else as_mask(mask),
        # A user's bias may hold Python numbers.
        "bias": None if bias is None else jax.tree.map(jnp.asarray, as_bias(bias)),
    }
    for name, function in positions.items():
        if function is not None:
            function.check(batch, *lengths)
            positions[name] = known_positions(function, lengths, dtype)
    for unknown in () if mask is None else positions["mask"].unknown_rows():
        # A NaN query makes its row NaN, unless another mask hides all of it.
        nan = jnp.where(unknown, jnp.nan, 0).astype(query.dtype)
        query = query + pad_rank(nan[..., None], query.ndim)

    dropout_rate = checked_fraction("dropout_rate", dropout_rate)
    if dropout_rate and dropout_rng is None:
        raise ValueError(
            f"dropout_rng must be a PRNG key when dropout_rate is {dropout_rate}; got None"
        )
    dropout_rng = checked_rng(dropout_rng, batch_shape=batch) if dropout_rate else None
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise ValueError(f"block_sizes must be a BlockSizes or None; got {block_sizes!r}")
    if return_statistics and not normalizer.is_softmax:
        raise ValueError(
            f"return_statistics must be False with normalizer {normalizer}, which has no logsumexp;"
            " attention_weights returns the weights themselves"
        )
    options = Options(score, block_sizes, dropout_rate, return_statistics, normalizer)
    arrays = {"query": query, "key": key, "value": value, "dropout_rng": dropout_rng}
    parameters = {"params": params, "normalizer_params": normalizer_params}
    return options, Inputs(**arrays, **parameters, **positions)


def compute_dtype(*arguments: Any) -> Any:
    """The type in which attention computes: float64 if any array of these pytrees is."""
    arrays = (leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype"))
    return accumulator_dtype(*arrays).type


def score_of_sizes(score: ScoreLike, query_dim: Any, key_dim: Any) -> tuple[Score, int, int]:
    """The score and the sizes; ValueError unless it can pair tokens of these sizes."""
    score = get_score(score)
    query_dim = check_integer("query_dim", query_dim)
    key_dim = check_integer("key_dim", key_dim)
    if score.needs_equal_dims and query_dim != key_dim:
        raise ValueError(
            f"key_dim must be {query_dim} to match score {score} with query_dim {query_dim};"
            f" got {key_dim}"
        )
    return score, query_dim, key_dim


def check_equal_dims(score: Score, query: Array, key: KeyLike) -> None:
    """Raises ValueError unless query and key have as many features, if the score needs that."""
    if score.needs_equal_dims and key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have {query.shape[-1]} features to match score {score} with query"
            f" {list(query.shape)}; got {list(key.shape)}"
        )


def _check_features(score: Score, params: Params, key: ProjectedKeys, query_dim: int) -> None:
    """Raises ValueError unless the features have the shapes that `project_key` makes."""
    length = key.shape[-2]
    features = key_feature_shapes(score, params, query_dim, key.key_dim, length)
    expected = jax.tree.map(lambda leaf: list(leaf.shape), features)
    got = key.map(lambda leaf, ndim: list(leaf.shape[leaf.ndim - ndim :])).features
    if got != expected:
        raise ValueError(
            f"key must hold the features that score {score} makes of keys {[length, key.key_dim]},"
            f" {expected}; got {got}"
        )


def checked_params(
    score: Score,
    params: Params,
    query_dim: int,
    key_dim: int,
    batch_shape: tuple[int, ...] | None,
) -> Params:
    """The score's parameters as JAX arrays; ValueError unless they match `Score.param_shapes`.

    With `batch_shape=None` they may have any batch axes.
    """
    params = score.own_params if params is None else params
    expected = score.param_shapes(params, query_dim, key_dim)
    owner = f"score {score} with query [..., T, {query_dim}] and key [..., S, {key_dim}]"
    remedy = f"params=score.init(rng, {query_dim}, {key_dim})"
    return _checked_tree("params", params, expected, owner, remedy, batch_shape)


def _checked_tree(
    argument: str,
    params: Params,
    expected: Any,
    owner: str,
    remedy: str,
    batch_shape: tuple[int, ...] | None,
) -> Params:
    """Parameters as JAX arrays; ValueError unless each has its expected shape after batch axes.

    Args:
        argument: the name of the argument.
        params: a pytree.
        expected: the same pytree with `jax.ShapeDtypeStruct`s.
        owner: what the parameters belong to, in words.
        remedy: how to make right parameters, in code.
        batch_shape: what the batch axes must broadcast to; None for any batch axes.
    """
    if jax.tree.structure(params) != jax.tree.structure(expected):  # type: ignore[operator]
        described = jax.tree.map(lambda leaf: list(leaf.shape), expected)
        got = jax.tree.map(lambda leaf: list(np.shape(leaf)), params)
        hint = f": give {remedy}" if expected else ""
        raise ValueError(f"{argument} must be {described} for {owner}; got {got or params!r}{hint}")

    def check(path, leaf, expected_leaf):
        name = f"{argument}{jax.tree_util.keystr(path)}"
        return checked_floats(name, leaf, expected_leaf.shape, batch_shape, f" for {owner}")

    return jax.tree_util.tree_map_with_path(check, params, expected)


def checked_floats(
    name: str,
    value: Any,
    core: tuple[int | str, ...],
    batch_shape: tuple[int, ...] | None,
    owner: str = "",
) -> Array:
    """`value` as a JAX array of floats; ValueError for another dtype, or as in `check_axes`."""
    return check_axes(name, float_array(name, value), core, batch_shape, owner)


def check_axes(
    name: str,
    array: Any,
    core: tuple[int | str, ...],
    batch_shape: tuple[int, ...] | None,
    owner: str = "",
) -> Any:
    """The array; ValueError unless its last axes are `core`, and the others broadcast to *B.

    Args:
        name: the name of the argument.
        array: an array, or `ProjectedKeys`.
        core: the sizes of its last axes; a letter for an axis of any size.
        batch_shape: *B; None for any batch axes, () for none.
        owner: what the array belongs to, in words.
    """
    split = array.ndim - len(core)
    sizes = zip(core, array.shape[max(split, 0) :], strict=False)
    wrong_rank = split < 0 or (split > 0 and batch_shape == () and core)
    if wrong_rank or any(size != got and not isinstance(size, str) for size, got in sizes):
        expected_axes = ", ".join([*["..."][: batch_shape != ()], *map(str, core)])
        raise ValueError(f"{name} must be [{expected_axes}]{owner}; got {list(array.shape)}")
    if batch_shape is not None and not broadcasts(array.shape[:split], batch_shape):
        raise ValueError(
            f"{name} must have batch axes that broadcast to {list(batch_shape)}; got"
            f" {list(array.shape)}"
        )
    return array


def checked_implementation(name: Any) -> str | None:
    """`name`; ValueError unless it is None or the name of an implementation."""
    if name is None or (isinstance(name, str) and name in IMPLEMENTATIONS):
        return name
    raise ValueError(
        f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}; got {name!r}"
    )
