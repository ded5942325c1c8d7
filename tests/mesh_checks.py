"""Checks of test_mesh.py, on four devices: results and communication on every kind of mesh."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from score_cases import DK, SCORE_CASES

import attention_jax as aj
from attention_jax import interop
from attention_jax.analysis import capture_gradients
from attention_jax.core.meshes import explicit_spec, on_automatic_axes

P = PartitionSpec
B, T, S, DV = 4, 5, 7, 3
BATCH = P("data")


def mesh_of(kind="explicit", shape=(4,), names=("data",)):
    types = (AxisType.Auto if kind == "auto" else AxisType.Explicit,) * len(shape)
    return jax.make_mesh(shape, names, types, devices=jax.devices()[: int(np.prod(shape))])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(actual, expected, tolerance=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), tolerance, tolerance)


# --- results ---


def attend(arrays, score="scaled", implementation="tiled", **options):
    options = {"block_sizes": aj.BlockSizes(8, 8), **options}
    return aj.attention(*arrays, score=score, implementation=implementation, **options)


LENGTHS = np.array([7, 3, 1, 5], np.int32)
BOOLS = (np.arange(B)[:, None, None] + np.arange(S) % 3) % 2 > 0  # [B, 1, S]
QKV = normal(B, T, 4), normal(B, S, 4, seed=1), normal(B, S, DV, seed=2)
ADDITIVE = {"query_kernel": normal(4, 6), "key_kernel": normal(4, 6), "v": normal(6)}
key = functools.partial(jax.random.key, 5)


def additive(arrays, params, **options):
    return attend(arrays, aj.Additive(hidden_dim=6), params=params, **options)


def on_heads(arrays, n, rng):
    """Attention with heads [B, T, N, D], as in `jax.nn` and Flax; both share a dropout mask."""
    heads = [jnp.stack([array, -array], axis=2) for array in arrays]
    dropped = interop.flax_attention_fn(block_sizes=aj.BlockSizes(8, 8), implementation="tiled")(
        *heads, dropout_rate=0.4, dropout_rng=rng, broadcast_dropout=True, deterministic=False
    )
    return dropped, interop.dot_product_attention(*heads, key_value_seq_lengths=n)


# Name -> (function, its further arguments).
CALLS = {
    "plain": (attend, {}),
    "dropout": (lambda x, rng: attend(x, dropout_rate=0.3, dropout_rng=rng), {"rng": key}),
    "reference-dropout": (
        lambda x, rng: attend(x, "scaled", "reference", dropout_rate=0.3, dropout_rng=rng),
        {"rng": key},
    ),
    "lengths": (lambda x, n: attend(x, mask=aj.padding_mask(n)), {"n": LENGTHS}),
    "reference-lengths": (
        lambda x, n: attend(x, "scaled", "reference", mask=aj.padding_mask(n)),
        {"n": LENGTHS},
    ),
    "table": (lambda x, table: attend(x, mask=table), {"table": BOOLS}),
    "bias": (lambda x, bias: attend(x, bias=bias), {"bias": normal(T, S)}),
    "statistics": (lambda x: attend(x, mask=aj.causal_mask(), return_statistics=True), {}),
    "additive": (additive, {"params": ADDITIVE}),
    "weights": (lambda x: aj.attention_weights(*x[:2]), {}),
    "heads": (on_heads, {"n": LENGTHS, "rng": key}),
}


def values_and_gradients(calls, arrays, others):
    """Returns, for each call, the results and the gradient of their sum of squares."""

    def of_call(call, arrays, others):
        def total(arrays):
            results = CALLS[call][0](arrays, **others)
            return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(results)), results

        (_, results), gradients = jax.value_and_grad(total, has_aux=True)(arrays)
        return results, gradients

    def of_calls(arrays, others):
        return {call: of_call(call, arrays, others[call]) for call in calls}

    return jax.jit(of_calls)(arrays, others)


def others_of(call):
    made = {name: x() if callable(x) else x for name, x in CALLS[call][1].items()}
    return jax.tree.map(jnp.asarray, made)


def on_explicit_axes(calls=tuple(CALLS), with_mesh=True, cut_keys=True):
    """Results equal those of one device, and are sharded as the query is."""
    others = {call: others_of(call) for call in calls}
    expected = values_and_gradients(calls, tuple(map(jnp.asarray, QKV)), others)
    mesh = mesh_of()
    cuts = (BATCH, *(BATCH if cut_keys else P(),) * 2)
    spread = jax.device_put(QKV, tuple(NamedSharding(mesh, cut) for cut in cuts))
    others = jax.device_put(others, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh) if with_mesh else contextlib.nullcontext():
        found = values_and_gradients(calls, spread, others)
    assert_close(found, expected)
    for results, gradients in found.values():
        for leaf in jax.tree.leaves(results):
            assert explicit_spec(leaf)[0] == "data", jax.typeof(leaf)
        for gradient, array in zip(gradients, spread, strict=True):
            assert jax.typeof(gradient) == jax.typeof(array)


def queries_cut_over_devices_stay_so():
    mesh = mesh_of()
    tokens = normal(2, 8, 4)
    with jax.set_mesh(mesh):
        spread = jax.device_put(tokens, P(None, "data"))
        output, statistics = jax.jit(
            lambda x: attend((x, x, x), mask=aj.causal_mask(), return_statistics=True)
        )(spread)
        weights = jax.jit(aj.attention_weights)(spread, spread)
    for array in (output, weights, statistics.entropy):
        assert tuple(explicit_spec(array)[:2]) == (None, "data")
    assert_close(output, attend((tokens,) * 3, mask=aj.causal_mask()))


def gradients_are_captured_on_explicit_axes():
    def loss(arrays):
        return jnp.sum(attend(arrays, mask=aj.causal_mask()) ** 2)

    capture = jax.jit(functools.partial(capture_gradients, loss))
    expected = capture(tuple(map(jnp.asarray, QKV)))
    mesh = mesh_of()
    for cuts in ((BATCH,) * 3, (BATCH, P(), P())):
        with jax.set_mesh(mesh):
            found = capture(jax.device_put(QKV, cuts))
        assert_close(found, expected)


def every_call_in_shard_map():
    """Gradients equal those of one device; the loss is the sum over devices."""
    # (Not dropout: every device would draw the same dropout mask for its own examples.)
    calls = ("plain", "lengths", "table", "bias", "statistics", "additive", "weights")
    arrays, others = tuple(map(jnp.asarray, QKV)), {call: others_of(call) for call in calls}
    cut = {
        call: {name: BATCH if name in ("n", "table") else P() for name in others[call]}
        for call in calls
    }
    mesh = mesh_of()

    def of_one_device(arrays, others):
        def gradients(call):
            def total(arrays, floats):
                results = CALLS[call][0](arrays, **{**others[call], **floats})
                return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(results))

            floats = {name: x for name, x in others[call].items() if name in ("params", "bias")}
            return jax.grad(total, argnums=(0, 1))(arrays, floats)

        return {call: gradients(call) for call in calls}

    expected = jax.jit(of_one_device)(arrays, others)
    outside = {call: (BATCH, jax.tree.map(lambda _: P(), expected[call][1])) for call in calls}
    mapped = jax.shard_map(of_one_device, mesh=mesh, in_specs=(BATCH, cut), out_specs=outside)
    spread = jax.device_put(arrays, NamedSharding(mesh, BATCH))
    cut = jax.tree.map(functools.partial(NamedSharding, mesh), cut)
    others = jax.device_put(others, cut)
    assert_close(jax.jit(mapped)(spread, others), expected)


# --- on_automatic_axes ---


def automatic_axes_in_every_transformation():
    table, ids = normal(6, 3), np.array([[0, 5], [1, 1], [2, 4], [3, 0]], np.int32)
    mesh = mesh_of()

    def take(table, ids):
        return on_automatic_axes(lambda t, i: jnp.sin(t)[i], explicit_spec(ids), table, ids)

    def every(table, ids):
        def loss(table):
            return jnp.sum(take(table, ids) ** 2)

        gradient = jax.grad(loss)
        return {
            "value": take(table, ids),
            "vmap": jax.vmap(take, (None, 0))(table, ids),
            "grad": gradient(table),
            "jvp of grad": jax.jvp(gradient, (table,), (table,))[1],
            "grad of grad": jax.grad(lambda t: jnp.sum(gradient(t) ** 2))(table),
        }

    expected = every(*map(jnp.asarray, (table, ids)))
    np.testing.assert_allclose(expected["value"], np.sin(table)[ids], rtol=1e-6)
    for with_mesh in (True, False):
        with jax.set_mesh(mesh) if with_mesh else contextlib.nullcontext():
            spread = jax.device_put(ids, NamedSharding(mesh, BATCH))
            whole = jax.device_put(table, NamedSharding(mesh, P()))
            found = jax.jit(every)(whole, spread)
            assert explicit_spec(found["value"])[0] == explicit_spec(found["vmap"])[0] == "data"
            assert_close(found, expected)
            assert_close(take(whole, spread), expected["value"])  # eagerly
    two = mesh_of(shape=(2, 2), names=("data", "other"))
    with jax.set_mesh(two):
        spread = jax.device_put(ids, P(("data", "other")))
        partly = jax.shard_map(
            lambda ids: take(jnp.asarray(table), ids),
            in_specs=BATCH, out_specs=BATCH, axis_names={"data"},
        )  # fmt: skip
        assert_close(jax.jit(partly)(spread), expected["value"])


def additive_decides_once():
    """Whether any query is large takes a small reduction for each sharded axis, outside loops."""
    shape = {"v": (2, 17), "a": (2, 4, 33, 17), "b": (2, 4, 32, 17)}
    v, a, b = (normal(*size, seed=n) for n, size in enumerate(shape.values()))
    a[1, 2, 3] *= 1e4
    a[1, 2, :, 5], b[1, 2, :, 5] = 1e3, -1e3
    score = aj.Additive(hidden_dim=17)

    def loss(v, a, b):
        params = {"query_kernel": jnp.zeros((1, 17)), "key_kernel": jnp.zeros((1, 17)), "v": v}
        return jnp.sum(jnp.sin(score.pair(params, a, b)))

    def written_out(v, a, b):
        return jnp.sum(jnp.sin(jnp.tanh(a[:, None] + b[None]) @ v))

    def gradients(loss):
        of_seed = jax.vmap(jax.value_and_grad(loss, (0, 1, 2)), (None, 0, 0))
        return jax.jit(jax.vmap(of_seed))

    mesh = mesh_of("auto", (2, 2), ("seed", "data"))
    cuts = (P("seed"), P("seed", "data"), P("seed", "data"))
    spread = [
        jax.device_put(x, NamedSharding(mesh, cut)) for x, cut in zip((v, a, b), cuts, strict=True)
    ]
    program = gradients(loss).lower(*spread).compile()
    sent = collectives(program)
    assert len(sent) == 2, sent
    assert all(map(is_small, sent)), sent
    with jax.numpy_rank_promotion("allow"):
        assert_close(program(*spread), gradients(written_out)(v, a, b), 1e-4)


# --- communication ---

LENGTH = 600
MASKS = {
    "none": lambda lengths: {},
    "causal": lambda lengths: {"mask": aj.causal_mask()},
    "local": lambda lengths: {"mask": aj.local_mask(200, 100)},
    "padding": lambda lengths: {"mask": aj.padding_mask(lengths)},
    "dropout": lambda lengths: {"dropout_rate": 0.1, "dropout_rng": key()},
}


def sent_by_attention(kind, score_name, implementation, mask_name):
    """Returns the collectives of the forward pass and the gradient, with the default tiles."""
    case = SCORE_CASES[score_name]
    params = case.score.init(jax.random.key(1), case.query_dim, DK)

    def derivatives(query, key, value, direction, lengths, params):
        def forward(query, key, value):
            return aj.attention(
                query, key, value, score=case.score, params=params,
                implementation=implementation, **MASKS[mask_name](lengths),
            )  # fmt: skip

        output, pull_back = jax.vjp(forward, query, key, value)
        return output, *pull_back(direction)

    mesh = mesh_of(kind)
    shapes = ((LENGTH, case.query_dim), (LENGTH, DK), (LENGTH, DV), (LENGTH, DV))
    arrays = [jnp.zeros((B, *shape)) for shape in shapes]
    arrays = jax.device_put([*arrays, jnp.arange(B, dtype=jnp.int32)], NamedSharding(mesh, BATCH))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    if kind == "shard_map":
        specs = (*[BATCH] * 5, P())
        derivatives = jax.shard_map(derivatives, mesh=mesh, in_specs=specs, out_specs=BATCH)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        return collectives(jax.jit(derivatives).lower(*arrays, params).compile())


def is_small(reduction):
    return (reduction.kind, reduction.dtypes, reduction.in_loop) == ("all-reduce", {"pred"}, False)


def attention_sends(*case):
    """Attention sends nothing, with two exceptions of one small reduction each.

    Padding in tiles decides which tiles to visit, and sums of tanh whether any query is large.
    """
    kind, score, implementation, mask_name = case
    sent = sent_by_attention(*case)
    decisions = [(implementation, mask_name) == ("tiled", "padding"), score in SUMS_OF_TANH]
    assert len(sent) == (0 if kind == "shard_map" else sum(decisions)), sent
    assert all(map(is_small, sent)), sent


SUMS_OF_TANH = ("additive", "concat")
KINDS = ("auto", "explicit", "shard_map")
IMPLEMENTATIONS = ("reference", "tiled")
GRID = {
    "-".join(case): functools.partial(attention_sends, *case)
    for case in itertools.product(KINDS, SCORE_CASES, IMPLEMENTATIONS, MASKS)
}


def sample() -> list[str]:
    """Returns cases in which every pair of a kind, score, implementation and mask occurs.

    Each score occurs once with each mask; kinds and implementations alternate along both.
    """
    return [
        "-".join((KINDS[(s + m) % 3], score, IMPLEMENTATIONS[(s // 3 + m) % 2], mask))
        for (s, score), (m, mask) in itertools.product(enumerate(SCORE_CASES), enumerate(MASKS))
    ]


FEW = (
    *("auto-scaled-tiled-padding", "explicit-additive-reference-dropout"),
    *("shard_map-additive-tiled-causal", "explicit-own-tiled-padding"),
)
CHECKS = {
    check.__name__: check
    for check in (
        additive_decides_once, automatic_axes_in_every_transformation,
        every_call_in_shard_map, gradients_are_captured_on_explicit_axes,
        queries_cut_over_devices_stay_so,
    )
} | {
    "explicit_axes": on_explicit_axes,
    "attention_without_mesh": functools.partial(on_explicit_axes, ("plain",), with_mesh=False),
    **{name: GRID[name] for name in FEW},
}  # fmt: skip
SLOW = {
    "explicit_axes_without_mesh": functools.partial(on_explicit_axes, with_mesh=False),
    "explicit_axes_and_whole_keys": functools.partial(on_explicit_axes, cut_keys=False),
    **{
        name: GRID[name]
        for name in (*sample(), "auto-additive-tiled-padding", "explicit-additive-tiled-dropout")
        if name not in CHECKS
    },
}


if __name__ == "__main__":
    eight_devices.run({**CHECKS, **SLOW, **GRID}, sys.argv[1:])
