"""Digests: the formula in numpy, every kind of leaf, and no change of bits unseen.

That they do not depend on devices is among the checks of test_sharding.py.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax.runs.digest import describe, digests

NARROW = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}  # bits
KINDS = (
    *NARROW, "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16",
    "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "complex64",
)  # fmt: skip
WIDE = ("int64", "uint64", "float64", "complex128")  # where 64 bits are turned on
SHAPE = (2, 3, 5)


# --- the other side ---


def numpy_dtype(kind):
    return np.dtype(getattr(ml_dtypes, kind, kind))


def random_array(kind, shape=SHAPE, seed=0):
    """Any bits that a dtype can have, NaNs of every payload among them."""
    dtype = numpy_dtype(kind)
    raw = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    if kind in NARROW:
        raw &= 2 ** NARROW[kind] - 1
        if kind.startswith("int"):  # in a byte of their own numpy holds them with their sign
            raw = np.where(raw >> (NARROW[kind] - 1), raw | 256 - 2 ** NARROW[kind], raw)
            raw = raw.astype(np.uint8)
    return raw.view(dtype).reshape(shape)


def mix(word):
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def formula(array):
    """The definition on Python's integers."""
    kind = array.dtype.name
    width = min(array.dtype.itemsize, 4)
    words = [
        int.from_bytes(array.tobytes()[start : start + width], "little")
        & 2 ** NARROW.get(kind, 32) - 1
        for start in range(0, array.nbytes, width)
    ]
    mixed = [mix((word + i * 0x9E3779B9) % 2**32) for i, word in enumerate(words)]
    plain, weighted = sum(mixed), sum((2 * i + 1) * m for i, m in enumerate(mixed))
    return f"{plain % 2**32:08x}{weighted % 2**32:08x}"


def digest(leaf):
    return digests([leaf])["0"]["digest"]


# --- equal to it ---


@pytest.mark.parametrize("wide", [False, True])
def test_it_is_the_formula(wide):
    cases = itertools.product(WIDE if wide else KINDS, (SHAPE, (), (7,), (0,), (3, 0)))
    with jax.enable_x64(wide):
        arrays = {f"{kind} {shape}": random_array(kind, shape) for kind, shape in cases}
        leaves = jax.device_put(arrays)
        assert {name: leaf.dtype for name, leaf in leaves.items()} == {
            name: array.dtype for name, array in arrays.items()
        }
        found = {name: leaf["digest"] for name, leaf in digests(leaves).items()}
    assert found == {name: formula(array) for name, array in arrays.items()}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_of_a_key_it_is_that_of_its_words(impl):
    for key in (jax.random.key(11, impl=impl), jax.random.split(jax.random.key(2, impl=impl), 3)):
        assert digest(key) == formula(np.asarray(jax.random.key_data(key)))


def test_each_leaf_has_its_name_and_kind():
    tree = {"params": {"kernel": jnp.ones((2, 3))}, "moments": (jnp.zeros(5, jnp.bfloat16), None)}
    tree = {**tree, "key": jax.random.key(1)}
    described = describe(tree)
    assert described == {
        "key": {"shape": [], "dtype": "key<fry>"},
        "moments.0": {"shape": [5], "dtype": "bfloat16"},
        "params.kernel": {"shape": [2, 3], "dtype": "float32"},
    }
    found = digests(tree)
    assert found["params.kernel"].pop("digest") == formula(np.ones((2, 3), np.float32))
    assert {name: leaf.keys() - {"digest"} for name, leaf in found.items()} == {
        name: leaf.keys() for name, leaf in described.items()
    }
    assert describe(jax.eval_shape(lambda: tree)) == described
    assert digests({}) == {}


# --- no change unseen ---


@pytest.mark.parametrize("kind", [*KINDS, *WIDE])
def test_any_bit_flipped_changes_it(kind):
    array = random_array(kind, (3, 2))
    width = 8 * array.dtype.itemsize
    with jax.enable_x64(kind in WIDE):
        seen = {digest(jax.device_put(array))}
        for bit in range(8 * array.nbytes):
            if bit % width >= NARROW.get(kind, width):
                continue
            raw = array.copy().view(np.uint8).reshape(-1)
            raw[bit // 8] ^= 1 << bit % 8
            seen.add(digest(jax.device_put(raw.view(array.dtype).reshape(array.shape))))
    assert len(seen) == 1 + array.size * NARROW.get(kind, width)  # nor are any two the same


@pytest.mark.parametrize("kind", ["bool", "int8", "bfloat16", "float32"])
def test_any_two_entries_exchanged_change_it(kind):
    array = random_array(kind, (3, 5))
    original = digest(jax.device_put(array))
    flat = array.reshape(-1)
    for one, other in itertools.combinations(range(flat.size), 2):
        exchanged = flat.copy()
        exchanged[[one, other]] = flat[[other, one]]
        same = flat[one].tobytes() == flat[other].tobytes()
        assert (digest(jax.device_put(exchanged.reshape(3, 5))) == original) == same


def test_values_that_compare_equal_or_not_are_told_apart_by_their_bits():
    zeros, nans = jnp.zeros(3), jnp.full(3, jnp.nan)
    assert digest(zeros) != digest(-zeros)
    assert digest(nans) == digest(jnp.full(3, jnp.nan))
    payload = jax.lax.bitcast_convert_type(jnp.full(3, 0x7FC00001, jnp.uint32), jnp.float32)
    assert jnp.isnan(payload).all()
    assert digest(nans) != digest(payload)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=7, max_size=7), st.data())
def test_any_one_word_changed_changes_both_halves(words, data):
    place, other = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 2**32 - 1))
    changed = words.copy()
    changed[place] = other
    before, after = (digest(jax.device_put(np.array(w, np.uint32))) for w in (words, changed))
    assert (before[:8] == after[:8]) == (before[8:] == after[8:]) == (words == changed)
