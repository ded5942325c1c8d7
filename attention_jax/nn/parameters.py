"""Parameters of scores and normalisers as Flax modules hold them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.arrays import accumulator_dtype, cast_floats, float_array
from attention_jax.functional.checks import check_axes
from attention_jax.normalizers import Normalizer
from attention_jax.parts.user_code import UserCode
from attention_jax.scores import Params, Score

Dtype = Any  # any argument of `jnp.dtype`
KERNEL_INIT = nnx.initializers.lecun_normal()  # both as in `nnx.Linear`
BIAS_INIT = nnx.initializers.zeros_init()


def score_params(params: Params, dtype: Dtype) -> Any:
    """A pytree of arrays as a module's attribute, each array an `nnx.Param`, its floats cast."""
    return nnx.data(jax.tree.map(nnx.Param, cast_floats(params, dtype)))


def normalizer_params(
    normalizer: Normalizer, rngs: nnx.Rngs, dtype: Dtype, *, num_heads: int | None = None
) -> Any:
    """The initial parameters of a normaliser as a module's attribute, [num_heads, ...] if given.

    A normaliser without parameters takes no PRNG key, so that it changes no other parameter.
    """
    if not jax.tree.leaves(normalizer.param_shapes()):
        return nnx.data(normalizer.param_shapes())
    rng, init = rngs.params(), normalizer.init
    if num_heads is not None:
        rng, init = jax.random.split(rng, num_heads), jax.vmap(normalizer.init)
    return score_params(init(rng), dtype)


def values_of(params: Any, dtype: Dtype | None = None) -> Params:
    """The arrays in a pytree of `nnx.Param`; their floats cast unless `dtype` is None."""
    values = jax.tree.map(
        lambda param: param[...], params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
    )
    return values if dtype is None else cast_floats(values, dtype)


def check_dtypes(**dtypes: Any) -> None:
    """Raises ValueError unless each is None or a floating-point dtype."""
    for name, dtype in dtypes.items():
        try:
            is_float = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        except TypeError:
            is_float = False
        if not is_float:
            raise ValueError(f"{name} must be a floating-point dtype; got {dtype!r}")


def check_rngs(rngs: Any) -> None:
    """Raises ValueError unless they are streams that initial parameters can be drawn from."""
    if not (isinstance(rngs, nnx.Rngs) and {"params", "default"} & set(rngs)):
        got = sorted(rngs) if isinstance(rngs, nnx.Rngs) else type(rngs).__name__
        raise ValueError(f"rngs must have a stream 'params', as nnx.Rngs(0) has; got {got}")


def initial_score_params(score: Score, rng: jax.Array, dims: tuple[int, int]) -> Params:
    """What the score's `init` makes; ValueError, in one line, if a user's cannot be called."""
    part = UserCode("score", score, "")
    cure = "init must be a function of (rng, query_dim, key_dim)"
    part.check_signatures(score)
    return part.call("init", score.init, rng, *dims, cure=cure)


def layer_norm(dim: int, dtype: Dtype | None, **options: Any) -> nnx.LayerNorm:
    """A layer normalisation in at least float32, for a module that casts to `dtype` unless None.

    Flax's default variance, E[x^2] - E[x]^2, has no digits where the mean of x is large.
    """
    wide = None if dtype is None else accumulator_dtype(jnp.empty((), dtype))
    return nnx.LayerNorm(dim, dtype=wide, use_fast_variance=False, **options)


def checked_tokens(name: str, tokens: Any, dim: int) -> jax.Array:
    """The tokens as an array; ValueError unless they are float [..., length, dim]."""
    return check_axes(name, float_array(name, tokens), ("length", dim), None)
