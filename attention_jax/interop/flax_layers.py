"""An `attention_fn` with any score, for the attention layers of Flax (NNX and Linen)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype

from attention_jax.core.arrays import any_array
from attention_jax.core.checks import checked_rng
from attention_jax.functional.attention import weights_of
from attention_jax.functional.checks import checked_implementation
from attention_jax.functional.heads import ungroup_heads
from attention_jax.interop.layout import attention_by_head, checked_heads, grouped
from attention_jax.positions.contract import Mask
from attention_jax.positions.masks import causal_mask
from attention_jax.scores import Params, ScoreLike, get_score
from attention_jax.tiles import BlockSizes

Array = jax.Array


def flax_attention_fn(
    score: ScoreLike = "scaled",
    params: Params = None,
    *,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> nnx.Module:
    """An `attention_fn` for `flax.nnx.MultiHeadAttention` with any score.

    The function is an `nnx.Module`, so its parameters are part of the model that contains it:
    `nnx.split`, optimisers and checkpoints include them. Two layers with the same `attention_fn`
    share its parameters. With "scaled" it equals `flax.nnx.dot_product_attention`, except for
    queries whose keys are all masked (see `dot_product_attention`).

    It supports all arguments that Flax passes: `mask` (any dtype, not 0 = may attend; or a `Mask`,
    so that `layer(x, mask=local_mask(8, 0))` stores no table), `is_causal`, `bias`, `dtype`, the
    caches of `decode`, grouped-query attention, dropout, and `sow_weights` (also of a layer of
    Linen), which stores the weights before dropout, and so materialises them. A mask with a single
    query and several keys is that of a step of a cache, where `is_causal` adds nothing to it.
    `broadcast_dropout` drops the same pairs in every example and head, as in Flax, but not the
    pairs that Flax drops. `precision` has no effect: `jax.default_matmul_precision` sets that of
    float32 products.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function; Dq and Dk are the
            layer's head_dim.
        params: the score's parameters; leaves may have leading axes that broadcast to [*B, N].
            Arrays become `nnx.Param`; an `nnx.Variable` is used as it is, so it may be shared.
        implementation, block_sizes: as in `attention_jax.attention`.

    Returns:
        an `nnx.Module`; when Flax calls it, it returns [*B, T, N, Dv].

    Raises:
        ValueError: unknown score or implementation; when called: as in `attention`.

    >>> score = get_score("additive")  # 4 heads of size 8, each with its own parameters:
    >>> params = jax.vmap(lambda rng: score.init(rng, 8, 8))(jax.random.split(jax.random.key(0), 4))
    >>> attend = flax_attention_fn(score, params)
    >>> layer = nnx.MultiHeadAttention(4, 32, attention_fn=attend, rngs=nnx.Rngs(1))
    >>> nnx.state(layer, nnx.Param)["attention_fn"]["params"]["v"].shape
    (4, 8)

    A layer of Linen does not train what its `attention_fn` holds: a module around it declares the
    parameters, and makes the function of them.

    >>> from flax import linen
    >>> class Layer(linen.Module):
    ...     @linen.compact
    ...     def __call__(self, x):
    ...         attend = flax_attention_fn(score, self.param("score", score.init, 8, 8))
    ...         return linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attend)(x)
    >>> Layer().init(jax.random.key(0), jnp.ones((2, 5, 32)))["params"]["score"]["v"].shape
    (8,)
    """
    return _FlaxAttention(
        get_score(score), params, checked_implementation(implementation), block_sizes
    )


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


class _FlaxAttention(nnx.Module):
    """The `attention_fn` that `flax_attention_fn` returns."""

    def __init__(self, score, params, implementation, block_sizes):
        def as_variable(leaf):
            return leaf if _is_variable(leaf) else nnx.Param(jnp.asarray(leaf))

        params = score.own_params if params is None else params
        self.params = nnx.data(jax.tree.map(as_variable, params, is_leaf=_is_variable))
        self.score = score
        self.implementation = implementation
        self.block_sizes = block_sizes

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Mask | Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        promote_dtype: Any = flax_promote_dtype,
        is_causal: bool = False,
    ) -> Array:
        """Takes the arguments of `flax.nnx.dot_product_attention`, in the same order."""
        named = {"query": query, "key": key, "value": value}
        arrays = tuple(any_array(name, array) for name, array in named.items())
        query, key, value = promote_dtype(arrays, dtype=dtype)
        params = jax.tree.map(lambda leaf: leaf[...], self.params, is_leaf=_is_variable)
        if mask is not None and not isinstance(mask, Mask):
            mask = jnp.asarray(mask).astype(bool)  # Flax's own mask makers give float32
        # In a step of a cache the mask that Flax made is causal, and the query is not the first.
        is_step = mask is not None and query.shape[-3] == 1 < key.shape[-3]
        masks = mask, causal_mask() if is_causal and not is_step else None
        rate = 0.0 if deterministic else dropout_rate
        if broadcast_dropout and rate:
            # `attention` would split one key over the batch and the heads; here they share it.
            dropout_rng = jax.random.split(checked_rng(dropout_rng), (1,) * (query.ndim - 1))
        tokens = query, key, value
        score, inputs = checked_heads(self.score, params, tokens, masks, bias, ndim=query.ndim)
        dropout = {"dropout_rate": rate, "dropout_rng": dropout_rng}
        call = grouped(score, inputs, **dropout, block_sizes=self.block_sizes)
        if module is not None:
            # The name of the collection in Linen; in NNX it stands for `nnx.Intermediate`.
            weights = ungroup_heads(weights_of(*call), query.ndim - 3)
            module.sow("intermediates", "attention_weights", weights)
        return attention_by_head(*call, self.implementation)
