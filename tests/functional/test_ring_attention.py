"""Ring attention: the result of `attention`, with equal work and memory on each device."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from conformance import assert_close, quick_jit
from derivative_cases import DROPOUT, agree, numbers_of
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from score_cases import CORE_SCORES, DK, SCORE_CASES, slow_unless

import attention_jax as aj
from attention_jax import BlockSizes, ring_attention

B, DV = 2, 13
PART = (9, 13)  # queries and keys of a device, odd
TILE = BlockSizes(query=2, key=3)  # divides neither
reference = functools.partial(aj.attention, implementation="reference")


def ring_of(devices, **options):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("context",))
    return functools.partial(ring_attention, mesh=mesh, **{"block_sizes": TILE, **options})


def lengths_of(devices):
    return tuple(devices * length for length in PART)


# --- the result and the gradients ---


def masks_of(target, source):
    rng = np.random.default_rng(3)
    segments = aj.segment_mask(*(np.sort(rng.integers(0, 4, (B, n))) for n in (target, source)))
    offsets = aj.causal_mask(jnp.array([-1, 4]))
    padding = aj.padding_mask(jnp.array([source - 3, 2]), jnp.array([target - 1, 3]))
    return {
        "none": aj.local_mask(None, None),
        "causal": aj.causal_mask(),
        "offset": aj.causal_mask(-3),  # the first three queries see nothing
        "local": aj.local_mask(4, 2),
        "padding": padding,
        "segments": segments,
        "combination": (segments | (offsets & ~aj.local_mask(2, 0))) & padding,
        "dense": aj.causal_mask(2**20) & jnp.asarray(rng.random((B, target, source)) < 0.3),
    }


MASKS = tuple(masks_of(*PART))


def point_of(score_name, target, source):
    case, rng = SCORE_CASES[score_name], np.random.default_rng(5)
    params = case.score.init(jax.random.key(1), case.query_dim, DK)
    return {
        "query": rng.normal(size=(B, target, case.query_dim)),
        "key": rng.normal(size=(B, source, DK)) / 2,
        "value": rng.normal(size=(B, source, DV)),
        "params": jax.tree.map(np.float64, params),
        "slopes": rng.random(B),
        "distances": rng.normal(size=11),
        "table": rng.normal(size=(1, target, source)),
    }


def loss_of(attend, score_name, **options):
    """(point, mask) -> (a number that depends on all results, the results)."""

    def loss(point, mask):
        point = dict(point)
        bias = aj.alibi_bias(point.pop("slopes")) + aj.relative_bias(point.pop("distances"))
        bias, score = bias + point.pop("table"), SCORE_CASES[score_name].score
        results = attend(
            **point, score=score, mask=mask, bias=bias, return_statistics=True, **options
        )
        return numbers_of(results), results

    return loss


FAST = ("general", ("combination",), 3)
CASES = [FAST, *((score, MASKS, 2) for score in CORE_SCORES), ("own", MASKS, 1), ("own", MASKS, 3)]
CASES += [("dot", (mask,), devices) for mask in MASKS for devices in (2, 8)]


@pytest.mark.parametrize(("score_name", "mask_names", "devices"), slow_unless([FAST], CASES))
def test_output_statistics_and_gradients(score_name, mask_names, devices):
    """With NaN and Inf in tokens never read. Several masks are tables, in one program."""
    target, source = lengths_of(devices)
    options = DROPOUT if devices % 2 == 0 else {"normalizer": "log_scaled"}
    with jax.enable_x64(True):
        functions = [
            quick_jit(jax.value_and_grad(loss_of(attend, score_name, **options), has_aux=True))
            for attend in (ring_of(devices), reference)
        ]
        for mask_name in mask_names:
            mask = masks_of(target, source)[mask_name]
            table = np.broadcast_to(mask.materialize(target, source), (B, target, source))
            point = point_of(score_name, target, source)
            queries, keys = ~table.any(2)[..., None], ~table.any(1)[..., None]
            bad = {"query": (queries, np.nan), "key": (keys, np.inf), "value": (keys, np.nan)}
            bad["table"] = ~table.any(0, keepdims=True), np.nan
            point |= {name: np.where(*at, point[name]) for name, at in bad.items()}
            mask = jnp.asarray(table) if len(mask_names) > 1 else mask
            ((_, got), gradients), ((_, expected), expected_gradients) = (
                jax.device_get(function(point, mask)) for function in functions
            )
            assert_close(f"{mask_name}: ", got, expected, 1e-13)
            agree(gradients, expected_gradients)


@pytest.mark.slow
def test_16_bits_accumulate_in_float32():
    query, key = np.random.default_rng(1).normal(size=(2, 96, 3)).astype(jnp.bfloat16)
    narrow = ring_of(3)(query, key, key, mask=aj.causal_mask())
    wide = [np.float32(x) for x in (query, key, key)]
    assert narrow.dtype == jnp.bfloat16
    assert_close("output", narrow, np.asarray(reference(*wide, mask=aj.causal_mask())), 2**-7)


def test_an_offset_of_all_tokens_costs_no_digits():
    """All devices take tokens from one origin, to which padding adds nothing."""
    query, key, value = np.random.default_rng(1).normal(size=(3, 16, 11)).astype(np.float32)
    query, key = query + 100, np.where(np.arange(16)[:, None] < 13, key + 100, np.nan)
    mask = aj.padding_mask(jnp.array(13)) & aj.causal_mask()
    got = ring_of(4)(query, key, value, score="l2", mask=mask)
    with jax.enable_x64(True):
        expected = reference(*map(np.float64, (query, key, value)), score="l2", mask=mask)
    assert_close("output", got, np.asarray(expected), 2e-6)


# --- other axes of the mesh, and what is sent ---


@pytest.mark.parametrize(
    "kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]
)
def test_a_batch_over_other_devices(kind):
    """Gradients and communication on a mesh of data and context."""
    batch, target, source = 4, 20, 28
    rng = np.random.default_rng(1)
    arrays = tuple(np.float32(rng.normal(size=(batch, n, 11))) for n in (target, source, source))
    params = SCORE_CASES["general"].score.init(jax.random.key(0), 11, 11)
    others = params, jnp.array(0.3), jnp.array([source, 2, source - 5, 9])

    def gradients(attend):
        def loss(arrays, params, slope, lengths):
            output = attend(
                *arrays, score="general", params=params, bias=aj.alibi_bias(slope),
                mask=aj.causal_mask(2) & aj.padding_mask(lengths), **DROPOUT,
            )  # fmt: skip
            return jnp.sum(jnp.sin(output))

        return jax.grad(loss, (0, 1, 2))

    mesh = jax.make_mesh((4, 2), ("data", "context"), axis_types=(kind,) * 2)
    attend = functools.partial(ring_attention, mesh=mesh, block_sizes=TILE)
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, P("data", "context", None)))
        compiled = quick_jit(gradients(attend)).lower(placed, *others).compile()
        got = compiled(placed, *others)
    agree(jax.device_get(got), quick_jit(gradients(reference))(arrays, *others), 2e-5)
    for array in got[0]:
        assert array.sharding.spec[:2] == ("data", "context"), array.sharding
    # No tokens are summed or gathered: only gradients of shared arrays, and the status of tiles,
    # about which the batch decides once, before the first round.
    sent = collectives(compiled)
    assert {each.kind for each in sent} == {"collective-permute", "all-reduce"}, sent
    reduced = [each for each in sent if each.kind == "all-reduce"]
    decisions = [each for each in reduced if "pred" in each.dtypes]
    assert len(decisions) <= 1
    assert not any(each.in_loop for each in decisions)
    assert all(each.numbers <= 11 * 11 + 1 for each in reduced if each not in decisions), reduced


def test_inside_of_a_shard_map_over_the_batch():
    mesh = jax.make_mesh((4, 2), ("data", "context"))

    def output(arrays):
        return ring_attention(*arrays, mask=aj.causal_mask(2), mesh=mesh, block_sizes=TILE)

    mapped = jax.shard_map(
        output, in_specs=(P("data"),), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    with jax.set_mesh(mesh):
        cut = P("data", "context")
        arrays = [jax.device_put(np.ones((4, n, 3), np.float32), cut) for n in (20, 28, 28)]
        assert jax.eval_shape(mapped, arrays).sharding.spec[:2] == ("data", "context")


# --- work and memory ---


def test_every_device_computes_as_many_tiles(monkeypatch):
    visits: collections.Counter = collections.Counter()
    pair, length, tile, devices = aj.ScaledDot.pair, 64, 4, 8

    def counting_pair(score, params, q_features, k_features):
        jax.debug.callback(
            lambda device: visits.update([int(device)]), jax.lax.axis_index("context")
        )
        return pair(score, params, q_features, k_features)

    monkeypatch.setattr(aj.ScaledDot, "pair", counting_pair)
    tokens = jnp.ones((length, 3))

    def counted(mask):
        visits.clear()
        ring = ring_of(devices, block_sizes=BlockSizes(tile, tile))
        jax.block_until_ready(ring(tokens, tokens, tokens, score=aj.ScaledDot(2.0), mask=mask))
        jax.effects_barrier()
        return [visits[device] for device in range(devices)]

    rows = length // tile
    assert counted(None) == [rows**2 // devices] * devices
    # Tiles below the diagonal and on it: 136 of 256.
    assert counted(aj.causal_mask()) == [rows * (rows + 1) // 2 // devices] * devices
    # A window is no more than two tiles wide, wherever a device stands.
    assert sum(counted(aj.local_mask(3, 0))) == 2 * rows - 1


def test_memory_of_one_of_eight_devices():
    """The gradient takes an eighth of the arguments, and a fraction of its part of a table."""
    length, features = 4096, 8
    ring = ring_of(8, block_sizes=BlockSizes(64, 64))
    spread = NamedSharding(ring.keywords["mesh"], P("context"))
    tokens = jax.ShapeDtypeStruct((length, features), jnp.float32, sharding=spread)

    def loss(query, key, value):
        return (ring(query, key, value, mask=aj.causal_mask() & ~aj.local_mask(2, 0)) ** 2).sum()

    compiled = quick_jit(jax.grad(loss, (0, 1, 2))).lower(*[tokens] * 3).compile()
    found = compiled.memory_analysis()
    assert found.argument_size_in_bytes == 3 * length * features * 4 / 8
    assert found.temp_size_in_bytes < 4 * length**2 / 8 / 16


def test_a_current_mesh_without_the_axis_is_refused():
    current = jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    refused = pytest.raises(ValueError, match=r"axis_name must be an axis .* data; got 'context'")
    with current, refused:
        ring_of(2)(*np.ones((3, 4, 2), np.float32))
