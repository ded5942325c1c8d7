"""sum_f v_f tanh(a_if + b_jf): right for every float, every derivative, no [t, s, A] in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conformance import quick_jit
from oracles import normal
from score_cases import slow_unless

from attention_jax.core import pairwise_tanh

SMALL, LOOP = (9, 8, 17), (33, 32, 17)  # shapes t, s, A that are written out, and that loop
# Queries beyond either limit take another formula.
LIMITS = {np.float32: (5.3719, 33.076), np.float64: (44.188, 327.34)}

weighted_tanh = jax.jit(pairwise_tanh.weighted_tanh)  # few shapes below: each compiles once
weighted_tanh_vjp = jax.jit(pairwise_tanh.weighted_tanh_vjp)
tangent_along_ones = jax.jit(
    lambda *x: jax.jvp(pairwise_tanh.weighted_tanh, x, jax.tree.map(jnp.ones_like, x))[1]
)


def inputs(t, s, hidden, dtype=np.float32, seed=0):
    """(v, a, b, dlogits), scaled as a fresh `Additive` scales them."""
    v, a, b = (normal(*shape, seed=seed) for shape in ((hidden,), (t, hidden), (s, hidden)))
    arrays = v * (0.4 * hidden) ** -0.5, a * 0.7, b * 0.7, normal(t, s, seed=seed)
    return tuple(array.astype(dtype) for array in arrays)


def exact(v, a, b, dlogits):
    """Logits, dv, da, db in float64, of sums a + b rounded as the inputs' dtype rounds them."""
    with np.errstate(invalid="ignore", over="ignore"):
        sums = (a[:, None, :] + b[None, :, :]).astype(np.float64)
    v, dlogits, tanh = v.astype(np.float64), dlogits.astype(np.float64), np.tanh(sums)
    weighted = dlogits[:, :, None] * (1 - tanh**2) * v
    return tanh @ v, np.einsum("ts,tsa->a", dlogits, tanh), weighted.sum(1), weighted.sum(0)


assert_close = functools.partial(oracles.assert_close, "", terms=1e-30)


def check(*arguments, tolerance=1e-6, slope_tolerance=5e-6):
    """Compares logits and gradients with the formulas."""
    logits, *gradients = exact(*arguments)
    got = weighted_tanh(*arguments[:3]), *weighted_tanh_vjp(*arguments)
    assert {array.dtype for array in got} == {arguments[0].dtype}
    assert_close(got[0], logits, tolerance)
    assert_close(got[1:], tuple(gradients), slope_tolerance)


# --- values ---


@pytest.mark.parametrize(
    "shape",
    [SMALL, *(pytest.param(x, marks=pytest.mark.slow) for x in (LOOP, (131, 127, 1), (61, 67, 7)))],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_and_gradients_are_the_formulas(shape, dtype):
    with jax.enable_x64(dtype is np.float64):
        tolerances = (1e-6, 2e-6) if dtype is np.float32 else (2e-14, 2e-14)
        check(*inputs(*shape, dtype), tolerance=tolerances[0], slope_tolerance=tolerances[1])


def test_sums_at_once_as_on_a_gpu(monkeypatch):
    """Both formulas, with loops of features and of tokens replaced by one reduction each."""
    monkeypatch.setattr(pairwise_tanh, "_AT_ONCE_ON", ("cpu",))
    shape = (35, 30, 19)  # of no other test: JAX remembers what it has traced
    text = str(jax.make_jaxpr(pairwise_tanh.weighted_tanh)(*inputs(*shape)[:3]))
    # One by tanh; one for the choice of narrow or wide, one narrow, and two wide.
    assert text.count("platform_index") == 5
    v, a, b, dlogits = inputs(*shape)
    check(v, a, b, dlogits)
    check(v, 10 * a, b, dlogits)
    check(v, 40 * a, b, dlogits)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 10.0, 21.0, 23.0, 43.0, 100.0, 1e4, 1e30])
def test_any_magnitude_in_opposite_signs(magnitude):
    v, a, b, dlogits = inputs(*LOOP)
    a[:, 1::2] = np.float32(magnitude) * np.random.default_rng(1).uniform(-1, 1, a[:, 1::2].shape)
    b[:, 1::2] = -a[0, 1::2] + b[:, 1::2] / 2  # a + b is small for query 0 and large for others
    b[:, 3] = np.float32(-magnitude)
    check(v, a, b, dlogits)
    tanh = np.tanh((a[:, None, :] + b[None, :, :]).astype(np.float64))
    assert_close(tangent_along_ones(v, a, b), tanh.sum(-1) + (1 - tanh**2) @ (2 * v), 1e-6)


@pytest.mark.parametrize("magnitude", [1e-8, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("weight", [np.asarray, np.abs])  # of both signs; and no cancellation
def test_absolute_error_of_inputs_of_any_magnitude(weight, magnitude):
    v, a, b, dlogits = inputs(*LOOP)
    v, a, b = weight(v), np.clip(magnitude * a, -33, 33), np.float32(magnitude) * b
    error = np.abs(weighted_tanh(v, a, b) - exact(v, *map(np.float64, (a, b, dlogits)))[0])
    assert error.max() <= 5e-7 * np.abs(v).sum()


@pytest.mark.parametrize("largest", [1e-25, 1.0, 1e30])
@pytest.mark.parametrize("magnitude", [1.0, 20.0])
def test_weights_of_any_size_beside_each_other(magnitude, largest):
    """v from its largest entry down to 2^-75 of it, and 0."""
    v, a, b, dlogits = inputs(*LOOP)
    v = (np.sign(v) * np.r_[2.0 ** -np.arange(0, 80, 5), 0]).astype(np.float32)
    a = np.clip(magnitude * a, -33, 33)
    check(v, a, b, dlogits)
    logits = weighted_tanh(v * np.float32(largest), a, b) / np.float32(largest)
    assert_close(logits, exact(v, a, b, dlogits)[0], 1e-6)


@pytest.mark.parametrize("size", [1e30, 3e38])
def test_cotangents_and_tangents_near_the_largest_float(size):
    """They are linear: a power of two that scales them scales the result, without an overflow."""
    v, a, b, dlogits = inputs(*LOOP)
    dlogits = dlogits / np.abs(dlogits).max() / LOOP[0]
    tangents = v, a / np.abs(a).max(), b
    scale = np.float32(size / 2 ** np.ceil(np.log2(size)))
    large = np.float32(2 ** np.ceil(np.log2(size) - 1))
    infinite = np.array(dlogits)
    infinite[7, 3] = np.inf  # its own row and column alone are not finite
    for got, wanted in zip(
        weighted_tanh_vjp(v, a, b, infinite * np.float32(1e-9))[1:],
        weighted_tanh_vjp(v, a, b, dlogits * np.float32(1e-9))[1:],
        strict=True,
    ):
        finite = np.isfinite(got).all(1)
        assert finite.sum() == len(finite) - 1
        assert_close(np.asarray(got)[finite], np.asarray(wanted)[finite], 1e-6)
    pushed = jax.jit(lambda tangents: jax.jvp(weighted_tanh, (v, a, b), tangents)[1])
    for function in (
        lambda scale: weighted_tanh_vjp(v, a, b, dlogits * scale),
        lambda scale: [pushed(jax.tree.map(lambda x: x * scale / 64, tangents))],
    ):
        for got, wanted in zip(function(scale * large), function(scale), strict=True):
            assert_close(np.asarray(got) / large, wanted, 1e-6)


@pytest.mark.parametrize("dtype", slow_unless([np.float32], LIMITS))
@pytest.mark.parametrize("nudge", [1 - 1e-4, 1 + 1e-4])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("guard", [0, 1])
def test_both_sides_of_a_guard(guard, signs, nudge, dtype):
    """Keys are just saturated for the largest query, just not, or larger than any exponent."""
    with jax.enable_x64(True):
        for each, limits in LIMITS.items():
            exceeded = pairwise_tanh.exceeds(each([nudge * limits[guard]]))
            assert exceeded.tolist() == [guard == 1 or nudge > 1, guard == 1 and nudge > 1]
    with jax.enable_x64(dtype is np.float64):
        v, a, b, dlogits = inputs(*LOOP, dtype)
        limit = signs[0] * nudge * LIMITS[dtype][guard]
        if guard == 0:
            a = np.clip(a, -abs(limit), abs(limit))
        sizes = [1, 1.32, 2, 3, 1e30]
        a[2], b[3:8] = limit, signs[1] * np.multiply.outer(sizes, np.abs(limit * v**0))
        tolerance = 1e-6 if dtype is np.float32 else 1e-14
        check(v, a, b, dlogits, tolerance=tolerance, slope_tolerance=5 * tolerance)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_entry_reaches_its_own_row_only(bad):
    v, a, b, dlogits = inputs(*LOOP)
    a[2, 3], b[4, 3] = bad, -np.inf
    assert pairwise_tanh.exceeds(a).tolist() == 2 * [not np.isnan(bad)]
    check(v, a, b, dlogits)
    for size in (20, 40):  # of another row, which a NaN must not hide
        a[5, 2], b[6, 2] = size, -size
        assert pairwise_tanh.exceeds(a).tolist() == [True, size == 40 or not np.isnan(bad)]
        check(v, a, b, dlogits)


# --- batches ---


@functools.cache
def over_batch(v_axis):
    def both(v, a, b, dlogits):
        return weighted_tanh(v, a, b), *weighted_tanh_vjp(v, a, b, dlogits)

    return quick_jit(jax.vmap(both, (v_axis, 0, 0, 0)))


@pytest.mark.parametrize("v_axis", [None, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("large", [1.0, 8.0, 1e3])
def test_vmap_is_a_loop(v_axis, large):
    examples = [inputs(*LOOP, seed=seed) for seed in range(3)]
    v, a, b, dlogits = (np.stack(parts) for parts in zip(*examples, strict=True))
    a[1, 2] *= np.float32(large)  # one example makes the whole batch take another form
    got = over_batch(v_axis)(v[0] if v_axis is None else v, a, b, dlogits)
    for n in range(3):
        expected = exact(v[0 if v_axis is None else n], a[n], b[n], dlogits[n])
        assert_close(tuple(array[n] for array in got), expected, 5e-6)


# --- derivatives ---


def along_ones(f):
    return lambda *x: jax.jvp(f, x, jax.tree.map(jnp.ones_like, x))[1]


def pulled_back(f):
    """The result of a function, and the gradient for a cotangent that depends on it."""

    def reverse(*x):
        out, pull_back = jax.vjp(f, *x)
        return out, pull_back(jax.tree.map(jnp.cos, out))

    return reverse


def of_the_formula(v, a, b):
    return jnp.tanh(a[:, None, :] + b[None, :, :]) @ v


@functools.cache
def first_and_second(f):
    """Reverse mode, alone and after both modes."""
    return quick_jit(lambda *x: [pulled_back(inner(f))(*x) for inner in (along_ones, pulled_back)])


@pytest.mark.parametrize("shift", [0.0, 200.0])
def test_every_derivative_of_the_logits(shift):
    with jax.enable_x64(True):
        v, a, b, _ = inputs(*LOOP, np.float64)
        got, expected = (
            first_and_second(f)(v, a + shift, b - shift)
            for f in (pairwise_tanh.weighted_tanh, of_the_formula)
        )
    assert_close(got, expected, 1e-11)


# --- memory ---


def temporaries(function, *arguments):
    """Floats of temporary memory, in units of one [t, s] tile."""
    compiled = jax.jit(function).lower(*arguments).compile()
    tile = arguments[1].shape[0] * arguments[2].shape[0]
    return compiled.memory_analysis().temp_size_in_bytes / (4 * tile)


def loss(v, a, b):
    return jnp.sum(jnp.sin(weighted_tanh(v, a, b)))


def pushed(function):
    return lambda *x: jax.jvp(function, x, x)


MEMORY = {  # a function, and the most tiles [t, s] that it keeps; the first keeps one
    "logits": (weighted_tanh, 3),
    "gradient": (jax.grad(loss, (0, 1, 2)), 12),
    "tangents": (pushed(weighted_tanh), 8),
    "tangents of the gradient": (pushed(jax.grad(loss, (0, 1, 2))), 40),
}


@pytest.mark.parametrize("name", slow_unless(["logits", "gradient"], MEMORY))
def test_no_array_of_every_pair_and_feature(name):
    function, most = MEMORY[name]
    assert temporaries(function, *inputs(256, 256, 128)[:3]) < most
