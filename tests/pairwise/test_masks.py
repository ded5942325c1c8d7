"""Masks: every table against its rule pair by pair; algebra, pytrees, and errors."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_MASKS, MASK_CASES, B, S, T, allowed_table

from attention_jax import (
    Mask,
    causal_mask,
    local_mask,
    mask_dataclass,
    masked_softmax,
    padding_mask,
    segment_mask,
)
from attention_jax.pairwise.mask_algebra import ShiftedMask
from attention_jax.pairwise.masks import array_field, as_mask
from attention_jax.pairwise.position_functions import Shifts


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


@pytest.mark.parametrize("name", [name for name in ALL_MASKS if name != "none"])
def test_materialize_equals_the_rule_pair_by_pair(name):
    table = jitted_table(T, S)(as_mask(MASK_CASES[name].build()))
    assert table.dtype == bool
    np.testing.assert_array_equal(np.broadcast_to(table, (B, T, S)), allowed_table(name))


@pytest.mark.parametrize("offset", [-9, -2, 0, 3, 9])
@pytest.mark.parametrize(("target", "source"), [(5, 7), (7, 5), (0, 7), (5, 0), (1, 1)])
def test_causal_offsets_and_lengths(offset, target, source):
    table = causal_mask(offset).materialize(target, source)
    assert table.shape == (target, source)
    expected = np.tril(np.ones((target, source), bool), offset)
    np.testing.assert_array_equal(table, expected)


def test_day_11_causal_mask_of_four_tokens():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask().materialize(4, 4).astype(int).tolist() == expected


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, None), (None, 1), (None, None), (1, 3)])
def test_local_bounds(left, right):
    def rule(i, j):
        return (left is None or j >= i - left) and (right is None or j <= i + right)

    np.testing.assert_array_equal(local_mask(left, right).materialize(T, S), table_of(rule))


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
    np.testing.assert_array_equal(segments, table_of(lambda i, j: i == j))
    np.testing.assert_array_equal(local, table_of(lambda i, j: i - 1 <= j <= i))


def test_segments_that_agree_only_modulo_256_differ():
    mask = segment_mask(np.array([0], np.uint8), np.array([0, 256]))
    assert mask.materialize(1, 2).tolist() == [[True, False]]


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, lambda table: table.tolist()])
def test_arrays_combine_from_either_side(convert):
    table = allowed_table("dense")[0]
    causal = table_of(lambda i, j: j <= i)
    array = convert(table)
    for mask, expected in (
        (array & causal_mask(), table & causal),
        (causal_mask() & array, table & causal),
        (array | causal_mask(), table | causal),
        (causal_mask() | array, table | causal),
        (~(array & causal_mask()), ~(table & causal)),
    ):
        assert isinstance(mask, Mask)
        np.testing.assert_array_equal(mask.materialize(T, S), expected)


def test_combining_masks_of_different_batch_axes():
    mask = padding_mask(jnp.array([[3], [4]])) & segment_mask(
        jnp.zeros((1, 3, T), int), jnp.zeros(S, int)
    )
    expected = [[table_of(lambda i, j, n=n: j < n)] * 3 for n in (3, 4)]
    np.testing.assert_array_equal(mask.materialize(T, S), expected)


def test_a_mask_of_ones_own():
    mask = Strided(3) & ~causal_mask(-1)
    expected = table_of(lambda i, j: (i - j) % 3 == 0 and not j <= i - 1)
    np.testing.assert_array_equal(mask.materialize(T, S), expected)
    assert Strided(3) == Strided(3) != Strided(2)
    values = np.random.default_rng(0).normal(size=(B, T, S)).astype(np.float32)
    np.testing.assert_array_equal(Threshold(values).materialize(T, S), values > 0)


def test_masks_without_arrays_are_compared_and_hashed_by_value():
    assert causal_mask(1) & local_mask(2, None) == causal_mask(1) & local_mask(2, None)
    assert len({~causal_mask(1), ~causal_mask(1), ~causal_mask(2), local_mask(1, 0)}) == 3
    assert local_mask(np.int64(1), None) == local_mask(1, None)


def test_masks_with_arrays_hash_and_compare_by_identity():
    @mask_dataclass
    class Inherits(Threshold):
        power: int = 1

    for mask in (padding_mask(jnp.array([1, 2])), Inherits(jnp.ones((T, S)), power=2)):
        assert mask == mask
        assert {mask: 1}[mask] == 1


def test_static_options_recompile_and_arrays_do_not():
    traces = []

    @jax.jit
    def table(mask):
        traces.append(mask)
        return mask.materialize(T, S)

    for length in (1, 4, 6):
        got = table(causal_mask(1) & padding_mask(jnp.array(length)))
        np.testing.assert_array_equal(got, table_of(lambda i, j, n=length: j <= i + 1 and j < n))
    assert len(traces) == 1
    table(causal_mask(2) & padding_mask(jnp.array(1)))
    assert len(traces) == 2
    static = functools.partial(jax.jit, static_argnums=0)(lambda mask: mask.materialize(T, S))
    np.testing.assert_array_equal(static(causal_mask(1)), table_of(lambda i, j: j <= i + 1))


def test_vmap_and_scan_over_a_masks_arrays():
    lengths = jnp.array([0, 3, 7])
    expected = [table_of(lambda i, j, n=n: j < n) for n in (0, 3, 7)]
    mapped = jax.vmap(lambda mask: mask.materialize(T, S))(padding_mask(lengths))
    np.testing.assert_array_equal(mapped, expected)
    _, scanned = jax.lax.scan(
        lambda carry, mask: (carry, mask.materialize(T, S)), 0, padding_mask(lengths)
    )
    np.testing.assert_array_equal(scanned, expected)


def test_a_tile_of_positions_is_the_block_of_the_table():
    masks = {name: as_mask(MASK_CASES[name].build()) for name in ALL_MASKS[1:]}

    @jax.jit
    def tiles(masks, rows, columns):
        return {name: mask.allowed(rows, columns) for name, mask in masks.items()}

    for name, tile in tiles(masks, np.array([3, 4]), np.array([2, 5, 6])).items():
        block = allowed_table(name)[:, 3:5][:, :, [2, 5, 6]]
        np.testing.assert_array_equal(np.broadcast_to(tile, block.shape), block, err_msg=name)


def _random_masks():
    """{name: (mask of 40 random examples, whether its status tells all there is to tell)}"""
    rng = np.random.default_rng(17)
    count, target, source = 40, 11, 13
    packed = [np.sort(rng.integers(0, 4, size=(count, n)), axis=1) for n in (target, source)]
    loose = [rng.integers(0, 3, size=(count, n)) for n in (target, source)]
    lengths = [rng.integers(-1, n + 3, size=count) for n in (source, target)]
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


def later_by(shift):
    """Returns the shifts of queries by `shift` [..., 1], and of no keys."""
    return Shifts(queries=shift, keys=np.zeros(shift.shape, np.int32))


def test_a_shifted_mask_is_the_later_rows():
    masks = {name: as_mask(MASK_CASES[name].build()) for name in ALL_MASKS[1:]}

    @functools.partial(jax.jit, static_argnums=2)
    def later(masks, shift, rows):
        shifts = later_by(shift)
        return {
            name: ShiftedMask(mask, shifts).materialize(rows, S) for name, mask in masks.items()
        }

    for shift in range(T):
        for name, table in later(masks, np.array([shift]), T - shift).items():
            table = np.broadcast_to(table, (B, T - shift, S))
            np.testing.assert_array_equal(table, allowed_table(name)[:, shift:], err_msg=name)


def test_how_many_keys_a_query_sees_at_most():
    window, table = local_mask(2, 1), np.ones((T, S), bool)
    for mask, most in (
        (window, 4),
        (local_mask(0, 0), 1),
        (local_mask(None, 1), sys.maxsize),
        (local_mask(1, None), sys.maxsize),
        (causal_mask(), sys.maxsize),
        (padding_mask(np.array(3)), sys.maxsize),
        (as_mask(table), sys.maxsize),
        (Strided(3), sys.maxsize),
        (table & window, 4),
        (window & local_mask(0, 5) & causal_mask(), 4),
        (window | local_mask(0, 0), sys.maxsize),
        (~window, sys.maxsize),
        (ShiftedMask(window, later_by(np.array([3]))), 4),
    ):
        assert mask.most_keys() == most
        assert np.asarray(jitted_table(T, S)(mask)).sum(-1).max() <= most


def test_of_a_mask_of_ones_own_nothing_is_known_unless_it_says_so():
    tile = np.arange(2), np.arange(3)
    own = Strided(3)
    assert not any(own.tile_status(*tile))
    assert not any((~own).tile_status(*tile))
    # In a combination, the other mask's status may suffice.
    assert (own & causal_mask(-9)).tile_status(*tile).empty
    assert not (own & causal_mask(9)).tile_status(*tile).full
    assert (own | causal_mask(9)).tile_status(*tile).full
    assert not (own | causal_mask(-9)).tile_status(*tile).empty


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: causal_mask(0.5), "offset must be an integer; got 0.5"),
        (lambda: local_mask(-1, 0), "left must be at least 0; got -1"),
        (lambda: local_mask(0, "2"), "right must be an integer; got '2'"),
        (
            lambda: padding_mask(np.array([[None], [None]])),
            "key_lengths must be an array; got ndarray$",
        ),
        (lambda: padding_mask(jnp.ones(2)), "key_lengths must be integers; got dtype float32"),
        (
            lambda: padding_mask(jnp.array(1), jnp.array(True)),
            "query_lengths must be integers; got dtype bool",
        ),
        (
            lambda: segment_mask(jnp.array([1]), jnp.array(1)),
            r"key_segments must have a position axis, \[\*B, length\]; got a scalar",
        ),
        (
            lambda: causal_mask() & jnp.ones((T, S), jnp.int32),
            "mask must be boolean, True = may attend; got dtype int32",
        ),
        (lambda: causal_mask() | "all", "mask must be a Mask or a boolean array; got 'all'"),
        (
            lambda: segment_mask(jnp.arange(3), jnp.arange(S)).materialize(T, S),
            r"mask query_segments must broadcast to \[5\] \(\*B, T\); got \[3\]",
        ),
        (
            lambda: as_mask(np.ones((T, T), bool)).materialize(T, S),
            r"mask must broadcast to \[5, 7\] \(\*B, T, S\); got \[5, 5\]",
        ),
        (
            lambda: Threshold(jnp.ones(S)).materialize(T, S),
            r"mask table must broadcast to \[5, 7\] \(\*B, T, S\); got \[7\]",
        ),
        (
            lambda: masked_softmax(jnp.ones((T, S)), segment_mask(jnp.arange(T), jnp.arange(T))),
            r"mask key_segments must broadcast to \[7\] \(\*B, S\); got \[5\]",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_offsets_near_the_end_of_int32_do_not_wrap():
    assert causal_mask(2**31 - 1).materialize(3, 3).all()
    assert not causal_mask(1 - 2**31).materialize(3, 3).any()
    assert local_mask(2**31 - 1, 2**31 - 1).materialize(3, 3).all()
    with pytest.raises(ValueError, match="offset must be at most 2147483647; got 2147483648"):
        causal_mask(2**31)


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match=r"no truth value: combine masks with &, \| and ~"):
        causal_mask() and padding_mask(jnp.array(1))


def test_a_mask_without_a_rule_says_so():
    class Empty(Mask):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define allowed\(query, key\)"):
        Empty().allowed(jnp.arange(T), jnp.arange(S))
