"""Local attention against the paper's formulas, pair by pair in NumPy.

Gradients are compared with the complex step along random directions: Im f(x + ih) / h. The edges of
a window have no gradient, on either side.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_IMPLEMENTATIONS,
    DK,
    SCORE_CASES,
    TILE,
    assert_close,
    named,
    quick_jit,
)
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.functional.centers import monotonic_centers, predicted_centers, reversed_centers
from attention_jax.functional.local import local_attention, local_attention_weights
from attention_jax.functional.windows import window_mask

B, T, S, DV, A = 2, 5, 7, 3, 4
RADIUS = 2
LITERATURE = ["additive", "dot", "general", "scaled"]
KEY_LENGTHS = np.array([6, 4])
every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


# --- the paper's formulas, with NumPy ---


def numpy_weights(pair, point, allowed):
    """w_ij of equations 7 and 10, [B, T, S]; leaves of the point may be complex."""
    weights = np.zeros((B, T, S), complex)
    centers = np.broadcast_to(point["centers"], (B, T))
    for b in range(B):
        for i in range(T):
            center = centers[b, i]
            keys = [j for j in range(S) if allowed[b, i, j] and abs(j - center.real) <= RADIUS]
            if not keys:
                continue
            query, key = point["query"][b, i], point["key"][b]
            logits = [pair(point["params"], query, key[j]) + point["bias"][b, i, j] for j in keys]
            exponentials = np.exp(logits - max(np.real(logits)))
            for j, share in zip(keys, exponentials / exponentials.sum(), strict=True):
                gaussian = 1
                if "sigma" in point:
                    gaussian = np.exp(-((j - center) ** 2) / (2 * point["sigma"] ** 2))
                weights[b, i, j] = share * gaussian
    return weights


def numpy_centers(query, params, lengths):
    """p_i of equation 9, [B, T]."""
    fractions = [
        [1 / (1 + np.exp(-params["v"] @ np.tanh(q @ params["kernel"]))) for q in row]
        for row in query
    ]
    return lengths[:, None] * np.array(fractions)


def slope_along(function, point, direction):
    """d function(point + h direction) / dh at h = 0."""
    step = 1e-30
    moved = jax.tree.map(lambda leaf, along: leaf + 1j * step * along, point, direction)
    return function(moved).imag / step


def direction_in(point, name, seed):
    """A random direction in which one entry of the point moves."""
    rng = np.random.default_rng(seed)
    return {
        other: jax.tree.map(
            lambda leaf, moves=other == name: rng.normal(size=np.shape(leaf)) * moves, value
        )
        for other, value in point.items()
    }


# --- points to compare at ---

CENTERS = {
    "whole": np.array([0, 3, 6, -2, 20]),  # the last is beside all keys
    "fractional": np.array([[0.3, 2.25, 6.0, -1.7, 9.5], [3.5, 1.0, -4.0, 2.9, 0.0]]),
    "shared": np.array([0.3, 4.25, 2.0, -1.7, 99.0]),
}


def point_of(score_name, centers, gaussian):
    case = SCORE_CASES[score_name]
    params = case.score.init(jax.random.key(1), case.query_dim, DK)
    point = {
        "query": normal(B, T, case.query_dim),
        "key": normal(B, S, DK) / 2,
        "value": normal(B, S, DV),
        "bias": normal(B, T, S),
        "params": jax.tree.map(np.float64, params),
        "centers": CENTERS[centers],
    }
    return point | ({"sigma": np.array(1.3)} if gaussian else {})


def allowed_table(masked):
    table = np.ones((B, T, S), bool)
    if masked:
        table &= np.arange(S) < KEY_LENGTHS[:, None, None]
        table[1, 0] = False
    return table


def poisoned(point, allowed):
    """NaN in padding, which no allowed pair reads."""
    unused = {"key": ~allowed.any(1)[..., None], "value": ~allowed.any(1)[..., None]}
    unused["bias"] = ~allowed
    return point | {name: np.where(unused[name], np.nan, point[name]) for name in unused}


@functools.cache
def both_of(score_name, implementation):
    """(floats, other, mask, cotangent) -> (output, gradients of the floats), compiled."""

    def both(floats, other, mask, cotangent):
        def attend(floats):
            return local_attention(
                **floats, **other, radius=RADIUS, score=SCORE_CASES[score_name].score, mask=mask,
                implementation=implementation, block_sizes=TILE,
            )  # fmt: skip

        output, pull_back = jax.vjp(attend, floats)
        return output, pull_back(cotangent)[0]

    return quick_jit(both)


GRID = [
    *((score, "fractional", True, True) for score in LITERATURE),
    ("own", "fractional", True, True),
    ("additive", "whole", False, False),
    ("scaled", "whole", False, True),
    ("scaled", "shared", True, False),
]


@every_implementation
@pytest.mark.parametrize(("score", "centers", "gaussian", "masked"), GRID)
def test_output_and_gradients_are_the_papers(score, centers, gaussian, masked, implementation):
    point, allowed = point_of(score, centers, gaussian), allowed_table(masked)
    cotangent = normal(B, T, DV, seed=5)

    def numpy_output(point):
        weights = numpy_weights(SCORE_CASES[score].pair, point, allowed)
        return np.einsum("bts,bsd->btd", weights, point["value"])

    with jax.enable_x64(True):
        dirty = jax.tree.map(jnp.asarray, poisoned(point, allowed))
        whole = jnp.issubdtype(dirty["centers"].dtype, jnp.integer)
        other = {"centers": dirty.pop("centers")} if whole else {}
        mask = jnp.asarray(allowed) if masked else None
        output, gradients = both_of(score, implementation)(dirty, other, mask, cotangent)
    expected = numpy_output(point).real
    assert_close("output", output, expected, 1e-13)
    beside = ~np.any(expected, axis=-1)
    assert beside[0, -1]
    assert beside[1, 0] or not masked
    assert not np.any(np.asarray(output)[beside])
    for name, leaf in named(gradients).items():
        assert np.all(np.isfinite(leaf)), name
    for name in gradients:
        for seed in range(2 * bool(jax.tree.leaves(point[name]))):
            along = direction_in(point, name, seed)
            slope = slope_along(lambda point: np.vdot(cotangent, numpy_output(point)), point, along)
            products = jax.tree.map(np.vdot, along[name], gradients[name])
            got = sum(jax.tree.leaves(products))
            np.testing.assert_allclose(got, slope, rtol=1e-10, err_msg=name)
            assert slope != 0, name


@pytest.mark.parametrize("score", LITERATURE)
def test_weights_are_the_papers(score):
    for centers, gaussian in (("fractional", True), ("whole", False), ("whole", True)):
        point, allowed = point_of(score, centers, gaussian), allowed_table(True)
        expected = numpy_weights(SCORE_CASES[score].pair, point, allowed).real
        with jax.enable_x64(True):
            dirty = poisoned(point, allowed)
            del dirty["value"]
            weights = local_attention_weights(
                **dirty, radius=RADIUS, score=SCORE_CASES[score].score, mask=allowed
            )
        assert_close("weights", weights, expected, 1e-13)
        # With a Gaussian a row sums to less than 1: nothing is normalised after it.
        sums = np.asarray(weights).sum(-1)
        assert np.all((sums < 0.99) if gaussian else ((sums == 0) | (abs(sums - 1) < 1e-12)))


# --- predicted centers ---


def position_params(query_dim):
    return {"kernel": normal(query_dim, A), "v": normal(A)}


def test_predicted_centers_are_equation_9():
    query, params = normal(B, T, 3), position_params(3)
    with jax.enable_x64(True):
        got = predicted_centers(query, params, jnp.asarray(KEY_LENGTHS))
    assert_close("centers", got, numpy_centers(query, params, KEY_LENGTHS), 1e-14)
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), (query, params))
    assert predicted_centers(*narrow, jnp.array(300)).dtype == jnp.float32
    with pytest.raises(ValueError, match=r"params must be \{'kernel': \[3, A\], 'v': \[A\]\} for"):
        predicted_centers(query, {"kernel": params["kernel"], "v": normal(3)}, jnp.array(7))


@every_implementation
def test_gradients_reach_w_and_v(implementation):
    score, cotangent = "general", normal(B, T, DV, seed=5)
    point = point_of(score, "fractional", True)
    del point["centers"]
    point["position"] = position_params(point["query"].shape[-1])
    allowed = allowed_table(True)

    def numpy_loss(point):
        centers = numpy_centers(point["query"], point["position"], KEY_LENGTHS)
        weights = numpy_weights(SCORE_CASES[score].pair, point | {"centers": centers}, allowed)
        return np.vdot(cotangent, np.einsum("bts,bsd->btd", weights, point["value"]))

    @quick_jit
    def gradient(point):
        def loss(point):
            centers = predicted_centers(point["query"], point["position"], KEY_LENGTHS)
            output = local_attention(
                **{name: leaf for name, leaf in point.items() if name != "position"},
                centers=centers, radius=RADIUS, score=SCORE_CASES[score].score, mask=allowed,
                implementation=implementation, block_sizes=TILE,
            )  # fmt: skip
            return jnp.sum(output * cotangent)

        return jax.grad(loss)(point)

    with jax.enable_x64(True):
        gradients = gradient(point)
    for name in ("position", "query", "sigma"):
        along = direction_in(point, name, 3)
        slope = slope_along(numpy_loss, point, along)
        got = sum(jax.tree.leaves(jax.tree.map(np.vdot, along[name], gradients[name])))
        np.testing.assert_allclose(got, slope, rtol=1e-9, err_msg=name)


def test_second_derivatives():
    with jax.enable_x64(True):
        query, key, value = normal(3, 2), normal(5, 2), normal(5, 2, seed=1)
        kernel, v = normal(2, 2), normal(2)

        def loss(query, key, kernel, v, sigma):
            output = local_attention(
                query, key, value, sigma=sigma, radius=1, implementation="tiled",
                centers=predicted_centers(query, {"kernel": kernel, "v": v}, jnp.array(5)),
                block_sizes=aj.BlockSizes(2, 3),
            )  # fmt: skip
            return jnp.sum(jnp.sin(output))

        point = jax.tree.map(jnp.asarray, (query, key, kernel, v, 0.8))
        check_grads(loss, point, 2, ["rev"], rtol=1e-5)


@every_implementation
def test_a_query_of_nan_sees_nothing_and_sends_nothing(implementation):
    query, key = normal(B, T, 4).astype(np.float32), normal(B, S, 4).astype(np.float32)
    position = jax.tree.map(np.float32, position_params(4))
    point = {"query": query, "position": position, "sigma": np.float32(1.2)}
    real = np.arange(T) != 3

    def output_of(point):
        centers = predicted_centers(point["query"], point["position"], jnp.array(S))
        return local_attention(
            point["query"], key, key, centers=centers, sigma=point["sigma"], radius=RADIUS,
            mask=real[:, None], implementation=implementation, block_sizes=TILE,
        )  # fmt: skip

    output = quick_jit(output_of)
    gradient = quick_jit(jax.grad(lambda point: jnp.sum(output_of(point) ** 2)))
    dirty = point | {"query": np.where(real[:, None], query, np.nan)}
    np.testing.assert_allclose(output(dirty), output(point), atol=1e-6)
    got, expected = named(gradient(dirty)), named(gradient(point))
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], atol=1e-5, err_msg=name)
        assert np.any(expected[name]), name
    centers = jnp.array([1.0, jnp.nan])
    weights = local_attention_weights(key[0, :2], key[0], centers=centers, radius=1, sigma=1.0)
    assert np.count_nonzero(weights, axis=-1).tolist() == [3, 0]


def test_known_alignments():
    assert monotonic_centers(4).tolist() == [0, 1, 2, 3]
    centers = reversed_centers(3, jnp.array([[5], [2]]))
    assert centers.tolist() == [[[4, 3, 2]], [[1, 0, -1]]]
    # Radius 0 around the anti-diagonal turns a string around.
    value = jnp.arange(7.0)[:, None]
    output = local_attention(value, value, value, centers=reversed_centers(7, 5), radius=0)
    assert output[:, 0].tolist() == [4, 3, 2, 1, 0, 0, 0]


# --- batches, dtypes, dropout ---


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_heads_and_examples_are_a_loop(implementation):
    query, key = normal(B, 3, T, 4).astype(np.float32), normal(B, 3, S, 4).astype(np.float32)
    centers, sigma = CENTERS["fractional"].astype(np.float32), np.float32([0.7, 1.4, 2.1])

    def attend(query, key, centers, sigma):
        return local_attention(
            query, key, key, centers=centers, radius=RADIUS, sigma=jnp.asarray(sigma),
            implementation=implementation, block_sizes=TILE,
        )  # fmt: skip

    got = attend(query, key, centers[:, None, :], sigma)
    for b in range(B):
        for n in range(3):
            expected = attend(query[b, n], key[b, n], centers[b], sigma[n])
            np.testing.assert_allclose(got[b, n], expected, atol=2e-6)


def test_centers_beyond_the_range_of_a_narrow_dtype():
    query = key = jnp.asarray(normal(1, 4), jnp.float32)
    key = jnp.broadcast_to(key, (300, 4))
    value = jnp.arange(300.0)[:, None]
    for center in (np.array([127], np.int8), np.array([255], np.uint8), np.array([2], np.uint32)):
        output = local_attention(query, key, value, centers=center, radius=2)
        np.testing.assert_allclose(output, center[None, :], rtol=1e-6)
    narrow = jnp.array([256], jnp.bfloat16)  # where bfloat16 knows every second number
    assert window_mask(narrow, 1).materialize(1, 300).sum() == 3
    weights = local_attention_weights(query, key, centers=narrow, radius=1, sigma=1.0)
    np.testing.assert_allclose(weights[0, 255], np.exp(-0.5) / 3, rtol=1e-5)


@every_implementation
def test_narrow_inputs_and_empty_ones(implementation):
    query, key = (jnp.asarray(normal(n, 4), jnp.bfloat16) for n in (T, S))
    options = {"radius": RADIUS, "sigma": 1.0, "implementation": implementation}
    output = local_attention(query, key, key, centers=monotonic_centers(T), **options)
    weights = local_attention_weights(
        *(x.astype(jnp.float32) for x in (query, key)),
        centers=monotonic_centers(T), radius=RADIUS, sigma=1.0,
    )  # fmt: skip
    assert output.dtype == jnp.bfloat16
    expected = np.asarray(weights) @ np.asarray(key, np.float32)
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=3e-2)
    none = local_attention(query, key[:0], key[:0], centers=monotonic_centers(T), **options)
    assert not none.any()
    assert local_attention(query[:0], key, key, centers=jnp.zeros(0), **options).shape == (0, 4)


def test_dropout_drops_weights_and_keeps_their_mean():
    query, key, value = (normal(n, 4, seed=n).astype(np.float32) for n in (T, S, S + 1))
    both = np.concatenate([np.eye(S, dtype=np.float32), value[:S]], axis=1)
    options = {"centers": CENTERS["shared"].astype(np.float32), "radius": RADIUS, "sigma": 1.2}
    weights = local_attention_weights(query, key, **options)

    def dropped(implementation, rng):
        output = local_attention(
            query, key, both, **options, dropout_rate=0.25, dropout_rng=rng,
            implementation=implementation, block_sizes=TILE,
        )  # fmt: skip
        return output[:, :S], output[:, S:]

    for implementation in ALL_IMPLEMENTATIONS:
        found, output = map(np.asarray, dropped(implementation, jax.random.key(8)))
        kept = found != 0
        np.testing.assert_allclose(found, np.where(kept, weights / 0.75, 0), atol=1e-6)
        assert 0 < kept.sum() < np.count_nonzero(weights)
        np.testing.assert_allclose(output, found @ value[:S], atol=3e-6)
    rngs = jax.random.split(jax.random.key(9), 4000)
    mean = jax.vmap(lambda rng: dropped("reference", rng)[0])(rngs).mean(0)
    np.testing.assert_allclose(mean, weights, atol=0.01)
