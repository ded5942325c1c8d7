"""`known_normalizer`: a normaliser of a user, traced and checked, and known by its program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import cast_floats
from attention_jax.core.names import is_of_library
from attention_jax.normalizers import LogScaled
from attention_jax.normalizers.contract import BoundNormalizer, Normalizer
from attention_jax.normalizers.threshold import shifted_rows
from attention_jax.parts.programs import Known, Part, is_array, is_users, is_wide
from attention_jax.parts.samples import close, on_numbers

Array = jax.Array

_FACTS = ("sums_to_one", "convex", "steep", "uses_num_keys", "is_softmax")
_NUM_KEYS = "set uses_num_keys = True if it reads num_keys, which is None otherwise"


def known_normalizer(
    normalizer: Normalizer, dtype: Any = jnp.float32, lengths: tuple[Any, Any] | None = None
) -> Normalizer:
    """The normaliser, known by its program; one of this library is returned unchanged.

    A program that was not seen before is run on a few rows: the weights must rise from 0 at -inf,
    and a row of them must sum to 1 where the normaliser says so.

    Args:
        normalizer: from `get_normalizer`.
        dtype: float32 or float64, in which it computes.
        lengths: T and S of the call; None outside of one.

    Raises:
        ValueError: a method fails or breaks the contract of `Normalizer`; one line names it.
    """
    if type(normalizer) is Known or is_of_library(normalizer):
        return normalizer
    part = Part("normalizer", normalizer, "return it from init, and give normalizer_params=")
    for each in _with_inner(normalizer):
        part.check_signatures(each)

    def elementwise(name: str, method: Any, params: Any, array: Array, *others: Any) -> Array:
        contract = (
            f"{name} must be elementwise, {list(array.shape)} of {list(array.shape)}, in"
            f" {jnp.dtype(dtype)} or more"
        )
        blind = name == "transform" and not normalizer.uses_num_keys
        cure = _NUM_KEYS if blind else contract
        result = part.call(name, method, params, array, *others, cure=cure)
        fits = is_array(result, jnp.floating) and result.shape == array.shape
        part.require(fits and is_wide(result, dtype), contract, result)
        return result

    def program(params: Any, logits: Array, num_keys: Array, weights: Array) -> Any:
        counts = num_keys if normalizer.uses_num_keys else None
        transformed = elementwise("transform", normalizer.transform, params, logits, counts)
        results = [transformed, elementwise("weight", normalizer.weight, params, logits)]
        if normalizer.searches:
            results.append(elementwise("inverse", normalizer.inverse, params, weights))
        return results

    init_shapes = part.call("init", normalizer.param_shapes)

    def arguments(queries: Any, keys: Any) -> Any:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), init_shapes)
        shapes = (queries, keys), (queries, 1), (queries,)
        return params, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)

    return part.known(
        program,
        arguments,
        ((3, 5), lengths),
        lambda: _check_weights(part, normalizer, dtype),
        normalizer.init,
        ((3, 4),),
        alone=any(is_users(each, "init") for each in _with_inner(normalizer)),
        tile_of=lambda _, size, params, rows, *__: (*rows.shape, size[1])[:2],
        facts=tuple(getattr(normalizer, name) for name in _FACTS),
    )


def _with_inner(normalizer: Normalizer) -> list[Normalizer]:
    """A normaliser, and the one inside of it."""
    inner = _with_inner(normalizer.normalizer) if isinstance(normalizer, LogScaled) else []
    return [normalizer, *inner]


def _check_weights(part: Part, normalizer: Normalizer, dtype: Any) -> None:
    """Raises ValueError unless the weights of a few rows are as `Normalizer` says."""
    params = on_numbers(lambda: cast_floats(normalizer.init(jax.random.key(0)), dtype))
    bound = BoundNormalizer(normalizer, params)
    logits = np.random.default_rng(0).standard_normal((4, 6)).astype(dtype) * 4
    logits[0] = 0  # equal logits, whose threshold comes from `inverse` alone

    def transform(logits: Array) -> Array:
        num_keys = jnp.full(len(logits), 6, dtype) if normalizer.uses_num_keys else None
        return bound.transform(logits, num_keys)

    for name, method in (("transform", transform), ("weight", bound.weight)):
        part.require(
            close(on_numbers(method, logits)[:, 3:], on_numbers(method, logits[:, 3:])),
            f"it must have a {name} that is elementwise; it depends on other logits of the row",
        )
    # Where the weights of a row sum to 1, no shifted logit exceeds inverse(1).
    top = float(on_numbers(bound.inverse, dtype(1.0))) if normalizer.searches else 20.0
    part.require(
        bool(np.isfinite(top)),
        f"it must have a finite inverse(1), the shifted logit of a single key; got {top}: set"
        " sums_to_one = False if no weight reaches 1",
    )
    shifted = np.append(-np.inf, np.linspace(top - 30, top, 61)).astype(dtype)
    # The user's own method: `BoundNormalizer.weight` gives a masked key the weight 0 without it.
    weights = on_numbers(lambda x: normalizer.weight(params, x), shifted)
    for wrong, problem in (
        (np.isnan(weights), "must be numbers"),
        (weights < 0, "must not be negative"),
        (weights[:1] != 0, "must be 0 at -inf, where a key is masked"),
        (np.diff(weights) < -1e-6 * np.abs(weights[1:]), "must not fall with the logit"),
    ):
        worst = np.argmax(wrong)
        part.require(
            not wrong.any(),
            f"weights {problem}; weight({shifted[worst]:.4g}) is {weights[worst]:.4g}",
        )
    if not normalizer.searches:
        return

    def sums_of(logits: Array) -> Array:
        return bound.weight(shifted_rows(bound, transform(logits))).sum(1)

    sums = on_numbers(sums_of, logits)
    worst = np.argmax(np.abs(sums - 1))
    part.require(
        np.allclose(sums, 1, atol=1e-3),
        f"it must have weights that sum to 1; a row sums to {sums[worst]:.4g}: inverse must be the"
        " inverse of weight, or set sums_to_one = False",
    )
