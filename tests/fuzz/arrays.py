"""Arrays for fuzzing: good ones, bad ones, and comparisons with a tolerance."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from conformance import short
from hypothesis import strategies as st

# Contents of an array: all zeros, or about a third of the entries are extreme.
FILLINGS = ("zeros", "denormal", "huge", "max", "nan", "inf", "-inf", "nonfinite")
ENTRIES = {
    "denormal": (1e-40,), "huge": (1e30, -1e30), "max": (np.finfo(np.float32).max,),
    "nan": (np.nan,), "inf": (np.inf,), "-inf": (-np.inf,), "nonfinite": (np.nan, np.inf, -np.inf),
}  # fmt: skip
MODERATE = 100.0  # products of entries up to this size neither overflow nor lose precision

seeds = st.integers(0, 2**20)
plain_or_not = st.one_of(st.just("plain"), st.just("plain"), st.sampled_from(FILLINGS))

# Only a few, so that cases share compiled programs.
SIZES = [  # *B, T, S, Dq, Dk, Dv
    ((), 2, 3, 2, 2, 2),
    ((2,), 2, 3, 2, 2, 3),
    ((2,), 3, 2, 3, 3, 1),
    ((2,), 2, 3, 3, 2, 2),
    ((), 1, 1, 1, 1, 1),
    ((), 5, 3, 2, 2, 2),
    ((2, 1), 2, 3, 2, 2, 2),
    ((0,), 2, 3, 2, 2, 2),
    ((2,), 0, 3, 2, 2, 2),
    ((2,), 2, 0, 2, 2, 2),
    ((), 0, 0, 1, 1, 2),
    ((), 2, 3, 2, 2, 0),
]
# (dtype, whether float64 is on)
DTYPES = [
    (np.float32, False), (np.float32, False), (np.float32, False), (jnp.bfloat16, False),
    (np.float16, False), (np.float64, False), (np.float64, True),
]  # fmt: skip


def filled(rng: np.random.Generator, shape: tuple[int, ...], filling: str = "plain") -> np.ndarray:
    """Returns a float64 array; plain entries are exact in bfloat16."""
    array = short(rng.normal(size=shape))
    if filling == "zeros":
        return np.zeros(shape)
    if filling != "plain":
        array = np.where(rng.random(shape) < 0.35, rng.choice(ENTRIES[filling], shape), array)
    return array


def narrowed(array: np.ndarray, dtype: Any, x64: bool) -> np.ndarray:
    """Returns the values that JAX keeps, as float64; values beyond the dtype are infinite."""
    with np.errstate(all="ignore"):
        kept = array.astype(dtype)
        return (kept if x64 else kept.astype(np.float32)).astype(np.float64)


def given(array: np.ndarray, dtype: Any, container: str) -> Any:
    """Returns the array as a user may pass it: as NumPy or JAX array, or as nested lists."""
    with np.errstate(all="ignore"):
        array = array.astype(dtype)
    if container == "list" and dtype == np.float32 and array.size:
        return array.tolist()
    return jnp.asarray(array) if container == "jax" else array


NO_FLOATS = {
    "text": "tokens",
    "bytes": b"tokens",
    "dict": {"a": 1.0},
    "ragged": [[[1.0], [1.0, 2.0]]],
    "object": np.array([[object()] * 2] * 2),
    "words": np.array([["a", "b"]]),
    "ints": np.ones((2, 2), np.int32),
    "int": 3,
    "bools": np.ones((2, 2), bool),
    "complex": np.ones((2, 2), np.complex64),
    "dates": np.array([["2020-01-01"]], "datetime64[D]"),
    "set": {1.0, 2.0},
    "function": len,
}
NO_INTEGERS = {
    **{name: NO_FLOATS[name] for name in ("text", "bytes", "dict", "ragged", "object", "words")},
    "floats": np.ones(2, np.float32),
    "float": 2.0,
    "bools": np.ones(2, bool),
    "complex": np.ones(2, np.complex64),
}
# Not a whole number of at least 1.
NO_SIZES = {"zero": 0, "negative": -1, "float": 2.0, "half": 2.5, "text": "2", "list": [2]}


def tolerance(dtype: Any, x64: bool, size: float) -> float:
    """Returns the relative tolerance: the contract's bound, and rounding of terms of `size`."""
    if x64:
        return 1e-12 * (1 + size)
    rounding = {jnp.bfloat16: 2.0**-8, np.float16: 2.0**-10}.get(dtype, 0.0)
    return 2e-6 + rounding + 4 * 2.0**-23 * size


def assert_near(
    name: str,
    got: Any,
    expected: np.ndarray,
    bound: float,
    where: Any = None,
    terms: float = 0.0,
) -> None:
    """Asserts equal shapes, equal infinities and NaN, and errors within bound * max |expected|.

    A difference of nearly equal terms is only as exact as the terms: where `terms` is larger than
    all expected entries, errors may be up to bound * terms.

    Args:
        name: name of the array in the error.
        got, expected: arrays.
        bound: tolerance relative to the largest compared entry.
        where: bool, broadcastable; the entries to compare, None for all.
        terms: the size of the terms whose sums the entries are.
    """
    got = np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, not {expected.shape}"
    compared = np.ones(got.shape, bool) if where is None else np.broadcast_to(where, got.shape)
    finite = np.isfinite(expected) & compared
    not_finite = compared & ~finite
    assert np.array_equal(got[not_finite], expected[not_finite], equal_nan=True), (
        f"{name}: {got[not_finite]}, not {expected[not_finite]}"
    )
    scale = np.max(np.abs(expected[finite]), initial=terms)
    with np.errstate(all="ignore"):
        error = np.max(np.abs(got[finite] - expected[finite]), initial=0.0)
    # XLA flushes denormal numbers to 0.
    assert error <= bound * scale + 1e-37, f"{name}: error {error:.3g} at scale {scale:.3g}"


def assert_kind(name: str, got: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Asserts the shape and dtype of an array."""
    assert got.shape == shape, f"{name}: shape {got.shape}, not {shape}"
    assert got.dtype == dtype, f"{name}: dtype {got.dtype}, not {dtype}"


def fits(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Returns whether NumPy broadcasts `shape` to `full`."""
    try:
        return np.broadcast_shapes(shape, full) == full
    except ValueError:
        return False
