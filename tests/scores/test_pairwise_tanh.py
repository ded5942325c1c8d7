"""sum_f v_f tanh(a_if + b_jf): right for every float, every derivative, no [t, s, A] in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from jax.test_util import check_grads

from attention_jax.scores import pairwise_tanh

SMALL, LOOP = (9, 8, 17), (33, 32, 17)  # shapes t, s, A that are written out, and that loop
LIMITS = {np.float32: 33.076, np.float64: 327.34}

weighted_tanh = jax.jit(pairwise_tanh.weighted_tanh)  # few shapes below: each compiles once
weighted_tanh_vjp = jax.jit(pairwise_tanh.weighted_tanh_vjp)


def inputs(t, s, hidden, dtype=np.float32, seed=0):
    """(v, a, b, dlogits), scaled as a fresh `Additive` scales them."""
    rng = np.random.default_rng(seed)
    shapes = {"v": (hidden,), "a": (t, hidden), "b": (s, hidden), "dlogits": (t, s)}
    v, a, b, dlogits = (rng.normal(size=shape).astype(dtype) for shape in shapes.values())
    return v * dtype((0.4 * hidden) ** -0.5), a * dtype(0.7), b * dtype(0.7), dlogits


def exact(v, a, b, dlogits=None):
    """The formulas in float64, of sums a + b rounded as the inputs' dtype rounds them."""
    with np.errstate(invalid="ignore", over="ignore"):
        sums = (a[:, None, :] + b[None, :, :]).astype(np.float64)
    logits = np.tanh(sums) @ v.astype(np.float64)
    if dlogits is None:
        return logits
    weighted = dlogits[:, :, None] * (1 - np.tanh(sums) ** 2) * v.astype(np.float64)
    dv = np.einsum("ts,tsa->a", dlogits.astype(np.float64), np.tanh(sums))
    return dv, weighted.sum(1), weighted.sum(0)


def assert_close(actual, expected, tolerance):
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    largest = np.nanmax(np.abs(expected), initial=1e-30)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * largest)


# --- values ---


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        LOOP,
        pytest.param((131, 127, 1), marks=pytest.mark.slow),
        pytest.param((61, 67, 7), marks=pytest.mark.slow),
    ],
)
def test_logits_and_gradients_are_the_formulas(shape):
    v, a, b, dlogits = inputs(*shape)
    assert_close(weighted_tanh(v, a, b), exact(v, a, b), 1e-6)
    for actual, expected in zip(
        weighted_tanh_vjp(v, a, b, dlogits), exact(v, a, b, dlogits), strict=True
    ):
        assert actual.dtype == np.float32
        assert_close(actual, expected, 2e-6)


def test_float64_keeps_its_precision():
    with jax.enable_x64(True):
        v, a, b, dlogits = inputs(*LOOP, np.float64)
        assert_close(weighted_tanh(v, a, b), exact(v, a, b), 1e-14)
        gradients = weighted_tanh_vjp(v, a, b, dlogits)
        for actual, expected in zip(gradients, exact(v, a, b, dlogits), strict=True):
            assert actual.dtype == np.float64
            assert_close(actual, expected, 1e-14)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 10.0, 21.0, 23.0, 43.0, 100.0, 1e4, 1e30])
def test_any_magnitude_in_opposite_signs(magnitude):
    v, a, b, dlogits = inputs(*LOOP)
    rng = np.random.default_rng(1)
    a[:, 1::2] = np.float32(magnitude) * rng.uniform(-1, 1, size=a[:, 1::2].shape).astype("f")
    b[:, 1::2] = -a[0, 1::2] + b[:, 1::2] / 2  # a + b is small for query 0 and large for others
    b[:, 3] = np.float32(-magnitude)
    assert_close(weighted_tanh(v, a, b), exact(v, a, b), 1e-6)
    for actual, expected in zip(
        weighted_tanh_vjp(v, a, b, dlogits), exact(v, a, b, dlogits), strict=True
    ):
        assert_close(actual, expected, 5e-6)


@pytest.mark.parametrize("magnitude", [1e-8, 1e-4, 1e-2, 1.0, 10.0, 30.0])
@pytest.mark.parametrize("weight", [np.asarray, np.abs])  # of both signs; and no cancellation
def test_absolute_error_of_inputs_of_any_magnitude(weight, magnitude):
    v, a, b, _ = inputs(64, 64, 128)
    v, a, b = weight(v), np.clip(magnitude * a, -33, 33), np.float32(magnitude) * b
    error = np.abs(weighted_tanh(v, a, b) - exact(v, *(x.astype(float) for x in (a, b))))
    assert error.max() <= 5e-7 * np.abs(v).sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("nudge", [1 - 1e-4, 1 + 1e-4])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_both_sides_of_the_guard(signs, nudge, dtype):
    """The keys are just saturated for the largest query, just not, or larger than any exponent."""
    with jax.enable_x64(dtype is np.float64):
        v, a, b, dlogits = inputs(*LOOP, dtype)
        limit = signs[0] * nudge * LIMITS[dtype]
        a[2], b[3:6] = limit, signs[1] * np.multiply.outer([1, 1.32, 1e30], np.abs(limit * v**0))
        assert bool(pairwise_tanh.is_large(a)) == (nudge > 1)
        tolerance = 1e-6 if dtype is np.float32 else 1e-14
        assert_close(weighted_tanh(v, a, b), exact(v, a, b), tolerance)
        gradients = weighted_tanh_vjp(v, a, b, dlogits)
        for actual, expected in zip(gradients, exact(v, a, b, dlogits), strict=True):
            assert_close(actual, expected, 5 * tolerance)


def test_saturation_is_exact():
    v, a, b, dlogits = inputs(*LOOP)
    logits = weighted_tanh(v, np.full_like(a, 20), np.full_like(b, 20))
    np.testing.assert_allclose(logits, np.full(LOOP[:2], v.sum()), rtol=1e-6)
    dv, da, db = weighted_tanh_vjp(v, np.full_like(a, 20), np.full_like(b, 20), dlogits)
    np.testing.assert_allclose(dv, np.full(17, dlogits.sum()), rtol=1e-5)
    assert np.abs(da).max() < 1e-7
    assert np.abs(db).max() < 1e-7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_entry_reaches_its_own_row_only(bad):
    v, a, b, dlogits = inputs(*LOOP)
    a[2, 3] = bad
    b[4, 3] = -np.inf
    assert_close(weighted_tanh(v, a, b), exact(v, a, b), 1e-6)
    for actual, expected in zip(
        weighted_tanh_vjp(v, a, b, dlogits), exact(v, a, b, dlogits), strict=True
    ):
        assert_close(actual, expected, 5e-6)


def test_nan_does_not_disable_the_fast_form():
    v, a, b, _ = inputs(*LOOP)
    a[2, 3] = b[4, 5] = np.nan
    assert not bool(pairwise_tanh.is_large(a))
    assert_close(weighted_tanh(v, a, b), exact(v, a, b), 1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_weights_of_any_magnitude(scale):
    v, a, b, dlogits = inputs(*LOOP)
    b[:, 3] = 15  # z = e^30, and the product with a weight of 1e30 overflows
    v *= np.float32(scale)
    assert_close(weighted_tanh(v, a, b) / np.float32(scale), exact(v, a, b) / scale, 1e-6)
    v, dlogits = inputs(*LOOP)[0], dlogits * np.float32(scale)
    for actual, expected in zip(
        weighted_tanh_vjp(v, a, b, dlogits), exact(v, a, b, dlogits), strict=True
    ):
        assert_close(actual / np.float32(scale), expected / scale, 5e-6)


def test_small_form_and_loops_agree(monkeypatch):
    arguments = inputs(*SMALL)
    small = weighted_tanh(*arguments[:3]), *weighted_tanh_vjp(*arguments)
    monkeypatch.setattr(pairwise_tanh, "_SMALL", 0)
    loops = quick_jit(  # not by the jit of above, which has compiled this shape
        lambda v, a, b, dlogits: (
            pairwise_tanh.weighted_tanh(v, a, b),
            *pairwise_tanh.weighted_tanh_vjp(v, a, b, dlogits),
        )
    )(*arguments)
    for one, other in zip(small, loops, strict=True):
        assert_close(one, np.asarray(other), 2e-6)


# --- batches ---


@functools.cache
def over_batch(v_axis):
    def both(v, a, b, dlogits):
        return weighted_tanh(v, a, b), weighted_tanh_vjp(v, a, b, dlogits)

    return quick_jit(jax.vmap(both, (v_axis, 0, 0, 0)))


@pytest.mark.parametrize("v_axis", [None, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("large", [1.0, 1e3])
def test_vmap_is_a_loop(v_axis, large):
    examples = [inputs(*LOOP, seed=seed) for seed in range(3)]
    v, a, b, dlogits = (np.stack(parts) for parts in zip(*examples, strict=True))
    a[1, 2] *= np.float32(large)  # one example makes the whole batch take the other form
    v = v[0] if v_axis is None else v
    logits, gradients = over_batch(v_axis)(v, a, b, dlogits)
    for n in range(3):
        one = (v if v_axis is None else v[n], a[n], b[n])
        assert_close(logits[n], exact(*one), 1e-6)
        for actual, expected in zip(gradients, exact(*one, dlogits[n]), strict=True):
            assert_close(actual[n], expected, 5e-6)


def test_vmap_runs_a_single_form():
    arguments = [np.stack([x] * 2) for x in inputs(*LOOP)]
    assert " cond[" in str(jax.make_jaxpr(jax.vmap(weighted_tanh_vjp))(*arguments))


# --- derivatives ---


def every_mode(function):
    """Forward, reverse, and both after both of them, along directions of ones."""

    def forward(f):
        return lambda *x: jax.jvp(f, x, jax.tree.map(jnp.ones_like, x))[1]

    def reverse(f):
        def pulled_back(*x):
            out, pull_back = jax.vjp(f, *x)
            return pull_back(jax.tree.map(jnp.cos, out))

        return pulled_back

    first = forward(function), reverse(function)
    second = (mode(f) for mode in (forward, reverse) for f in first)
    functions = (*first, *second)
    return quick_jit(lambda *x: [f(*x) for f in functions])


@functools.cache
def derivatives_of_the_logits():
    return every_mode(pairwise_tanh.weighted_tanh), every_mode(pairwise_tanh._materialized)


@pytest.mark.parametrize("shift", [0.0, 200.0])
def test_every_derivative_of_the_logits(shift):
    with jax.enable_x64(True):
        v, a, b, _ = inputs(*LOOP, np.float64)
        ours, of_the_formula = (f(v, a + shift, b - shift) for f in derivatives_of_the_logits())
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(of_the_formula), strict=True):
        assert_close(one, np.asarray(other), 1e-11)


@pytest.mark.slow
def test_derivatives_of_the_vjp():
    def formula(v, a, b, dlogits):
        return jax.vjp(pairwise_tanh._materialized, v, a, b)[1](dlogits)

    def pushed_and_pulled(function):
        return quick_jit(lambda *x: (jax.jvp(function, x, x)[1], jax.vjp(function, *x)[1](x[:3])))

    with jax.enable_x64(True):
        arguments = inputs(*LOOP, np.float64)
        ours = pushed_and_pulled(pairwise_tanh.weighted_tanh_vjp)(*arguments)
        expected = pushed_and_pulled(formula)(*arguments)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert_close(one, np.asarray(other), 1e-11)


@pytest.mark.slow
def test_derivatives_are_the_slopes():
    """By finite differences: what the formula and the loops could both be wrong about."""
    with jax.enable_x64(True):
        v, a, b, _ = inputs(*LOOP, np.float64)
        check_grads(weighted_tanh, (v, a, b), order=1, modes=["rev"])


@pytest.mark.parametrize("size", [1.0, 15.0, 22.0, 40.0, 1e30])
def test_derivatives_stay_finite_in_saturation(size):
    v, a, b, _ = inputs(*LOOP)
    a[0], a[1], b[1], b[2] = (np.float32(x) for x in (size, -size, size, -size))
    for derivative in finite_derivatives()(v, a, b):
        assert np.isfinite(derivative).all()


@functools.cache
def finite_derivatives():
    """Of order 1, 2 and 3, the higher ones along a direction of ones."""

    def along(f):
        return lambda *x: jax.jvp(f, x, tuple(map(jnp.ones_like, x)))[1]

    def loss(v, a, b):
        return jnp.sum(jnp.sin(pairwise_tanh.weighted_tanh(v, a, b)))

    gradient = jax.grad(loss, argnums=1)
    return quick_jit(lambda *x: (gradient(*x), along(gradient)(*x), along(along(gradient))(*x)))


@pytest.mark.slow
def test_the_vjp_is_the_derivative():
    v, a, b, dlogits = inputs(*LOOP)
    by_jax = quick_jit(lambda *x: jax.vjp(weighted_tanh, *x)[1](dlogits))(v, a, b)
    for one, other in zip(weighted_tanh_vjp(v, a, b, dlogits), by_jax, strict=True):
        assert_close(one, np.asarray(other), 2e-6)


# --- memory ---


def temporaries(function, *arguments):
    """Floats of temporary memory, in units of one [t, s] tile."""
    compiled = jax.jit(function).lower(*arguments).compile()
    tile = arguments[1].shape[0] * arguments[2].shape[0]
    return compiled.memory_analysis().temp_size_in_bytes / (4 * tile)


def test_no_array_of_every_pair_and_feature():
    v, a, b, dlogits = inputs(256, 256, 128)

    def loss(v, a, b):
        return jnp.sum(weighted_tanh(v, a, b) * dlogits)

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    assert temporaries(weighted_tanh, v, a, b) < 3  # measured: 1
    assert temporaries(weighted_tanh_vjp, v, a, b, dlogits) < 8
    assert temporaries(gradient, v, a, b) < 12


@pytest.mark.slow
def test_no_array_of_every_pair_and_feature_in_forward_mode():
    v, a, b, dlogits = inputs(256, 256, 128)

    def loss(v, a, b):
        return jnp.sum(weighted_tanh(v, a, b) * dlogits)

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    assert temporaries(lambda *x: jax.jvp(weighted_tanh, x, x), v, a, b) < 8
    assert temporaries(lambda *x: jax.jvp(gradient, x, x), v, a, b) < 40
