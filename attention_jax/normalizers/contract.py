"""`Normalizer`, the base class of what turns a row of logits into weights.

Every normaliser here applies one function of one number to the logits of a row, each shifted by the
same threshold:

    w_j = weight(x_j - tau).

Softmax has exp, sigmoid attention the logistic function, entmax a power of a rectified line. The
threshold makes the weights sum to 1 (softmax: tau = logsumexp), or it is 0 (sigmoid). So all have
gradients of one form. With s_j = weight'(x_j - tau) and a cotangent dw,

    dx_j = s_j (dw_j - c),    c = sum_j s_j dw_j / sum_j s_j,  or 0 without a threshold.

For output O = sum_j w_j v_j, dw_j = dO . v_j, so c = dO . (sum_j s_j v_j / sum_j s_j). That vector,
here called the *mean*, is the output itself for softmax (s = w).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.programs import is_of_library, is_of_this_package
from attention_jax.normalizers.row_state import ElementwiseState, RowShift
from attention_jax.normalizers.threshold import find_shift, threshold_of_rows

Array = jax.Array
Params = Any  # a pytree of arrays; {} when there is nothing to learn
# fold(update, carry): the last carry after `carry = update(carry, logits)` for every tile of keys.
Fold = Callable[[Callable[[Any, Array], Any], Any], Any]


# What follows from the methods that a user defines.
_FOLLOWS = (
    "__call__",
    "empty_state",
    "prepared",
    "safe_weight",
    "sink_logit",
    "tile_weights",
    "transformed",
    "visits",
    "weights_of_rows",
    "with_shift",
    "with_sink",
)


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """The base class of normalisers: a subclass is a frozen dataclass that defines `weight`.

        w_j = weight(x_j - tau),    x_j = transform(logits_j)

    All functions are elementwise. Masked logits are -inf, before and after `transform`.

    A subclass may define these class variables, or properties where they depend on its fields:

    sums_to_one: whether the threshold tau makes the weights of a row sum to 1. A search finds it,
        for which the subclass defines `inverse`. If False, tau is 0.
    convex: whether inverse(sum_j weight(x_j - tau)) is convex in tau. If True, Newton's method
        converges from below, and the search visits the keys less often.
    uses_num_keys: whether `transform` reads the number of keys that each row may attend to.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Softplus(Normalizer):
    ...     def weight(self, params, shifted):
    ...         return jax.nn.softplus(shifted)
    ...     def inverse(self, params, weight):
    ...         return jnp.log(jnp.expm1(weight))
    >>> Softplus()({}, jnp.array([[0.0, 0.0, 5.0]])).round(1)
    Array([[0., 0., 1.]], dtype=float32)
    """

    sums_to_one: ClassVar[bool] = True
    convex: ClassVar[bool] = False
    uses_num_keys: ClassVar[bool] = False
    has_statistics: ClassVar[bool] = False  # whether logsumexp and entropy exist: softmax alone

    def __init_subclass__(cls) -> None:
        """Raises TypeError if a user's class replaces what follows from `weight`, or inherits it.

        The implementations would give different answers.
        """
        for name in _FOLLOWS:
            inherited = getattr(cls, name) is not getattr(Normalizer, name)
            replaced = name in vars(cls)
            changed = any(part in vars(cls) for part in ("weight", "inverse"))
            if not is_of_this_package(cls) and (replaced or (inherited and changed)):
                base = "" if replaced else ", which is right for the weights of its base class"
                raise TypeError(
                    f"normalizer {cls.__name__} must be a subclass of Normalizer that defines"
                    f" weight, inverse and transform; it has another {name}{base}"
                )

    # --- what a subclass defines ---

    def init(self, rng: Array) -> Params:
        """Initial parameters, {} if there are none to learn."""
        del rng
        return {}

    def weight(self, params: Params, shifted: Array) -> Array:
        """The weights of shifted logits, elementwise: >= 0, increasing, 0 with slope 0 at -inf."""
        raise NotImplementedError  # see `check_contract`

    def inverse(self, params: Params, weight: Array) -> Array:
        """The shifted logit with this weight, 0 < weight <= 1, if the weights sum to one."""
        raise NotImplementedError  # see `check_contract`

    def transform(self, params: Params, logits: Array, num_keys: Array | None) -> Array:
        """The logits x that are normalised, an elementwise function of the given logits.

        Args:
            params: those of the normaliser.
            logits: [t, s], finite.
            num_keys: float [t, 1], the keys that each row may attend to, at least 1; None unless
                `uses_num_keys`.
        """
        del params, num_keys
        return logits

    # --- what the implementations call; the defaults follow from the above ---

    def sink_logit(self, params: Params) -> Array | None:
        """The logit [] of a sink, one more key whose value is 0; None for no sink."""
        del params
        return None

    def __call__(self, params: Params, logits: Array, mask: Array | None = None) -> Array:
        """The weights [T, S] of logits [T, S], materialised and differentiable by JAX.

        Args:
            params: those of the normaliser.
            logits: float [T, S]; masked entries may hold anything.
            mask: bool [T, S], True = may attend; None for all.
        """
        return self.weights_of_rows(params, self.prepared(params, logits, mask), mask)

    def weights_of_rows(self, params: Params, logits: Array, mask: Array | None) -> Array:
        """The weights [T, S] of logits that are prepared."""
        del mask
        shifted = logits
        if self.sums_to_one:
            largest = jax.lax.stop_gradient(jnp.max(logits, axis=1, initial=-jnp.inf))
            shifted = logits - jnp.where(largest == -jnp.inf, 0, largest)[:, None]
            shifted = shifted - threshold_of_rows(self, params, shifted)[:, None]
        # A masked entry reads no cotangent: 0 times NaN would be NaN.
        allowed = logits > -jnp.inf
        weights = self.weight(params, jnp.where(allowed, shifted, 0))
        return jnp.where(allowed | jnp.isnan(logits), weights, 0)

    def safe_weight(self, params: Params, shifted: Array) -> Array:
        """`weight`, with derivative 0 at -inf in parameters too, where 0 * -inf would be NaN."""
        if not jax.tree.leaves(params):
            return self.weight(params, shifted)
        masked = shifted == -jnp.inf
        return jnp.where(masked, 0, self.weight(params, jnp.where(masked, 0, shifted)))

    def prepared(self, params: Params, logits: Array, mask: Array | None) -> Array:
        """The transformed logits [T, S], -inf where masked."""
        num_keys = count_keys(mask, logits.shape, logits.dtype) if self.uses_num_keys else None
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        return self.transformed(params, logits, num_keys)

    def with_sink(
        self, params: Params, logits: Array, mask: Array | None
    ) -> tuple[Array, Array | None]:
        """Logits and mask [T, S] with one more column if there is a sink."""
        del params
        return logits, mask

    def transformed(
        self, params: Params, logits: Array, num_keys: Array | None, *, finite: bool = False
    ) -> Array:
        """`transform` of logits [t, s], with -inf kept, and num_keys [t].

        `finite` says that no logit is -inf, which saves time.
        """
        if _owner(self, "transform") is Normalizer:
            return logits
        if num_keys is not None:
            num_keys = jnp.maximum(num_keys, 1)[:, None]
        if finite:
            return self.transform(params, logits, num_keys)
        masked = logits == -jnp.inf
        result = self.transform(params, jnp.where(masked, 0, logits), num_keys)
        return jnp.where(masked, -jnp.inf, result)

    def visits(self, dtype: Any) -> int:
        """How often the search for the thresholds visits all keys; 0 for no search."""
        if not self.sums_to_one:
            return 0
        double = jnp.dtype(dtype) == jnp.float64
        if self.convex:
            return 16 if double else 12
        return 72 if double else 36

    def empty_state(
        self, params: Params, rows: int, value_dim: int, dtype: Any, *, statistics: bool
    ) -> Any:
        """The state of `rows` queries before their first key; see `row_state.RowState`."""
        del params, statistics
        return ElementwiseState.empty(rows, value_dim, dtype, slopes=self.sums_to_one)

    def with_shift(
        self, params: Params, fold: Fold, state: Any, num_keys: int, *, differentiable: bool
    ) -> Any:
        """The empty state with the shift of each row, for normalisers with `visits`.

        Args:
            params: those of the normaliser.
            fold: visits all keys.
            state: from `empty_state`.
            num_keys: S, an upper bound on the keys of a row.
            differentiable: whether JAX differentiates the result.
        """
        shift = find_shift(self, params, fold, state.total, num_keys, differentiable)
        return state._replace(shift=shift)

    def tile_weights(self, params: Params, logits: Array, shift: RowShift) -> Array:
        """The weights [t, s] of one tile of transformed logits, before the rows' divisors."""
        return self.safe_weight(params, shift.shifted(logits))

    def check_contract(self) -> None:
        """Raises ValueError unless the methods that the normaliser needs are defined."""
        missing = None
        if _owner(self, "weight") is Normalizer:
            missing = "weight(params, shifted)"
        elif self.visits(jnp.float32) and _owner(self, "inverse") is Normalizer:
            missing = "inverse(params, weight), or sums_to_one = False"
        if missing is not None:
            raise ValueError(f"normalizer {type(self).__name__} must define {missing}")

    def param_shapes(self) -> Params:
        """The shapes of the parameters, as a pytree of `jax.ShapeDtypeStruct`."""
        shapes = _init_shapes if is_of_library(self) else _init_shapes.__wrapped__
        return shapes(self)


@functools.lru_cache(maxsize=256)
def _init_shapes(normalizer: Normalizer) -> Params:
    return jax.eval_shape(normalizer.init, jax.random.key(0))


def count_keys(mask: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    """The number of keys that each row may attend to, float [T]."""
    if mask is None:
        return jnp.full(shape[0], shape[1], dtype)
    return jnp.sum(jnp.broadcast_to(mask, shape), axis=1).astype(dtype)


def _owner(normalizer: Normalizer, name: str) -> type:
    """The class that defines the method `name` of a normaliser."""
    return next(cls for cls in type(normalizer).__mro__ if name in vars(cls))
