"""Meshes with Auto and Explicit axes, and `shard_map`: equal results; no loop sends anything."""

import contextlib
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import normal
from score_cases import CORE_SCORES, DK, SCORE_CASES, slow_unless

import attention_jax as aj
from attention_jax import interop

B, T, S, DV = 4, 5, 7, 3
BATCH = P("data")
close = functools.partial(chex.assert_trees_all_close, rtol=2e-5, atol=2e-5)


def mesh_of(kind="explicit"):
    types = (AxisType.Auto if kind == "auto" else AxisType.Explicit,)
    return jax.make_mesh((4,), ("data",), types, devices=jax.devices()[:4])


def cut_of(array):
    """How an array is cut along each axis."""
    return jax.typeof(array).sharding.spec


# --- results ---


def attend(arrays, score="scaled", implementation="tiled", **options):
    options = {"block_sizes": aj.BlockSizes(8, 8), **options}
    return aj.attention(*arrays, score=score, implementation=implementation, **options)


def additive(arrays, params, bias, n, table):
    """With all that is a function of pairs, or of examples."""
    options = {"params": params, "bias": bias, "mask": aj.padding_mask(n) & table}
    return attend(arrays, aj.Additive(hidden_dim=6), return_statistics=True, **options)


def on_heads(arrays, n):
    heads = [array[:, :, None] for array in arrays]
    return interop.dot_product_attention(*heads, key_value_seq_lengths=n)


def dropped(arrays, rng):
    return attend(arrays, dropout_rate=0.3, dropout_rng=rng)


LENGTHS = np.array([7, 3, 1, 5], np.int32)
BOOLS = (np.arange(B)[:, None, None] + np.arange(S) % 3) % 2 > 0  # [B, 1, S]
QKV = normal(B, T, 4), normal(B, S, 4, seed=1), normal(B, S, DV, seed=2)
ADDITIVE = {"query_kernel": normal(4, 6), "key_kernel": normal(4, 6), "v": normal(6)}
CALLS = {  # name: (function, its further arguments)
    "dropout": (dropped, {"rng": lambda: jax.random.key(5)}),
    "additive": (
        additive,
        {"params": ADDITIVE, "bias": normal(T, S), "n": LENGTHS, "table": BOOLS},
    ),
    "weights": (lambda x: aj.attention_weights(*x[:2]), {}),
    "entmax": (lambda x: attend(x, normalizer="entmax"), {}),
    "heads": (on_heads, {"n": LENGTHS}),
    "coverage": (
        lambda x, params: aj.coverage_attention(*x, coverage_kernel=params, mask=aj.causal_mask(2)),
        {"params": np.ones(4, np.float32)},
    ),
    "monotonic": (
        lambda x, params, n: aj.monotonic_attention(*x, offset=params, mask=aj.padding_mask(n)),
        {"params": np.float32(0.5), "n": LENGTHS},
    ),
}


def others_of(calls):
    made = {
        call: {name: x() if callable(x) else x for name, x in CALLS[call][1].items()}
        for call in calls
    }
    return jax.tree.map(jnp.asarray, made)


def results_and_gradients(arrays, others):
    """For each call, the results and the gradient of their sum of squares."""

    def of_call(call):
        def total(arrays, floats):
            results = CALLS[call][0](arrays, **{**others[call], **floats})
            return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(results)), results

        floats = {name: x for name, x in others[call].items() if name in ("params", "bias")}
        gradients, results = jax.grad(total, (0, 1), has_aux=True)(arrays, floats)
        return results, gradients

    return {call: of_call(call) for call in others}


@functools.cache
def expected_of(call):
    """`results_and_gradients` of one call on one device."""
    arrays = tuple(map(jnp.asarray, QKV))
    return jax.jit(results_and_gradients)(arrays, others_of((call,)))[call]


FAST = [(("dropout", "additive", "heads"), True, True), (("weights", "entmax"), False, True)]
SLOW = [(tuple(CALLS), True, True), (tuple(CALLS), True, False)]


@pytest.mark.parametrize(("calls", "with_mesh", "cut_keys"), slow_unless(FAST, FAST + SLOW))
def test_explicit_axes(calls, with_mesh, cut_keys):
    """Results equal those of one device, and are sharded as the query is."""
    mesh, others = mesh_of(), others_of(calls)
    cuts = (BATCH, *(BATCH if cut_keys else P(),) * 2)
    spread = jax.device_put(QKV, tuple(NamedSharding(mesh, cut) for cut in cuts))
    others = jax.device_put(others, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh) if with_mesh else contextlib.nullcontext():
        found = jax.jit(results_and_gradients)(spread, others)
    close(found, {call: expected_of(call) for call in calls})
    for results, (gradients, _) in found.values():
        for leaf in jax.tree.leaves(results):
            assert cut_of(leaf)[0] == "data", jax.typeof(leaf)
        for gradient, array in zip(gradients, spread, strict=True):
            assert jax.typeof(gradient) == jax.typeof(array)


def test_queries_that_are_cut_over_devices_stay_so():
    tokens = normal(2, 8, 4)
    with jax.set_mesh(mesh_of()):
        spread = jax.device_put(tokens, P(None, "data"))
        output, statistics = jax.jit(
            lambda x: attend((x, x, x), mask=aj.causal_mask(), return_statistics=True)
        )(spread)
        weights = jax.jit(aj.attention_weights)(spread, spread)
    for array in (output, weights, statistics.entropy):
        assert tuple(cut_of(array)[:2]) == (None, "data")
    close(output, attend((tokens,) * 3, mask=aj.causal_mask()))


def test_a_mesh_axis_cuts_one_batch_axis():
    """That of the first of query, key and value which is cut along it."""
    types, tokens = (AxisType.Explicit,) * 2, normal(2, 2, 3, 4)
    mesh = jax.make_mesh((2, 2), ("data", "heads"), types, devices=jax.devices()[:4])
    cuts = P("data"), P("heads", "data"), P("heads")
    arrays = tokens, tokens, tokens[0]
    spread = [
        jax.device_put(x, NamedSharding(mesh, cut)) for x, cut in zip(arrays, cuts, strict=True)
    ]
    output = attend(spread, implementation="reference")
    assert tuple(cut_of(output)[:2]) == ("data", "heads")
    close(output, attend(arrays, implementation="reference"))


def test_calls_in_shard_map():
    """Gradients equal those of one device; no loop sums over devices."""
    # (Not dropout: every device would draw the same dropout mask for its own examples.)
    calls = ("additive", "entmax", "coverage", "monotonic")
    others, mesh = others_of(calls), mesh_of()
    cut = {
        call: {name: BATCH if name in ("n", "table") else P() for name in others[call]}
        for call in calls
    }

    def gradients(arrays, others):
        return {call: both[1] for call, both in results_and_gradients(arrays, others).items()}

    expected = {call: expected_of(call)[1] for call in calls}
    outside = {call: (BATCH, jax.tree.map(lambda _: P(), expected[call][1])) for call in calls}
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=(BATCH, cut), out_specs=outside)
    spread = jax.device_put(QKV, NamedSharding(mesh, BATCH))
    cut = jax.tree.map(functools.partial(NamedSharding, mesh), cut)
    program = jax.jit(mapped).lower(spread, jax.device_put(others, cut)).compile()
    close(program(spread, jax.device_put(others, cut)), expected)
    assert not [sent for sent in collectives(program) if sent.in_loop]


def test_second_derivatives_on_a_mesh():
    """Sharded examples, shared parameters; reverse over reverse mode."""
    rng = np.random.default_rng(2)
    x, w = rng.normal(size=(4, 5, 3)), rng.normal(size=(3, 3))

    def loss(x, w):
        return jnp.sum(jnp.sin(attend((x @ w, x, x))))

    def second(loss):
        return jax.jit(jax.grad(lambda w, x: jnp.sum(jax.grad(loss, 1)(x, w) ** 2)))

    mesh = mesh_of()
    summed = jax.shard_map(
        lambda x, w: jax.lax.psum(loss(x, w), "data"), mesh=mesh, in_specs=(BATCH, P()),
        out_specs=P(),
    )  # fmt: skip
    with jax.enable_x64(True):
        expected = second(loss)(w, x)
        with jax.set_mesh(mesh):
            got = second(summed)(*jax.device_put((w, x), (P(), BATCH)))
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10)


# --- communication ---

LENGTH = 600
MASKS = {
    "none": lambda lengths: {},
    "causal": lambda lengths: {"mask": aj.causal_mask()},
    "local": lambda lengths: {"mask": aj.local_mask(200, 100)},
    "padding": lambda lengths: {"mask": aj.padding_mask(lengths)},
    "dropout": lambda lengths: {"dropout_rate": 0.1, "dropout_rng": jax.random.key(5)},
}
FEW = [("shard_map", "own", "tiled", "causal"), ("explicit", "additive", "tiled", "padding")]
# Every score with each mask; kinds and implementations alternate along both.
SAMPLE = [
    (("auto", "explicit", "shard_map")[(s + m) % 3], score, ("reference", "tiled")[s % 2], mask)
    for (s, score), (m, mask) in itertools.product(enumerate(CORE_SCORES), enumerate(MASKS))
]


@pytest.mark.parametrize(
    ("kind", "score_name", "implementation", "mask_name"),
    slow_unless(FEW, dict.fromkeys([*FEW, *SAMPLE])),
)
def test_attention_sends_next_to_nothing(kind, score_name, implementation, mask_name):
    """The forward pass and the gradient send nothing, or small reductions outside of loops.

    Padding in tiles decides which tiles to visit, and sums of tanh whether any query is large.
    """
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
        sent = collectives(jax.jit(derivatives).lower(*arrays, params).compile())
    decisions = [(implementation, mask_name) == ("tiled", "padding")]
    decisions.append(isinstance(case.score, aj.Additive))
    assert len(sent) == (0 if kind == "shard_map" else sum(decisions)), sent
    for each in sent:
        assert (each.kind, each.dtypes, each.in_loop) == ("all-reduce", {"pred"}, False), sent
