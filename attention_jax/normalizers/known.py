"""`known_normalizer`: a normaliser of a user, traced and checked, and known by its program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import cast_floats
from attention_jax.core.programs import (
    Known,
    Part,
    PartError,
    checked_array,
    close,
    is_of_library,
    named,
    on_numbers,
    trace,
    users_errors,
)
from attention_jax.normalizers.contract import Normalizer

Array = jax.Array


def known_normalizer(normalizer: Normalizer, dtype: Any = jnp.float32) -> Normalizer:
    """The normaliser, known by its program; one of this library is returned unchanged.

    A program that was not seen before is run on a few rows: the weights must rise from 0 at -inf,
    and a row of them must sum to 1 where the normaliser says so.

    Args:
        normalizer: from `get_normalizer`.
        dtype: float32 or float64, in which it computes.

    Raises:
        ValueError: a method fails or breaks the contract of `Normalizer`; one line names it.
    """
    if type(normalizer) is Known or is_of_library(normalizer):
        return normalizer
    part = Part(
        named("normalizer", normalizer),
        "return it from init, and give normalizer_params=",
    )
    try:
        with users_errors(part, "init"):
            shapes = normalizer.param_shapes()
    except PartError as error:
        raise ValueError(f"{part.name}: {error}") from error.__cause__

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def run(params: Any, logits: Array, num_keys: Array, weights: Array) -> Any:
        def call(method: str, array: Array, *more: Any) -> Array:
            expected = f"{method} must be elementwise, {list(array.shape)} of {list(array.shape)}"
            hint = expected
            if method == "transform" and not normalizer.uses_num_keys:
                hint = "set uses_num_keys = True if it reads num_keys, which is None otherwise"
            with users_errors(part, method, hint):
                result = getattr(normalizer, method)(params, array, *more)
            result = checked_array(result, expected)
            if result.shape != array.shape or not jnp.issubdtype(result.dtype, jnp.floating):
                raise PartError(f"{expected}; got {result.dtype} {list(result.shape)}")
            return result

        transformed = call("transform", logits, num_keys if normalizer.uses_num_keys else None)
        inverse = call("inverse", weights) if normalizer.visits(dtype) else None
        return transformed, call("weight", logits), inverse

    shapes = jax.tree.map(lambda leaf: shape(*leaf.shape), shapes)
    arrays = shape(3, 5), shape(3, 1), shape(3)  # logits, number of keys, weights

    def digest() -> str:
        return trace(part, run, shapes, *arrays)

    known: Any = Known(normalizer, digest(), digest)
    _check_weights(known, dtype)
    return known


@functools.lru_cache(maxsize=512)
def _check_weights(known: Known, dtype: Any) -> None:
    """Raises ValueError unless the weights of a few rows are as `Normalizer` says."""

    normalizer: Normalizer = known.part

    def init() -> Any:
        return cast_floats(normalizer.init(jax.random.key(0)), dtype)

    name = named("normalizer", normalizer)
    params = on_numbers(init)
    logits = np.random.default_rng(0).standard_normal((4, 6)).astype(dtype) * 4
    num_keys = np.full((4, 1), 6, dtype)

    def transform(logits: Array, num_keys: Array) -> Array:
        read = num_keys if normalizer.uses_num_keys else None
        return normalizer.transform(params, logits, read)

    def weight(shifted: Array, _: Any) -> Array:
        return normalizer.weight(params, shifted)

    for name_of_method, method in (("transform", transform), ("weight", weight)):
        halves = [on_numbers(method, logits[:, i : i + 3], num_keys) for i in (0, 3)]
        if not close(on_numbers(method, logits, num_keys), np.hstack(halves)):
            raise ValueError(
                f"{name} must have a {name_of_method} that is elementwise; it depends on other"
                " logits of the row"
            )
    # The largest shifted logit is that of a weight of 1, where the weights of a row sum to 1.
    top = 20.0
    if normalizer.visits(dtype):
        top = float(on_numbers(lambda weight: normalizer.inverse(params, weight), dtype(1.0)))
        if not np.isfinite(top):
            raise ValueError(
                f"{name} must have a finite inverse(1), the shifted logit of a single key; got"
                f" {top}: set sums_to_one = False if no weight reaches 1"
            )
    shifted = np.append(-np.inf, np.linspace(top - 30, top, 61)).astype(dtype)
    weights = on_numbers(lambda shifted: normalizer.weight(params, shifted), shifted)
    for wrong, problem in (
        (np.isnan(weights), "must be numbers"),
        (weights < 0, "must not be negative"),
        (weights[:1] != 0, "must be 0 at -inf, where a key is masked"),
        (np.diff(weights) < -1e-6 * np.abs(weights[1:]), "must not fall with the logit"),
    ):
        if wrong.any():
            worst = int(np.argmax(wrong))
            raise ValueError(
                f"{name}: weights {problem}; weight({shifted[worst]:.4g}) is {weights[worst]:.4g}"
            )
    if normalizer.sums_to_one:
        sums = on_numbers(lambda logits: normalizer(params, logits).sum(1), logits)
        if not np.allclose(sums, 1, atol=1e-3):
            worst = sums[np.argmax(np.abs(sums - 1))]
            raise ValueError(
                f"{name} must have weights that sum to 1; a row sums to"
                f" {worst:.4g}: inverse must be the inverse of weight, or set sums_to_one = False"
            )
