"""Attention over sequences that are cut up over many devices: context parallelism."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from attention_jax.core.explicit_axes import on_automatic_axes
from attention_jax.functional.checks import check_block_sizes, checked_dropout, checked_inputs
from attention_jax.implementations import BlockSizes, Inputs, Options, ring
from attention_jax.implementations.batching import explicit_batch_spec, vmap_over_batch
from attention_jax.implementations.choice import chosen_block_sizes
from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import DEFAULT_SCORE, Params, ProjectedKeys, ScoreLike, get_score

Array = jax.Array


@overload
def ring_attention(
    query: Array, key: Array, value: Array, *, mesh: Mesh, axis_name: str = ...,
    score: ScoreLike = ..., params: Params = ..., mask: Mask | Array | None = ...,
    bias: Bias | Array | None = ..., dropout_rate: float = ..., dropout_rng: Array | None = ...,
    block_sizes: BlockSizes | None = ..., return_statistics: Literal[False] = ...,
) -> Array: ...  # fmt: skip
@overload
def ring_attention(
    query: Array, key: Array, value: Array, *, mesh: Mesh, axis_name: str = ...,
    score: ScoreLike = ..., params: Params = ..., mask: Mask | Array | None = ...,
    bias: Bias | Array | None = ..., dropout_rate: float = ..., dropout_rng: Array | None = ...,
    block_sizes: BlockSizes | None = ..., return_statistics: Literal[True],
) -> tuple[Array, AttentionStatistics]: ...  # fmt: skip
def ring_attention(
    query,
    key,
    value,
    *,
    mesh,
    axis_name="context",
    score=DEFAULT_SCORE,
    params=None,
    mask=None,
    bias=None,
    dropout_rate=0.0,
    dropout_rng=None,
    block_sizes=None,
    return_statistics=False,
):
    """`attention`, with the sequences cut up over the devices of one axis of a mesh.

        output_i = sum_j softmax_j(score(query_i, key_j) + bias_ij where mask_ij) value_j

    Each of n devices keeps T / n queries, while the keys and values of all come by in n steps, one
    device's in each. No device ever holds more than its n-th part of the tokens, of what is
    computed from them, and of their gradients; no [T, S] array exists. For T and S up to n times as
    long as those that one device has room for.

    Communication: in each step a device sends (S / n) (Fk + Dv) numbers in the compute dtype to the
    next one, Fk the size of what the score's `project` makes of a key; in the backward pass also
    their gradients, as many. Before and after, tokens and output are sent once to an order in which
    a causal mask leaves every device the same work, and back.

    The result is that of `attention`, whatever the number of devices: the same numbers up to
    rounding, the same weights dropped, the same contract for padding and rows without keys.

    Args:
        query: float [*B, T, Dq], in natural order, with T cut evenly over `axis_name`, or to be.
        key: float [*B, S, Dk]; the same.
        value: float [*B, S, Dv]; the same.
        mesh: the devices. Batch axes may be cut over its other axes.
        axis_name: the axis of the mesh over which sequences are cut, n devices.
        score: as in `attention`; its `project` sees the tokens of one device, in another order.
        params: as in `attention`; every device has them, and their gradients are summed over all.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]. Its arrays are held by every
            device: a function of positions (`causal_mask`, `segment_mask`, ...) is small, a table
            is not.
        bias: a `Bias`, or float broadcastable to [*B, T, S]; the same.
        dropout_rate: probability that a weight is dropped, 0 <= rate < 1.
        dropout_rng: one PRNG key, needed when `dropout_rate` > 0.
        block_sizes: tile sizes; None picks them.
        return_statistics: also return each row's logsumexp, entropy (nats) and largest logit.

    Returns:
        output [*B, T, Dv] in the query's dtype, cut as the query is; or (output,
        `AttentionStatistics`), the statistics [*B, T] in the compute dtype.

    It has every derivative that `attention` has, in any mode and order. Forward mode and second and
    higher derivatives keep the keys of every step: memory is linear in S, but falls by less than n.
    `analysis.capture` does not see it.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure; T or S is no multiple of
            2 n; the mesh has no such axis.

    >>> import jax.numpy as jnp
    >>> from attention_jax import causal_mask
    >>> mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    >>> tokens = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> ring_attention(tokens, tokens, tokens, mesh=mesh, mask=causal_mask(-1))
    Array([[0., 0.],
           [1., 0.]], dtype=float32)

    Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3
    (there for scaled dot); the order is `implementations/zigzag.py`'s.
    """
    score = get_score(score)
    check_block_sizes(block_sizes)
    dropout_rate, dropout_rng = checked_dropout(dropout_rate, dropout_rng)
    if isinstance(key, ProjectedKeys):
        raise ValueError("key must be an array, which ring_attention projects; got ProjectedKeys")
    inputs = checked_inputs(score, query, key, value, params, mask, bias)
    inputs = inputs._replace(dropout_rng=dropout_rng)
    _check_cut(mesh, axis_name, inputs)
    block_sizes = block_sizes or chosen_block_sizes(score, inputs)
    options = Options(score, block_sizes, dropout_rate, return_statistics)
    output, statistics = _attend(options, mesh, axis_name, inputs)
    return (output, statistics) if return_statistics else output


def _check_cut(mesh: Any, axis_name: str, inputs: Inputs) -> None:
    """Raises ValueError unless every device can have two whole chunks of each sequence."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh; got {mesh!r}")
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name must be an axis of mesh, one of {', '.join(mesh.axis_names)};"
            f" got {axis_name!r}"
        )
    chunks = 2 * mesh.shape[axis_name]
    for name, array in (("query", inputs.query), ("key", inputs.key)):
        length = array.shape[-2]
        if length == 0 or length % chunks:
            raise ValueError(
                f"{name} must have a length that is a multiple of {chunks}, two chunks for each"
                f" device of mesh axis {axis_name!r}; got {list(array.shape)}: pad it, and hide the"
                " padding by a padding_mask"
            )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(options: Options, mesh: Mesh, axis_name: str, inputs: Inputs):
    def of_one_device(inputs: Inputs):
        attend = functools.partial(ring.attend, options, axis_name)
        return vmap_over_batch(options.score, attend, inputs)

    def cut(array: Array) -> PartitionSpec:
        return PartitionSpec(*[None] * (array.ndim - 2), axis_name)

    tokens, others = inputs[:3], inputs[3:]
    specs: list[Any] = [*jax.tree.map(cut, tokens), *(PartitionSpec() for _ in others)]

    def of_all_devices(inputs: Inputs):
        context = jax.sharding.get_abstract_mesh()  # Explicit axes are Auto in it
        automatic = (AxisType.Auto,) * len(mesh.axis_names)
        known = Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
        return jax.shard_map(
            of_one_device,
            mesh=known if context.empty else context,
            in_specs=(Inputs(*specs),),
            out_specs=cut(inputs.query),
            axis_names={axis_name},  # other axes cut the batch, without our help
            check_vma=False,  # its sums over devices would stand inside the loops over tiles
        )(inputs)

    spec = PartitionSpec(*explicit_batch_spec(inputs), axis_name)
    return on_automatic_axes(of_all_devices, spec, inputs)
