"""Masks: every table against its rule pair by pair; algebra, pytrees, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import MASK_CASES, B, S, T, allowed_table
from oracles import normal

from attention_jax import (
    Mask,
    causal_mask,
    local_mask,
    mask_dataclass,
    padding_mask,
    segment_mask,
    token_mask,
)
from attention_jax.pairwise.mask_algebra import ShiftedMask
from attention_jax.pairwise.masks import array_field, as_mask
from attention_jax.pairwise.position_functions import Shifts

NAMED_MASKS = {name: as_mask(MASK_CASES[name].build()) for name in MASK_CASES if name != "none"}
KEYS, QUERIES = (np.random.default_rng(4).random((B, n)) < 0.6 for n in (S, T))


@functools.cache
def jitted_table(target, source):
    """Returns a compiled function: the table of a mask, so that its operations are one program."""
    return jax.jit(lambda mask: mask.materialize(target, source))


def table_of(rule, target=T, source=S):
    return np.array([[rule(i, j) for j in range(source)] for i in range(target)])


@mask_dataclass
class Strided(Mask):
    stride: int

    def allowed(self, query_positions, key_positions):
        return (query_positions[:, None] - key_positions[None, :]) % self.stride == 0


@mask_dataclass
class Threshold(Mask):
    table: jax.Array = array_field("T", "S")

    def allowed(self, query_positions, key_positions):
        return self.table[..., query_positions[:, None], key_positions[None, :]] > 0


VALUES = normal(B, T, S)
CAUSAL, TABLE = np.tri(T, S, dtype=bool), allowed_table("dense")[0]
RULES = {  # mask -> its table
    "offset": (causal_mask(-2), np.tri(T, S, -2)),
    "far offset": (causal_mask(9), np.ones((T, S))),
    "one's own key": (local_mask(0, 0), np.eye(T, S)),
    "left": (local_mask(2, None), table_of(lambda i, j: j >= i - 2)),
    "right": (local_mask(None, 1), np.tri(T, S, 1)),
    "both": (local_mask(1, 3), table_of(lambda i, j: i - 1 <= j <= i + 3)),
    "everything": (local_mask(None, None), np.ones((T, S))),
    "the largest offset": (causal_mask(2**31 - 1), np.ones((T, S))),
    "the smallest offset": (causal_mask(1 - 2**31), np.zeros((T, S))),
    "the largest window": (local_mask(2**31 - 1, 2**31 - 1), np.ones((T, S))),
    "segments modulo 256": (segment_mask(np.zeros(T, np.uint8), np.full(S, 256)), np.zeros((T, S))),
    "keys": (token_mask(KEYS), np.broadcast_to(KEYS[:, None, :], (B, T, S))),
    "shared keys": (token_mask(KEYS[0]), np.broadcast_to(KEYS[0], (T, S))),
    "tokens": (token_mask(KEYS, QUERIES), QUERIES[:, :, None] & KEYS[:, None, :]),
    "one's own": (
        Strided(3) & ~causal_mask(-1),
        table_of(lambda i, j: (i - j) % 3 == 0 and j > i - 1),
    ),
    "one's own array": (Threshold(VALUES), VALUES > 0),
    "batch axes": (
        padding_mask(np.array([[3], [4]]))
        & segment_mask(np.zeros((1, 3, T), int), np.zeros(S, int)),
        [[table_of(lambda i, j, n=n: j < n)] * 3 for n in (3, 4)],
    ),
    **{
        f"{kind} {name}": (combine(array), table)
        for kind, array in (("NumPy", TABLE), ("JAX", jnp.asarray(TABLE)), ("list", TABLE.tolist()))
        for name, combine, table in (
            ("array & mask", lambda array: array & causal_mask(), TABLE & CAUSAL),
            ("mask & array", lambda array: causal_mask() & array, TABLE & CAUSAL),
            ("array | mask", lambda array: array | causal_mask(), TABLE | CAUSAL),
            ("mask | array", lambda array: causal_mask() | array, TABLE | CAUSAL),
            ("not", lambda array: ~(array & causal_mask()), ~(TABLE & CAUSAL)),
        )
    },
}  # fmt: skip


def test_a_table_is_the_rule_of_each_pair():
    @jax.jit
    def tables_and_tiles(masks, rules, rows, columns):
        return (
            {name: mask.materialize(T, S) for name, mask in (masks | rules).items()},
            {name: mask.allowed(rows, columns) for name, mask in masks.items()},
        )

    rules = {name: mask for name, (mask, _) in RULES.items()}
    rows, columns = np.array([3, 4]), np.array([2, 5, 6])
    tables, tiles = tables_and_tiles(NAMED_MASKS, rules, rows, columns)
    expected = {name: allowed_table(name) for name in NAMED_MASKS}
    for name, table in (expected | {name: table for name, (_, table) in RULES.items()}).items():
        assert tables[name].dtype == bool
        shape = np.broadcast_shapes(np.shape(table), tables[name].shape)
        got = np.broadcast_to(tables[name], shape)
        np.testing.assert_array_equal(got, np.broadcast_to(table, shape), err_msg=name)
    for name, tile in tiles.items():
        block = expected[name][:, 3:5][:, :, [2, 5, 6]]
        np.testing.assert_array_equal(np.broadcast_to(tile, block.shape), block, err_msg=name)


@pytest.mark.parametrize(("target", "source"), [(7, 5), (0, 7), (5, 0), (1, 1)])
def test_lengths(target, source):
    table = causal_mask(1).materialize(target, source)
    np.testing.assert_array_equal(table, np.tri(target, source, 1, dtype=bool))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("x64", [False, True])
def test_integers_of_any_width_under_strict_promotion(dtype, x64):
    with jax.enable_x64(x64):
        masks = (
            padding_mask(np.array(3, dtype), np.array(2, np.uint16)),
            segment_mask(np.arange(T).astype(dtype), np.arange(S)),
            local_mask(dtype(1), dtype(0)),
        )
        tables = jax.jit(lambda masks: [mask.materialize(T, S) for mask in masks])
        padding, segments, local = tables(masks)
    np.testing.assert_array_equal(padding, table_of(lambda i, j: j < 3 and i < 2))
    np.testing.assert_array_equal(segments, np.eye(T, S))
    np.testing.assert_array_equal(local, table_of(lambda i, j: i - 1 <= j <= i))


def test_equality_and_hashes():
    """By value for masks without arrays, by identity for the others."""
    assert causal_mask(1) & local_mask(2, None) == causal_mask(1) & local_mask(2, None)
    assert len({~causal_mask(1), ~causal_mask(1), ~causal_mask(2), local_mask(1, 0)}) == 3
    assert local_mask(np.int64(1), None) == local_mask(1, None)
    assert Strided(3) == Strided(3) != Strided(2)

    @mask_dataclass
    class Inherits(Threshold):
        power: int = 1

    for mask in (padding_mask(jnp.array([1, 2])), Inherits(jnp.ones((T, S)), power=2)):
        assert mask == mask
        assert {mask: 1}[mask] == 1


def test_static_options_recompile_and_arrays_do_not():
    table = jax.jit(lambda mask: mask.materialize(T, S))
    for length in (1, 4, 6):
        got = table(causal_mask(1) & padding_mask(jnp.array(length)))
        np.testing.assert_array_equal(got, table_of(lambda i, j, n=length: j <= i + 1 and j < n))
    assert table._cache_size() == 1
    table(causal_mask(2) & padding_mask(jnp.array(1)))
    assert table._cache_size() == 2
    tokens = token_mask(KEYS, QUERIES)  # memory is linear
    assert [leaf.shape for leaf in jax.tree.leaves(tokens)] == [(B, S), (B, T)]
    static = functools.partial(jax.jit, static_argnums=0)(lambda mask: mask.materialize(T, S))
    np.testing.assert_array_equal(static(causal_mask(1)), np.tri(T, S, 1))


def test_vmap_and_scan_over_a_masks_arrays():
    lengths = padding_mask(jnp.array([0, 3, 7]))
    expected = [table_of(lambda i, j, n=n: j < n) for n in (0, 3, 7)]
    mapped = jax.vmap(lambda mask: mask.materialize(T, S))(lengths)
    np.testing.assert_array_equal(mapped, expected)
    scanned = jax.lax.scan(lambda carry, mask: (carry, mask.materialize(T, S)), 0, lengths)[1]
    np.testing.assert_array_equal(scanned, expected)


# --- what a mask knows of a tile, of later rows, of a row ---


def _random_masks():
    """{name: (mask of 40 random examples, whether its status tells all there is to tell)}"""
    rng = np.random.default_rng(17)
    count, target, source = 40, 11, 13
    packed = [np.sort(rng.integers(0, 4, size=(count, n)), axis=1) for n in (target, source)]
    loose = [rng.integers(0, 3, size=(count, n)) for n in (target, source)]
    lengths = [rng.integers(-1, n + 3, size=count) for n in (source, target)]
    tokens = [np.repeat(rng.random((count, n)) < 0.5, 2, axis=1)[:, :n] for n in (source, target)]
    causal, local, padding = causal_mask(-2), local_mask(1, 3), padding_mask(*lengths)
    dense = as_mask(
        (rng.random((count, target, source)) < 0.5)
        | np.repeat(rng.random((count, target, 1)) < 0.5, source, axis=2)
    ) & as_mask(np.repeat(rng.random((count, target // 2 + 1, 1)) < 0.5, 2, axis=1)[:, :target])
    return (
        target,
        source,
        {
            "causal": (causal, True),
            "causal far": (causal_mask(20), True),
            "local": (local, True),
            "local left": (local_mask(2, None), True),
            "local right": (local_mask(None, 0), True),
            "everything": (local_mask(None, None), True),
            "padding": (padding, True),
            "padding of keys": (padding_mask(lengths[0]), True),
            "tokens": (token_mask(*tokens), True),
            "tokens of keys": (token_mask(tokens[0]), True),
            "packed segments": (segment_mask(*packed), False),
            "loose segments": (segment_mask(*loose), False),
            "one segment": (segment_mask(packed[0][:, :1], packed[1]), False),
            "dense": (as_mask(rng.random((count, target, source)) < 0.7), True),
            "dense row": (as_mask(rng.random((count, 1, source)) < 0.7), True),
            "not dense": (~as_mask(rng.random((count, target, 1)) < 0.7), True),
            "and": (causal & padding, False),
            "or": (local | padding, False),
            "not": (~(causal | padding), False),
            "shifted": (ShiftedMask(local, later_by(np.full((count, 1), 2))), True),
            "of all": (
                (~local & dense) | (segment_mask(*packed) & ~padding & causal_mask(5)),
                False,
            ),
        },
    )


def later_by(shift):
    """Returns the shifts of queries by `shift` [..., 1], and of no keys."""
    return Shifts(queries=shift, keys=np.zeros(shift.shape, np.int32))


def test_a_tiles_status_never_lies_and_tells_what_it_can():
    target, source, cases = _random_masks()

    def every_tile(mask, t, s):
        """Of all tiles [t, s] at any place: claimed and true emptiness and fullness."""

        def of_tile(mask, first_query, first_key):
            positions = first_query + jnp.arange(t), first_key + jnp.arange(s)
            allowed = jnp.broadcast_to(mask.allowed(*positions), (t, s))
            return mask.tile_status(*positions), (~allowed.any(), allowed.all())

        for axes in ((None, None, 0), (None, 0, None)):
            of_tile = jax.vmap(of_tile, axes)
        firsts = jnp.arange(target - t + 1), jnp.arange(source - s + 1)
        return jax.vmap(of_tile, (0, None, None), axis_size=40)(mask, *firsts)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def tiles_of_all(masks, t, s):
        return {name: every_tile(mask, t, s) for name, mask in masks.items()}

    masks = {name: mask for name, (mask, _) in cases.items()}
    exact = {name: mask for name, (mask, exact) in cases.items() if exact}
    for group, tile in ((exact, (5, 2)), (masks, (2, 3))):
        for name, result in jax.tree.map(np.asarray, tiles_of_all(group, *tile)).items():
            claims, truths = result
            for claimed, true in zip(claims, truths, strict=True):
                assert claimed.shape == np.broadcast_shapes(claimed.shape, true.shape), name
                assert not (claimed & ~true).any(), name
                # Half of what there is, at least, and for most masks all of it.
                if name in exact:
                    assert (claimed == true).all(), name
                else:
                    assert 2 * claimed.sum() >= true.sum(), name
    assert claims[0].any()
    assert claims[1].any()


def test_of_a_mask_of_ones_own_nothing_is_known_unless_it_says_so():
    tile = np.arange(2), np.arange(3)
    own = Strided(3)
    assert not any((*own.tile_status(*tile), *(~own).tile_status(*tile)))
    # In a combination, the other mask's status may suffice.
    assert (own & causal_mask(-9)).tile_status(*tile).empty
    assert not (own & causal_mask(9)).tile_status(*tile).full
    assert (own | causal_mask(9)).tile_status(*tile).full
    assert not (own | causal_mask(-9)).tile_status(*tile).empty


def test_a_shifted_mask_is_the_later_rows():
    @functools.partial(jax.jit, static_argnums=2)
    def later(masks, shift, rows):
        shifts = later_by(shift)
        return {
            name: ShiftedMask(mask, shifts).materialize(rows, S) for name, mask in masks.items()
        }

    for shift in (0, 2, T - 1):
        for name, table in later(NAMED_MASKS, np.array([shift]), T - shift).items():
            table = np.broadcast_to(table, (B, T - shift, S))
            np.testing.assert_array_equal(table, allowed_table(name)[:, shift:], err_msg=name)


# --- mistakes ---


def test_masks_that_cannot_be_read():
    with pytest.raises(TypeError, match="no truth value"):
        causal_mask() and padding_mask(jnp.array(1))

    class Empty(Mask):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define allowed\(query, key\)"):
        Empty().allowed(jnp.arange(T), jnp.arange(S))
