"""`known_normalizer`: a normaliser of a user, traced and checked, and known by its program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import cast_floats
from attention_jax.core.names import is_of_library, nested_parts
from attention_jax.normalizers.contract import BoundNormalizer, Normalizer, Params
from attention_jax.normalizers.threshold import shifted_rows
from attention_jax.parts.programs import Known, Size, StaticContract
from attention_jax.parts.samples import close, on_numbers
from attention_jax.parts.user_code import is_array

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
    return NormalizerContract(normalizer, dtype).known(lengths)


class NormalizerContract(StaticContract):
    """What a normaliser must keep."""

    sampled = ((3, 4),)

    def __init__(self, normalizer: Normalizer, dtype: Any):
        remedy = "return it from init, and give normalizer_params="
        super().__init__("normalizer", normalizer, remedy)
        for each in nested_parts(normalizer):
            self.check_signatures(each)
        self.dtype, self.params = dtype, self.call("init", normalizer.param_shapes)
        self.facts = tuple(getattr(normalizer, name) for name in _FACTS)

    def init(self, rng: Array) -> Params:
        return self.part.init(rng)

    def arrays(self, size: Size) -> Any:
        return size, (size[0], 1), (size[0],)

    def results(self, params: Any, logits: Array, num_keys: Array, weights: Array) -> Any:
        normalizer = self.part
        counts = num_keys if normalizer.uses_num_keys else None
        transformed = self.elementwise("transform", normalizer.transform, params, logits, counts)
        results = [transformed, self.elementwise("weight", normalizer.weight, params, logits)]
        if normalizer.searches:
            results.append(self.elementwise("inverse", normalizer.inverse, params, weights))
        return results

    def elementwise(self, name: str, method: Any, params: Any, array: Array, *others: Any) -> Array:
        """The result of a method of the user, as elementwise as shapes can tell."""
        contract = (
            f"{name} must be elementwise, {list(array.shape)} of {list(array.shape)}, in"
            f" {jnp.dtype(self.dtype)} or more"
        )
        blind = name == "transform" and not self.part.uses_num_keys
        cure = _NUM_KEYS if blind else contract
        result = self.call(name, method, params, array, *others, cure=cure)
        fits = is_array(result, jnp.floating, self.dtype) and result.shape == array.shape
        self.require(fits, contract, result)
        return result

    def tile_size_of(self, name: str, arguments: Any, size: Size) -> Size:
        return (*arguments[1].shape, size[1])[:2]

    def check_numbers(self) -> None:
        """Raises ValueError unless the weights of a few rows are as `Normalizer` says."""
        normalizer, dtype = self.part, self.dtype
        params = on_numbers(lambda: cast_floats(normalizer.init(jax.random.key(0)), dtype))
        bound = BoundNormalizer(normalizer, params)
        logits = np.random.default_rng(0).standard_normal((4, 6)).astype(dtype) * 4
        logits[0] = 0  # equal logits, whose threshold comes from `inverse` alone

        def transform(logits: Array) -> Array:
            num_keys = jnp.full(len(logits), 6, dtype) if normalizer.uses_num_keys else None
            return bound.transform(logits, num_keys)

        for name, method in (("transform", transform), ("weight", bound.weight)):
            self.require(
                close(on_numbers(method, logits)[:, 3:], on_numbers(method, logits[:, 3:])),
                f"it must have a {name} that is elementwise; it depends on other logits of the row",
            )
        # Where the weights of a row sum to 1, no shifted logit exceeds inverse(1).
        top = float(on_numbers(bound.inverse, dtype(1.0))) if normalizer.searches else 20.0
        self.require(
            bool(np.isfinite(top)),
            f"it must have a finite inverse(1), the shifted logit of a single key; got {top}: set"
            " sums_to_one = False if no weight reaches 1",
        )
        shifted = np.append(-np.inf, np.linspace(top - 30, top, 61)).astype(dtype)
        # Of the user's method: `BoundNormalizer.weight` gives a masked key the weight 0 by itself.
        weights = on_numbers(lambda x: normalizer.weight(params, x), shifted)
        for wrong, problem in (
            (np.isnan(weights), "must be numbers"),
            (weights < 0, "must not be negative"),
            (weights[:1] != 0, "must be 0 at -inf, where a key is masked"),
            (np.diff(weights) < -1e-6 * np.abs(weights[1:]), "must not fall with the logit"),
        ):
            worst = np.argmax(wrong)
            self.require(
                not wrong.any(),
                f"weights {problem}; weight({shifted[worst]:.4g}) is {weights[worst]:.4g}",
            )
        if normalizer.searches:
            sums = on_numbers(
                lambda x: bound.weight(shifted_rows(bound, transform(x))).sum(1), logits
            )
            worst = np.argmax(np.abs(sums - 1))
            self.require(
                np.allclose(sums, 1, atol=1e-3),
                f"it must have weights that sum to 1; a row sums to {sums[worst]:.4g}: inverse must"
                " be the inverse of weight, or set sums_to_one = False",
            )
