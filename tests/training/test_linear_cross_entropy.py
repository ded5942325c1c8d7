"""The output layer and its loss in pieces, against float64 NumPy and optax in one piece."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import quick_jit
from jax.test_util import check_grads

from attention_jax.training.linear_cross_entropy import linear_cross_entropy

M, D, V = 23, 5, 17


def arrays(dtype=np.float32, seed=0, m=M, d=D, v=V):
    """Features, kernel, bias, targets and weights, three of which are 0."""
    rng = np.random.default_rng(seed)
    features, kernel, bias = (rng.normal(size=shape) for shape in ((m, d), (d, v), (v,)))
    targets = rng.integers(0, v, size=m).astype(np.int32)
    weights = rng.uniform(0.25, 2.0, size=m)
    weights[[0, m // 2, m - 1]] = 0
    return *(x.astype(dtype) for x in (features, kernel, bias)), targets, weights.astype(dtype)


def by_hand(features, kernel, bias, targets, weights, smoothing=0.0):
    """The three sums and d loss in features, kernel and bias, token after token."""
    features, kernel, weights = (np.asarray(x, np.float64) for x in (features, kernel, weights))
    size = kernel.shape[1]
    bias = np.zeros(size) if bias is None else np.asarray(bias, np.float64)
    sums = np.zeros(3)
    gradients = [np.zeros_like(features), np.zeros_like(kernel), np.zeros_like(bias)]
    for m, (target, weight) in enumerate(zip(targets, weights, strict=True)):
        logits = features[m] @ kernel + bias
        log_p = logits - logits.max() - np.log(np.sum(np.exp(logits - logits.max())))
        wanted = np.full(size, smoothing / size)
        wanted[target] += 1 - smoothing
        right = not np.any(logits > logits[target])
        sums += weight * np.array([-wanted @ log_p, -log_p[target], right])
        dlogits = weight * (np.exp(log_p) - wanted)
        gradients[0][m] = kernel @ dlogits
        gradients[1] += np.outer(features[m], dlogits)
        gradients[2] += dlogits
    return sums, gradients


@functools.cache
def gradient(smoothing=0.0, **options):
    """Jitted: the sums, and d loss in features, kernel and bias."""

    def loss(trained, targets, weights):
        found = linear_cross_entropy(
            *trained, targets, weights, label_smoothing=smoothing, **options
        )
        return found.loss, found

    compiled = jax.jit(jax.grad(loss, has_aux=True))

    def run(features, kernel, bias, targets, weights):
        gradients, found = compiled((features, kernel, bias), targets, weights)
        return found, gradients

    return run


# --- values and gradients ---


@pytest.mark.parametrize(
    ("chunk", "smoothing"),
    [(1, 0.1), (7, 0.1), (7, 0.0), (23, 0.1), (512, 0.1)],  # 7 leaves 2 of the 23
)
def test_is_the_formula(chunk, smoothing):
    data = arrays()
    sums, gradients = by_hand(*data, smoothing)
    plain = linear_cross_entropy(*data, label_smoothing=smoothing, chunk=chunk)
    with_gradient, found = gradient(smoothing, chunk=chunk)(*data)
    for one in (plain, with_gradient):
        assert [x.dtype for x in one] == [jnp.float32] * 3
        assert [x.shape for x in one] == [()] * 3
        np.testing.assert_allclose(one, sums, rtol=1e-5)
    for got, expected in zip(found, gradients, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    if smoothing:
        assert abs(sums[0] - sums[1]) > 0.1
    assert 0 < sums[2] < np.sum(data[-1])


def test_without_a_bias():
    features, kernel, _, targets, weights = arrays()
    sums, gradients = by_hand(features, kernel, None, targets, weights, 0.2)
    found, got = gradient(0.2, chunk=7)(features, kernel, None, targets, weights)
    np.testing.assert_allclose(found, sums, rtol=1e-5)
    assert got[2] is None
    for one, expected in zip(got[:2], gradients[:2], strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


def test_the_default_chunk():
    data = arrays(m=1031)
    sums, _ = by_hand(*data, 0.1)
    np.testing.assert_allclose(linear_cross_entropy(*data, label_smoothing=0.1), sums, rtol=1e-5)


def test_logits_of_any_size():
    """Each is 1e4 or -1e4: the largest difference is 2e4, of which exp is infinite."""
    rng = np.random.default_rng(3)
    features = 1e4 * np.eye(D, dtype=np.float32)[rng.integers(0, D, size=M)]
    kernel = rng.choice([-1.0, 1.0], size=(D, V)).astype(np.float32)
    *_, targets, weights = arrays()
    sums, gradients = by_hand(features, kernel, None, targets, weights, 0.1)
    assert sums[1] > 1e4
    found, got = gradient(0.1, chunk=7)(features, kernel, None, targets, weights)
    np.testing.assert_allclose(found, sums, rtol=1e-5)
    for one, expected in zip(got[:2], gradients[:2], strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def in_one_piece(features, kernel, bias, targets, weights, smoothing):
    logits = features @ kernel + bias[None, :]
    labels = optax.smooth_labels(jax.nn.one_hot(targets, V, dtype=logits.dtype), smoothing)
    return jnp.sum(weights * optax.softmax_cross_entropy(logits, labels))


def losses(smoothing, targets, weights):
    """Ours and optax's, as functions of features, kernel and bias."""

    def ours(*trained):
        return linear_cross_entropy(
            *trained, targets, weights, label_smoothing=smoothing, chunk=7
        ).loss

    def theirs(*trained):
        return in_one_piece(*trained, targets, weights, smoothing)

    return ours, theirs


EVERY = (0, 1, 2)  # features, kernel, bias


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_are_those_in_one_piece(smoothing):
    with jax.enable_x64(True):
        *trained, targets, weights = map(jnp.asarray, arrays(np.float64))
        ours, theirs = losses(smoothing, targets, weights)

        # A factor that is not 1 comes back to the loss.
        got = quick_jit(jax.grad(lambda *x: jnp.sin(ours(*x) / M), EVERY))(*trained)
        expected = quick_jit(jax.grad(lambda *x: jnp.sin(theirs(*x) / M), EVERY))(*trained)
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == jnp.float64
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13)


def test_two_orders_of_reverse_mode():
    with jax.enable_x64(True):
        *trained, targets, weights = map(jnp.asarray, arrays(np.float64))
        ours, _ = losses(0.1, targets, weights)
        check_grads(jax.jit(lambda *x: (ours(*x) / M) ** 2), trained, order=2, modes=["rev"])


def test_products_with_the_hessian():
    """Forward over reverse, and reverse over reverse."""
    with jax.enable_x64(True):
        *trained, targets, weights = map(jnp.asarray, arrays(np.float64))
        directions = tuple(map(jnp.asarray, arrays(np.float64, seed=1)[:3]))

        def products(loss):
            def slope(*point):
                found = jax.grad(loss, EVERY)(*point)
                return sum(jnp.sum(x * y) for x, y in zip(found, directions, strict=True))

            forward = jax.jvp(jax.grad(loss, EVERY), tuple(trained), directions)[1]
            return forward, jax.grad(slope, EVERY)(*trained)

        ours, theirs = (quick_jit(functools.partial(products, loss))() for loss in
                        losses(0.1, targets, weights))  # fmt: skip
        for got in ours:
            for one, other in zip(got, theirs[0], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
        assert all(np.max(np.abs(x)) > 1e-2 for x in theirs[0])


def test_what_is_no_loss_has_no_gradient_of_any_order():
    with jax.enable_x64(True):
        *trained, targets, weights = map(jnp.asarray, arrays(np.float64))
        features, kernel, bias = trained
        direction = jnp.asarray(arrays(np.float64, seed=1)[1])

        def whole(kernel, weights):
            return linear_cross_entropy(features, kernel, bias, targets, weights, chunk=7)

        @quick_jit
        def pulled_back(kernel, weights):
            found, pull = jax.vjp(whole, kernel, weights)
            return [pull(type(found)(*map(jnp.asarray, one))) for one in np.eye(3)]

        from_loss, *from_others = pulled_back(kernel, weights)
        assert np.all(from_loss[0] != 0)
        for found in (from_loss[1], *from_others[0], *from_others[1]):
            np.testing.assert_array_equal(found, np.zeros_like(found))

        # The Hessian of a product with it is that of a product with a constant.
        def scaled(kernel):
            found = whole(kernel, weights)
            return found.negative_log_likelihood * found.loss

        @quick_jit
        def along(kernel):
            constant = jax.lax.stop_gradient(whole(kernel, weights).negative_log_likelihood)

            def product(loss):
                return jax.grad(lambda point: jnp.sum(jax.grad(loss)(point) * direction))(kernel)

            return product(scaled), constant * product(lambda point: whole(point, weights).loss)

        np.testing.assert_allclose(*along(kernel), rtol=1e-9, atol=1e-9)


# --- padding, ties, nothing ---


@pytest.mark.parametrize("junk", [1e4, np.nan, np.inf])
def test_padding_counts_nowhere(junk):
    features, kernel, bias, targets, weights = arrays()
    padding = weights == 0
    spoiled = np.where(padding[:, None], np.float32(junk), features)
    other = np.where(padding, V - 1 - targets, targets)
    run = gradient(0.1, chunk=7)
    found, got = run(features, kernel, bias, targets, weights)
    same, again = run(spoiled, kernel, bias, other, weights)
    np.testing.assert_array_equal(np.stack(found), np.stack(same))
    for one, two in zip(got, again, strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(np.any(got[0] != 0, axis=1), ~padding)


def test_padding_alone():
    features, kernel, bias, targets, weights = arrays()
    found, got = gradient(0.1, chunk=7)(features, kernel, bias, targets, 0 * weights)
    assert [float(x) for x in found] == [0, 0, 0]
    for one, like in zip(got, (features, kernel, bias), strict=True):
        np.testing.assert_array_equal(one, np.zeros_like(like))


def test_no_token():
    features, kernel, bias, targets, weights = arrays()
    none = features[:0], kernel, bias, targets[:0], weights[:0]
    found, got = gradient(0.1)(*none)
    assert [float(x) for x in (*found, *linear_cross_entropy(*none))] == [0] * 6
    for one, like in zip(got, none[:3], strict=True):
        np.testing.assert_array_equal(one, np.zeros_like(like))


def test_right_is_what_no_other_exceeds():
    targets = np.array([3, 1, 4], np.int32)
    weights = np.array([1, 2, 4], np.float32)

    @jax.jit
    def right(bias):
        features, kernel = jnp.ones((3, 1)), jnp.zeros((1, 5))
        return linear_cross_entropy(features, kernel, bias, targets, weights).right

    above = float(np.nextafter(np.float32(1), np.float32(2)))
    for bias, expected in (
        ([0, 0, 0, 0, 0], 7),
        ([0, 2, 0, 2, 1], 3),  # a tie of 1 and 3, before 4
        ([0, 1, 2, 1, 1], 0),
        ([0, 1, 0, 1, above], 4),
    ):
        assert right(np.array(bias, np.float32)) == expected


# --- dtypes, jit, vmap ---


def test_narrow_features_are_summed_in_float32():
    """Positive terms: a sum in bfloat16 would stand still long before its end."""
    m, chunk = 509, 3
    rng = np.random.default_rng(5)
    features, kernel, bias = (
        jnp.asarray(x, jnp.bfloat16)
        for x in (
            rng.uniform(1, 2, size=(m, D)), 0.2 * rng.normal(size=(D, V)), rng.normal(size=V)
        )
    )  # fmt: skip
    targets, weights = np.zeros(m, np.int32), np.ones(m, np.float32)
    wide = [np.asarray(x.astype(jnp.float32)) for x in (features, kernel, bias)]
    sums, gradients = by_hand(*wide, targets, weights, 0.1)
    found, got = gradient(0.1, chunk=chunk)(features, kernel, bias, targets, weights)
    assert [x.dtype for x in found] == [jnp.float32] * 3
    np.testing.assert_allclose(found, sums, rtol=1e-5)
    for one, expected in zip(got, gradients, strict=True):
        assert one.dtype == jnp.bfloat16
        tolerance = 2**-7 * np.abs(expected) + 2**-8 * 1e-1
        assert np.all(np.abs(np.asarray(one, np.float64) - expected) <= tolerance)


def test_mapped_it_is_a_loop():
    features, kernel, bias, targets, weights = (
        np.stack(x) for x in zip(*(arrays(seed=seed) for seed in range(3)), strict=True)
    )

    def one(trained, targets, weights):
        return linear_cross_entropy(*trained, targets, weights, label_smoothing=0.1, chunk=7).loss

    one = jax.value_and_grad(one)
    found, got = quick_jit(jax.vmap(one))((features, kernel, bias), targets, weights)
    shared, _ = quick_jit(jax.vmap(one, ((0, None, None), 0, 0)))(
        (features, kernel[0], bias[0]), targets, weights
    )
    for seed in range(3):
        data = arrays(seed=seed)
        sums, gradients = by_hand(*data, 0.1)
        np.testing.assert_allclose(found[seed], sums[0], rtol=1e-5)
        for ours, expected in zip(got, gradients, strict=True):
            np.testing.assert_allclose(ours[seed], expected, atol=1e-5)
        sums, _ = by_hand(data[0], kernel[0], bias[0], *data[3:], 0.1)
        np.testing.assert_allclose(shared[seed], sums[0], rtol=1e-5)


# --- memory ---


def reserved(loss, m, v):
    """Bytes of temporaries of the compiled gradient."""
    shapes = ((m, D), (D, v), (v,))
    trained = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    rest = jax.ShapeDtypeStruct((m,), jnp.int32), jax.ShapeDtypeStruct((m,), jnp.float32)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(trained, *rest).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_no_array_of_all_logits():
    v, few, many = 1009, 512, 2048

    def pieces(trained, targets, weights):
        return linear_cross_entropy(*trained, targets, weights, label_smoothing=0.1, chunk=64).loss

    def whole(trained, targets, weights):
        features, kernel, bias = trained
        logits = features @ kernel + bias[None, :]
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=1) - chosen))

    logits = 4 * many * v
    assert reserved(whole, many, v) >= logits  # which would be seen
    least, most = reserved(pieces, few, v), reserved(pieces, many, v)
    assert most < logits / 5
    assert most - least <= 4 * (many - few) * (3 * D + 4)  # some rows of features, no more


# --- errors ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, r"label_smoothing must be a Python number in \[0, 1\); got 1.0"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be .*; got -0.1"),
        ({"label_smoothing": float("nan")}, r"label_smoothing must be .*; got nan"),
        ({"label_smoothing": "much"}, r"label_smoothing must be .*; got 'much'"),
        ({"chunk": 0}, "chunk must be at least 1; got 0"),
        ({"chunk": 2.5}, "chunk must be an integer; got 2.5"),
        ({"chunk": True}, "chunk must be an integer; got True"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*arrays(), **options)
