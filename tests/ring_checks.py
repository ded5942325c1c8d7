"""Checks of test_ring_attention.py, which run on eight devices."""

from __future__ import annotations

import collections
import functools
import re
import sys

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives as collectives_in_loops
from conformance import assert_close, named, quick_jit
from derivative_cases import DROPOUT, agree, numbers_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ring_cases import (
    MASKS,
    TILE,
    B,
    lengths_of,
    loss_of,
    mask_of,
    mesh_of,
    point_of,
    reference,
    results_of,
    table_of,
    with_padding_of_nan,
)
from ring_second_derivatives import (
    forward_over_reverse,
    reverse_over_reverse,
    second_derivatives,
    small_hessian,
)
from score_cases import SCORE_CASES

import attention_jax as aj
from attention_jax import BlockSizes, ring_attention

# --- the result and the gradients ---


def compare(score_name, mask_names, devices, table_bias=False, **options):
    """Compares output, statistics and all gradients, with NaN and Inf in tokens never read.

    Several masks are given as tables, so that they share one compiled program.
    """
    target, source = lengths_of(devices)
    ring = functools.partial(ring_attention, mesh=mesh_of(devices), block_sizes=TILE)

    def results_and_gradients(attend):
        def loss(point, mask, table):
            results = results_of(attend, score_name, **options)(point, mask, table)
            return numbers_of(results), results

        return quick_jit(jax.value_and_grad(loss, (0, 2), has_aux=True))

    with jax.enable_x64(True):
        functions = [results_and_gradients(attend) for attend in (ring, reference)]
        for mask_name in mask_names:
            mask = mask_of(mask_name, target, source)
            allowed = table_of(mask, target, source)
            point = with_padding_of_nan(point_of(score_name, target, source), allowed)
            table = None
            if table_bias:
                table = np.random.default_rng(8).normal(size=(B, target, source))
                table = np.where(allowed, table, np.nan)
            if len(mask_names) > 1:
                mask = jnp.asarray(allowed)
            ((_, got), gradients), ((_, expected), expected_gradients) = (
                jax.device_get(function(point, mask, table)) for function in functions
            )
            expected = named(expected)
            for name, array in named(got).items():
                assert_close(f"{mask_name}: {name}", array, expected[name], 1e-13)
            agree(gradients, expected_gradients)


def few_tokens():
    """One, two or three tokens per device are enough; a part of a token is not."""
    for per_device in (1, 2, 3):
        rng = np.random.default_rng(per_device)
        with jax.enable_x64(True):
            tokens = rng.normal(size=(8 * per_device, 3))
            got = ring_attention(tokens, tokens, tokens, mesh=mesh_of(8), mask=aj.causal_mask())
            expected = reference(tokens, tokens, tokens, mask=aj.causal_mask())
        assert_close(f"{per_device} tokens", got, np.asarray(expected), 1e-13)
    for name in ("query", "key"):
        arguments = {"query": tokens, "key": tokens, name: tokens[:12]}
        with pytest.raises(ValueError, match=f"{name} must .* multiple of 8, .*'context'; .*12, 3"):
            ring_attention(**arguments, value=arguments["key"], mesh=mesh_of(8))


# --- dtypes ---


def narrow_dtype(dtype, rounding):
    """Output and gradients are within the contract's bounds."""
    target, source = lengths_of(3)
    exact = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(jnp.bfloat16).astype(np.float64),
        point_of("general", target, source),
    )
    mask = aj.causal_mask(1)

    def both(attend, point, **options):
        def forward(point):
            return attend(**point, score="general", mask=mask, **options)

        output, pull_back = jax.vjp(forward, point)
        return {"output": output, **pull_back(jnp.cos(output))[0]}

    del exact["slopes"], exact["distances"]
    with jax.enable_x64(True):
        expected = named(quick_jit(functools.partial(both, reference))(exact))
    ring = functools.partial(ring_attention, mesh=mesh_of(3), block_sizes=TILE)
    point = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), exact)
    got = quick_jit(functools.partial(both, ring))(point)
    for name, array in named(jax.device_get(got)).items():
        bound = 2e-6 if "output" in name else 2e-5
        assert_close(name, array, expected[name], bound + rounding)
        assert array.dtype == dtype, name


# --- other axes of the mesh, other axes of the arrays ---


def batch_over_other_devices(kind):
    """Gradients and communication on a mesh of data and context, Explicit or Auto axes."""
    batch, target, source = 4, 2 * 2 * 5, 2 * 2 * 7
    rng = np.random.default_rng(1)
    arrays = tuple(np.float32(rng.normal(size=(batch, n, 11))) for n in (target, source, source))
    params = SCORE_CASES["general"].score.init(jax.random.key(0), 11, 11)
    lengths = jnp.array([source, 2, source - 5, 9])

    def gradients(attend):
        def loss(arrays, params, slope, lengths):
            mask = aj.causal_mask(2) & aj.padding_mask(lengths)
            output, statistics = attend(
                *arrays, score="general", params=params, mask=mask, bias=aj.alibi_bias(slope),
                return_statistics=True, **DROPOUT,
            )  # fmt: skip
            assert output.shape == (batch, target, 11)
            return jnp.sum(jnp.sin(output)) + jnp.sum(statistics.entropy)

        return jax.grad(loss, (0, 1, 2))

    mesh = jax.make_mesh((4, 2), ("data", "context"), axis_types=(kind,) * 2)
    spread = NamedSharding(mesh, PartitionSpec("data", "context", None))
    attend = functools.partial(ring_attention, mesh=mesh, block_sizes=TILE)
    others = params, jnp.array(0.3), lengths
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, spread)
        compiled = quick_jit(gradients(attend)).lower(placed, *others).compile()
        got = compiled(placed, *others)
    agree(jax.device_get(got), quick_jit(gradients(reference))(arrays, *others), 2e-5)
    for array in got[0]:
        assert array.sharding.spec[:2] == ("data", "context"), array.sharding
    # No tokens are summed or gathered: only the status of tiles, and the gradients of shared
    # arrays.
    sent = collectives(compiled)
    assert set(sent) == {"collective-permute", "all-reduce"}, sent
    assert not any(re.search(r"f32\[\d+,\d+,", shape) for shape in sent["all-reduce"]), sent
    # The batch decides once about the tiles of all rounds, before the first round.
    decisions = [sent for sent in collectives_in_loops(compiled) if "pred" in sent.dtypes]
    assert len(decisions) <= 1
    assert not any(sent.in_loop for sent in decisions)


def batches_stay_on_their_devices():
    """On axes of data and context, results are sharded as the tokens; nothing else is sent."""
    mesh = jax.make_mesh((4, 2), ("data", "context"))

    def output(arrays):
        return ring_attention(*arrays, mask=aj.causal_mask(2), mesh=mesh, block_sizes=TILE)

    def loss(arrays):
        return jnp.sum(jnp.sin(output(arrays)))

    with jax.set_mesh(mesh):
        cut = PartitionSpec("data", "context")
        arrays = [jax.device_put(np.ones((4, n, 3), np.float32), cut) for n in (20, 28, 28)]
        for gradient in jax.eval_shape(jax.grad(loss), arrays):
            assert gradient.sharding.spec[:2] == ("data", "context"), gradient
        sent = collectives(quick_jit(output).lower(arrays).compile())
        # A ring inside of a `shard_map` over the batch.
        mapped = jax.shard_map(
            output, in_specs=(PartitionSpec("data"),), out_specs=PartitionSpec("data"),
            axis_names={"data"}, check_vma=False,
        )  # fmt: skip
        assert jax.eval_shape(mapped, arrays).sharding.spec[:2] == ("data", "context")
    assert set(sent) == {"collective-permute"}, sent


def vmaps_jits_and_heads():
    """Gradients under `jax.vmap`, with shared keys, without `jax.jit`, with axes of size 1."""
    target, source = lengths_of(2)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        query = rng.normal(size=(3, 1, 4, target, 11))
        key, value = rng.normal(size=(3, 1, 1, source, 11)), rng.normal(size=(3, 1, 1, source, 5))
        rngs = jax.random.split(jax.random.key(3), 3)
        lengths = jnp.array([source, 5, 0])

        def gradients(attend):
            def of_one(query, key, value, rng, length):
                mask = aj.local_mask(None, 3) & aj.padding_mask(length)
                return numbers_of(
                    attend(
                        query, key, value, mask=mask, dropout_rate=0.1, dropout_rng=rng,
                        bias=aj.alibi_bias(aj.alibi_slopes(4)), return_statistics=True,
                    )
                )  # fmt: skip

            def loss(query, key, value):
                return jax.vmap(of_one)(query, key, value, rngs, lengths).sum()

            return jax.grad(loss, (0, 1, 2))

        ring = functools.partial(ring_attention, mesh=mesh_of(2), block_sizes=TILE)
        got = quick_jit(gradients(ring))(query, key, value)
        expected = quick_jit(gradients(reference))(query, key, value)
        agree(jax.device_get(got), expected, 1e-7)  # the slopes are float32
        plain = ring_attention(query[0, 0], key[0, 0], value[0, 0], mesh=mesh_of(2))
        expected = reference(query[0, 0], key[0, 0], value[0, 0])
        assert_close("without jit", plain, np.asarray(expected), 1e-13)
        assert plain.sharding.spec == PartitionSpec(None, "context")


# --- the compiled program ---


def collectives(compiled):
    """Returns {kind: [shapes sent]}."""
    found = collections.defaultdict(list)
    kinds = "collective-permute|all-reduce|all-gather|all-to-all|reduce-scatter"
    for line in compiled.as_text().splitlines():
        if match := re.search(rf"= (.+?) ({kinds}|collective-broadcast)(-start)?\(", line):
            found[match[2]].append(match[1])
    return dict(found)


def spread_point():
    """Returns (length, point of the general score), with tokens on eight devices."""
    target, source = lengths_of(8)
    point = point_of("general", target, source)
    spread = NamedSharding(mesh_of(8), PartitionSpec(None, "context"))
    tokens = {name: jax.device_put(point[name], spread) for name in ("query", "key", "value")}
    return target, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), {**point, **tokens})


def nothing_but_permutations():
    """Attention sends nothing but permutations."""
    _, point = spread_point()

    def output(point, mask):
        arrays = {name: point[name] for name in ("query", "key", "value", "params")}
        return ring_attention(**arrays, score="general", mask=mask, mesh=mesh_of(8))

    sent = collectives(quick_jit(output).lower(point, aj.causal_mask()).compile())
    assert set(sent) == {"collective-permute"}, sent


def permutations_and_shared_gradients():
    """The gradient sends permutations, and sums of the gradients of shared arrays."""
    length, point = spread_point()
    loss = loss_of(functools.partial(ring_attention, mesh=mesh_of(8)), "general", **DROPOUT)
    sent = collectives(quick_jit(jax.grad(loss)).lower(point, aj.causal_mask()).compile())
    assert set(sent) == {"collective-permute", "all-reduce"}, sent
    assert not any(str(length) in shape for shape in sent["all-reduce"]), sent


def the_same_work_for_all():
    """Every device computes the same number of tiles, counted as they are computed."""
    visits: collections.Counter = collections.Counter()

    def counting_pair(score, params, q_features, k_features):
        jax.debug.callback(
            lambda device: visits.update([int(device)]), jax.lax.axis_index("context")
        )
        return pair(score, params, q_features, k_features)

    pair, aj.ScaledDot.pair = aj.ScaledDot.pair, counting_pair

    length, tile, devices = 64, 4, 8
    tokens = jnp.ones((length, 3))

    def counted(mask):
        visits.clear()
        output = ring_attention(
            tokens, tokens, tokens, score=aj.ScaledDot(2.0), mask=mask, mesh=mesh_of(devices),
            block_sizes=BlockSizes(tile, tile),
        )  # fmt: skip
        jax.block_until_ready(output)
        jax.effects_barrier()
        return [visits[device] for device in range(devices)]

    rows = length // tile
    assert counted(None) == [rows**2 // devices] * devices
    # Tiles below the diagonal and on it: 136 of 256.
    assert counted(aj.causal_mask()) == [rows * (rows + 1) // 2 // devices] * devices
    # A window is no more than two tiles wide, wherever a device stands.
    assert sum(counted(aj.local_mask(3, 0))) == 2 * rows - 1
    aj.ScaledDot.pair = pair


def memory_falls_with_the_devices():
    """With four times the devices, each has a quarter of the arguments and fewer temporaries."""
    length, features = 4096, 8

    def reserved(devices):
        spread = NamedSharding(mesh_of(devices), PartitionSpec("context"))
        tokens = jax.ShapeDtypeStruct((length, features), jnp.float32, sharding=spread)

        def loss(query, key, value):
            mask = aj.causal_mask() & ~aj.local_mask(2, 0)
            output = ring_attention(
                query, key, value, mesh=mesh_of(devices), mask=mask, block_sizes=BlockSizes(64, 64)
            )
            return (output**2).sum()

        compiled = quick_jit(jax.grad(loss, (0, 1, 2))).lower(*[tokens] * 3).compile()
        found = compiled.memory_analysis()
        return np.array([found.argument_size_in_bytes, found.temp_size_in_bytes])

    (arguments, temporaries), fewer = reserved(8), reserved(2)
    assert arguments == fewer[0] / 4 == 3 * length * features * 4 / 8, (arguments, fewer)
    assert temporaries < fewer[1] / 2.5, (temporaries, fewer)
    assert fewer[1] < length**2, fewer  # a quarter of one table of float32


# --- names ---


def comparison(score, mask, devices, **options):
    masks = MASKS if mask == "dense" else (mask,)
    dropout = DROPOUT if devices % 2 == 0 else {}
    return functools.partial(compare, score, masks, devices, **dropout, **options)


# All scores and all masks at once. "dense" stands for the tables of all masks.
FEW = [("all", "combination", 8)]
# Every number of devices with every score and with the tables of all masks; every mask, with its
# own rule for tiles, on an even number of devices.
MORE = [
    ("dot", "causal", 1),
    *(("all", "dense", devices) for devices in (1, 2, 3)),
    *(("dot", mask, devices) for mask in MASKS if mask != "dense" for devices in (2, 8)),
]
CHECKS = {
    **{"-".join(map(str, case)): comparison(*case) for case in FEW},
    "a_table_as_a_bias": comparison("scaled", "dense", 3, table_bias=True),
    "bfloat16": functools.partial(narrow_dtype, jnp.bfloat16, 2**-7),
    **{
        check.__name__: check
        for check in (
            few_tokens, batches_stay_on_their_devices, nothing_but_permutations,
            the_same_work_for_all, memory_falls_with_the_devices, small_hessian,
        )
    },
}  # fmt: skip
SLOW = {
    **{"-".join(map(str, case)): comparison(*case) for case in MORE},
    "vmaps_jits_and_heads": vmaps_jits_and_heads,
    "reverse_over_reverse": functools.partial(second_derivatives, "scaled", reverse_over_reverse),
    "batch_over_other_devices": functools.partial(batch_over_other_devices, AxisType.Explicit),
    "batch_over_other_devices-automatic": functools.partial(
        batch_over_other_devices, AxisType.Auto
    ),
    "float32": functools.partial(narrow_dtype, jnp.float32, 0.0),
    "permutations_and_shared_gradients": permutations_and_shared_gradients,
    **{
        name: functools.partial(
            second_derivatives, *arguments, make_loss=functools.partial(loss_of, **DROPOUT)
        )
        for name, arguments in {
            "forward_over_reverse": ("own", forward_over_reverse),
            "hessian-additive": ("additive", reverse_over_reverse, 3),
            "hessian-own": ("own", reverse_over_reverse, 2),
        }.items()
    },
}


if __name__ == "__main__":
    eight_devices.run({**CHECKS, **SLOW}, sys.argv[1:])
