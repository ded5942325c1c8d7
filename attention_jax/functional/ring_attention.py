"""Attention over sequences that are sharded over many devices: context parallelism."""

import dataclasses
import functools
from typing import Any, Unpack

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from attention_jax.core.meshes import on_automatic_axes
from attention_jax.core.products import current_backend
from attention_jax.functional.checks import AttentionArguments, checked_call, hinted
from attention_jax.kernels.choice import chosen_block_sizes
from attention_jax.scores import ProjectedKeys
from attention_jax.tiles import Inputs, Options, ring
from attention_jax.tiles.options import explicit_batch_spec, vmap_over_batch

Array = jax.Array


@hinted
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mesh: Mesh,
    axis_name: str = "context",
    return_statistics: bool = False,
    **arguments: Unpack[AttentionArguments],
) -> Any:
    """`attention` with the sequences sharded over one axis of a mesh.

        output_i = sum_j normalizer_j(score(query_i, key_j) + bias_ij where mask_ij) value_j

    Each of n devices keeps T / n queries. The keys and values of all devices visit it in n steps,
    one device's share per step. A device holds 1 / n of the tokens, of the arrays computed from
    them, and of their gradients; no [T, S] array exists. So T and S may be n times as long as on a
    single device.

    Communication: in each step a device sends (S / n) (Fk + Dv) numbers to the next device, where
    Fk is the number of key features of the score, in the compute dtype, or in that of 16-bit tokens
    which are multiplied in it; in the backward pass also as many for their gradients, in float32 or
    float64. Before the first step, each device exchanges half of its
    tokens, so that a causal mask gives every device the same work; the output is exchanged back.

    The result does not depend on the number of devices. It equals that of `attention` up to
    rounding, with the same dropped weights and the same contract for padding and rows without keys.

    Args:
        query: float [*B, T, Dq] in natural order. T is sharded evenly over `axis_name`, either
            already or by this function.
        key: float [*B, S, Dk]; S sharded like T.
        value: float [*B, S, Dv]; S sharded like T.
        mesh: the devices. Batch axes may be sharded over its other axes.
        axis_name: the mesh axis of n devices over which sequences are sharded.
        score: as in `attention`; its projections take the tokens of one device.
        params: as in `attention`; replicated, with gradients summed over the devices.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]. Its arrays are replicated on
            every device: those of a function of positions (`causal_mask`, `segment_mask`, ...) are
            small, a table is not.
        bias: a `Bias`, or float broadcastable to [*B, T, S]; replicated like the mask.
        normalizer: as in `attention`, if it needs no search for a threshold: softmax with or
            without a sink, sigmoid.
        normalizer_params: as in `attention`; replicated like `params`.
        dropout_rate, dropout_rng: as in `attention`.
        block_sizes: tile sizes; None chooses them.
        return_statistics: also return each row's logsumexp, entropy (nats) and largest logit.

    Returns:
        output [*B, T, Dv] in the query's dtype, sharded like the query; or (output,
        `AttentionStatistics`), the statistics [*B, T] in the compute dtype.

    It has every derivative that `attention` has, in any mode and order. Forward mode and second and
    higher derivatives save the keys of every step: memory is linear in S, but n devices reduce it
    by less than n. `analysis.capture` does not capture it.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure; T or S is not a multiple
            of n; the mesh has no axis of that name.
        NotImplementedError: the normaliser searches for a threshold in several visits to all keys,
            each of which would send them round the ring.

    >>> import jax.numpy as jnp
    >>> from attention_jax import causal_mask
    >>> mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    >>> tokens = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> ring_attention(tokens, tokens, tokens, mesh=mesh, mask=causal_mask(-1))
    Array([[0., 0.],
           [1., 0.]], dtype=float32)

    Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3
    (there for scaled dot). `tiles/ring.py` explains the exchange.
    """
    if isinstance(key, ProjectedKeys):
        raise ValueError("key must be an array, which ring_attention projects; got ProjectedKeys")
    options, inputs = checked_call(
        query, key, value, return_statistics=return_statistics, **arguments
    )
    if options.normalizer.searches:
        raise NotImplementedError(
            f"ring_attention with normalizer {options.normalizer} would send the keys round the"
            " ring for each visit of the search for its threshold: use attention"
        )
    _check_cut(mesh, axis_name, inputs)
    if options.block_sizes is None:
        block_sizes = chosen_block_sizes(options.score, inputs, current_backend())
        options = dataclasses.replace(options, block_sizes=block_sizes)
    output, statistics = _ring_attention(options, mesh, axis_name, inputs)
    return (output, statistics) if return_statistics else output


def _check_cut(mesh: Any, axis_name: str, inputs: Inputs) -> None:
    """Raises ValueError unless each sequence divides into equal parts, one per device."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh; got {mesh!r}")
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name must be an axis of mesh, one of {', '.join(mesh.axis_names)};"
            f" got {axis_name!r}"
        )
    current = jax.sharding.get_abstract_mesh()
    if not current.empty and axis_name not in current.axis_names:
        raise ValueError(
            f"axis_name must be an axis of the mesh of jax.set_mesh or jax.shard_map, one of"
            f" {', '.join(current.axis_names)}; got {axis_name!r}"
        )
    devices = mesh.shape[axis_name]
    for name, array in (("query", inputs.query), ("key", inputs.key)):
        length = array.shape[-2]
        if length == 0 or length % devices:
            raise ValueError(
                f"{name} must have a length that is a multiple of {devices}, the devices of mesh"
                f" axis {axis_name!r}; got {list(array.shape)}: pad it, and hide the padding by a"
                " padding_mask"
            )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _ring_attention(options: Options, mesh: Mesh, axis_name: str, inputs: Inputs):
    def one_device(inputs: Inputs):
        attend = functools.partial(ring.attend, options, axis_name)
        return vmap_over_batch(options, attend, inputs)

    def cut(array: Array) -> PartitionSpec:
        return PartitionSpec(*[None] * (array.ndim - 2), axis_name)

    tokens, replicated = inputs[:3], inputs[3:]
    specs: list[Any] = [*jax.tree.map(cut, tokens), *(PartitionSpec() for _ in replicated)]

    def all_devices(inputs: Inputs):
        context = jax.sharding.get_abstract_mesh()  # its Explicit axes are Auto here
        auto_types = (AxisType.Auto,) * len(mesh.axis_names)
        auto_mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=auto_types)
        return jax.shard_map(
            one_device,
            mesh=auto_mesh if context.empty else context,
            in_specs=(Inputs(*specs),),
            out_specs=cut(inputs.query),
            axis_names={axis_name},  # the compiler shards the batch over the other axes
            check_vma=False,  # the check would add sums over devices inside the loops over tiles
        )(inputs)

    spec = PartitionSpec(*explicit_batch_spec(inputs), axis_name)
    return on_automatic_axes(all_devices, spec, inputs)
