"""Masks: every table against its rule pair by pair; algebra, pytrees, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, MASK_CASES, B, S, T, allowed_table, quick_jit
from oracles import normal, softmax

import attention_jax as aj
from attention_jax.positions.contract import ShiftedMask, Shifts, TileStatus, as_mask

NAMED_MASKS = {name: as_mask(MASK_CASES[name].build()) for name in MASK_CASES if name != "none"}
KEYS, QUERIES = (np.random.default_rng(4).random((B, n)) < 0.6 for n in (S, T))


def table_of(rule, target=T, source=S):
    return np.array([[rule(i, j) for j in range(source)] for i in range(target)])


@aj.mask_dataclass
class Strided(aj.Mask):
    stride: int

    def allowed(self, query_positions, key_positions):
        return (query_positions[:, None] - key_positions[None, :]) % self.stride == 0


@aj.mask_dataclass
class Threshold(aj.Mask):
    table: jax.Array = aj.array_field("T", "S")

    def allowed(self, query_positions, key_positions):
        return self.table[..., query_positions[:, None], key_positions[None, :]] > 0


class Even:
    """A mixin."""

    def allowed(self, query_positions, key_positions):
        even = key_positions[None, :] % 2 == 0
        return super().allowed(query_positions, key_positions) & even


@aj.mask_dataclass
class EvenInWindow(Even, type(aj.local_mask(1, 3))):
    """A class of the library whose rule its user replaces."""


VALUES = normal(B, T, S)
SIZES = 11, 13  # queries and keys of random masks
CAUSAL, TABLE = np.tri(T, S, dtype=bool), allowed_table("dense")[0]
RULES = {  # mask -> its table
    "offset": (aj.causal_mask(-2), np.tri(T, S, -2)),
    "modulo 256": (aj.segment_mask(np.zeros(T, np.uint8), np.full(S, 256)), np.zeros((T, S))),
    "keys": (aj.token_mask(KEYS), np.broadcast_to(KEYS[:, None, :], (B, T, S))),
    "shared keys": (aj.token_mask(KEYS[0]), np.broadcast_to(KEYS[0], (T, S))),
    "tokens": (aj.token_mask(KEYS, QUERIES), QUERIES[:, :, None] & KEYS[:, None, :]),
    "one's own": (
        Strided(3) & ~aj.causal_mask(-1),
        table_of(lambda i, j: (i - j) % 3 == 0 and j > i - 1),
    ),
    "one's own mixin": (
        EvenInWindow(1, 3),
        table_of(lambda i, j: i - 1 <= j <= i + 3 and j % 2 == 0),
    ),
    "one's own array": (Threshold(VALUES), VALUES > 0),
    "batch axes": (
        aj.padding_mask(np.array([[3], [4]]))
        & aj.segment_mask(np.zeros((1, 3, T), int), np.zeros(S, int)),
        [[table_of(lambda i, j, n=n: j < n)] * 3 for n in (3, 4)],
    ),
    **{
        f"{type(array)} {name}": (combine(array, aj.causal_mask()), combine(TABLE, CAUSAL))
        for array in (TABLE, jnp.asarray(TABLE), TABLE.tolist())
        for name, combine in {
            "array & mask": lambda array, mask: array & mask,
            "mask & array": lambda array, mask: mask & array,
            "array | mask": lambda array, mask: array | mask,
            "mask | array": lambda array, mask: mask | array,
            "not": lambda array, mask: ~(array & mask),
        }.items()
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


# --- what a mask knows of a tile, of later rows, of a row ---


def random_masks():
    """{name: (mask of 40 random examples [11, 13], whether its status tells all there is)}"""
    rng = np.random.default_rng(17)
    target, source = SIZES
    packed = [np.sort(rng.integers(0, 4, size=(40, n)), axis=1) for n in SIZES]
    lengths = [rng.integers(-1, n + 3, size=40) for n in (source, target)]
    tokens = [np.repeat(rng.random((40, n)) < 0.5, 2, axis=1)[:, :n] for n in (source, target)]
    local, padding = aj.local_mask(1, 3), aj.padding_mask(*lengths)
    rows = as_mask(np.repeat(rng.random((40, target, 1)) < 0.5, source, axis=2))
    side_by_side = np.arange(target) + rng.uniform(-6, source, (40, 1))
    return {
        "causal": (aj.causal_mask(-2), True),
        "local": (local, True),
        "local left": (aj.local_mask(2, None), True),
        "bounds of arrays": (aj.local_mask(*rng.integers(0, 9, (2, 40))), True),
        "offsets": (aj.causal_mask(rng.integers(-9, 9, 40)), True),
        "padding": (padding, True),
        "tokens": (aj.token_mask(*tokens), True),
        "dense": (as_mask(rng.random((40, target, source)) < 0.7), True),
        "not dense": (~as_mask(rng.random((40, target, 1)) < 0.7), True),
        "shifted": (ShiftedMask(local, later_by(np.full((40, 1), 2))), True),
        "windows side by side": (aj.window_mask(np.float32(side_by_side), 3), True),
        "windows": (aj.window_mask(np.float32(3 * rng.normal(size=(40, target)) + 5), 2), False),
        "packed segments": (aj.segment_mask(*packed), False),
        "one segment": (aj.segment_mask(packed[0][:, :1], packed[1]), False),
        "of all": (
            (~local & rows) | (aj.segment_mask(*packed) & ~padding & aj.causal_mask(5)),
            False,
        ),
    }


def later_by(shift):
    """Returns the shifts of queries by `shift` [..., 1], and of no keys."""
    return Shifts(queries=shift, keys=np.zeros(shift.shape, np.int32))


def test_a_tiles_status_never_lies_and_tells_what_it_can():
    def every_tile(mask, t, s):
        """Of all tiles [t, s] at any place: claimed and true emptiness and fullness."""

        def of_tile(mask, first_query, first_key):
            positions = first_query + jnp.arange(t), first_key + jnp.arange(s)
            allowed = jnp.broadcast_to(mask.allowed(*positions), (t, s))
            return mask.tile_status(*positions), (~allowed.any(), allowed.all())

        for axes in ((None, None, 0), (None, 0, None)):
            of_tile = jax.vmap(of_tile, axes)
        firsts = (jnp.arange(n - size + 1) for n, size in zip(SIZES, (t, s), strict=True))
        return jax.vmap(of_tile, (0, None, None), axis_size=40)(mask, *firsts)

    cases = random_masks()
    found = jax.jit(lambda masks: {name: every_tile(mask, 2, 3) for name, mask in masks.items()})(
        {name: mask for name, (mask, _) in cases.items()}
    )
    for name, (claims, truths) in jax.tree.map(np.asarray, found).items():
        for claimed, true in zip(claims, truths, strict=True):
            assert not (claimed & ~true).any(), name
            # Half of what there is, at least, and for most masks all of it.
            if cases[name][1]:
                assert (claimed == true).all(), name
            else:
                assert 2 * claimed.sum() >= true.sum(), name


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match="no truth value"):
        aj.causal_mask() and aj.padding_mask(jnp.array(1))


# --- batch axes of the arrays, and lengths that are too long ---


N = B  # as many heads as examples: the case that used to be misread
QUERY, KEY = normal(B, N, T, 3), normal(B, N, S, 3)


def test_tokens_and_batch_axes_mean_what_they_say():
    rows = np.broadcast_to(KEYS[:, None, None], (B, N, T, S))
    real = KEYS[:, None], QUERIES[:, None]
    cases = (
        (aj.token_mask(real[0]), rows),  # one for each example
        (aj.token_mask(KEYS[None]), rows.swapaxes(0, 1)),  # one for each head
        (KEYS[:, None, None], rows),
        (aj.token_mask(KEYS[0]), np.broadcast_to(KEYS[0], rows.shape)),
        (aj.causal_mask(np.array([[1, -2]])), np.stack([np.tri(T, S, k, bool) for k in (1, -2)])),
        (
            aj.token_mask(*real) & aj.causal_mask(1),
            rows & real[1][..., None] & np.tri(T, S, 1, bool),
        ),
    )

    @quick_jit
    def run(masks):
        return [
            [
                aj.attention(QUERY, KEY, KEY, mask=mask, implementation=name,
                             block_sizes=aj.BlockSizes(2, 3))
                for name in (ALL_IMPLEMENTATIONS if mask is masks[-1] else ["reference"])
            ]
            for mask in masks
        ]  # fmt: skip

    logits = np.float64(QUERY) @ np.float64(KEY).swapaxes(-1, -2) / 3**0.5
    for (_, allowed), outputs in zip(cases, run([mask for mask, _ in cases]), strict=True):
        for got in outputs:
            np.testing.assert_allclose(got, softmax(logits, allowed) @ KEY, rtol=2e-5, atol=2e-6)


LENGTHS = np.array([3, 6])
FEWER_AXES = {
    "mask key_lengths": aj.padding_mask(LENGTHS),
    "mask query_lengths": aj.padding_mask(LENGTHS[:, None], LENGTHS),
    "mask key_tokens": aj.token_mask(KEYS),
    "mask right or offset": aj.causal_mask(LENGTHS),
    "mask left": aj.local_mask(LENGTHS, 0),
    "mask query_segments": aj.segment_mask(np.zeros((B, T), int), np.zeros(S, int)),
    "mask centers": aj.window_mask(np.zeros((B, T), np.float32), 2) | aj.causal_mask(),
    "mask": np.ones((B, T, S), bool),
}


@pytest.mark.parametrize("label", FEWER_AXES)
def test_arrays_that_lack_batch_axes_are_told_which_to_write(label):
    """Aligned to the right, [B] lengths of inputs [B, N, T, D] would be one per head."""
    mask, name = FEWER_AXES[label], label.split()[-1]
    message = rf"{label} must have all 2 batch axes .*write {name}\[:, None\] if"
    logits, weights = normal(B, N, T, S), np.full((B, N, T, S), 1 / S, np.float32)
    for call in (
        lambda: aj.attention(QUERY, KEY, KEY, mask=mask),
        lambda: aj.attention_weights(QUERY, KEY, mask=mask),
        lambda: aj.coverage_attention(QUERY, KEY, KEY, mask=mask, coverage_kernel=normal(3)),
        lambda: aj.monotonic_attention(QUERY, KEY, KEY, mask=mask, score="scaled"),
        lambda: aj.local_attention(QUERY, KEY, KEY, centers=np.zeros(T), radius=1, mask=mask),
        lambda: aj.masked_softmax(logits, mask),
        lambda: aj.analysis.normalized_entropy(weights, mask),
        lambda: aj.analysis.attention_gradients(QUERY, KEY, KEY, QUERY, mask=mask),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("key_lengths", (S + 1,)), ("key_lengths", (-1,)), ("query_lengths", (S, np.int32(T + 1)))],
)
def test_lengths_beyond_the_sequence(name, lengths):
    def attend(lengths):
        return aj.attention(QUERY, KEY, KEY, mask=aj.causal_mask() & aj.padding_mask(*lengths))

    with pytest.raises(ValueError, match=f"{name} must be from 0 to"):
        attend(lengths)
    jax.eval_shape(attend, lengths)  # values that are not known yet
    assert jax.jit(lambda length: aj.padding_mask(length).materialize(T, S))(99).all()


WRONG_STATUSES = {
    "empty": (lambda i, j: j[-1] > i[0], lambda i, j: j[-1] <= i[0]),
    "full": (lambda i, j: j[0] > i[-1], lambda i, j: j[0] <= i[0]),
    "an array": (lambda i, j: j[0] >= i[-1], lambda i, j: j[-1] <= i[0]),  # off by one
}


@pytest.mark.parametrize("kind", ["right", *WRONG_STATUSES])
def test_a_wrong_tile_status(kind):
    right = (lambda i, j: j[0] > i[-1], lambda i, j: j[-1] <= i[0])
    x = normal(5, 8)
    empty, full = WRONG_STATUSES.get(kind, right)

    @aj.mask_dataclass
    class Mine(aj.Mask):
        shift: jax.Array = aj.array_field()

        def allowed(self, i, j):
            return j[None] <= i[:, None] + self.shift

        def tile_status(self, i, j):
            return TileStatus(empty(i + self.shift, j), full(i + self.shift, j))

    def call(shift):
        return aj.attention(*[np.stack([x, x])] * 3, mask=Mine(jnp.full(2, shift)))

    if kind == "right":
        expected = aj.attention(x, x, x, mask=aj.causal_mask())
        np.testing.assert_allclose(call(0)[1], expected, rtol=1e-5)
    else:
        with pytest.raises(ValueError, match=r"^mask Mine: tile_status must agree with allowed"):
            call(0)
    jax.jit(call)(0)  # without the numbers of its arrays, nothing is compared


def test_a_tile_status_is_compared_for_every_length():
    @aj.mask_dataclass
    class Window(aj.Mask):
        def allowed(self, i, j):
            return abs(i[:, None] - j[None]) <= 30

        def tile_status(self, i, j):
            return TileStatus(j[0] > i[-1] + 20, jnp.bool_(False))

    short, long = normal(20, 8), normal(40, 8)
    aj.attention(short, short, short, mask=Window())
    with pytest.raises(ValueError, match=r"^mask Window: tile_status must agree with allowed"):
        aj.attention(long, long, long, mask=Window())
