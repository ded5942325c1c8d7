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
from score_cases import numpy_params

from attention_jax.functional.centers import predicted_centers
from attention_jax.functional.local import local_attention, local_attention_weights

B, T, S, DV, A = 2, 5, 7, 3, 4
RADIUS = 2
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
    params = numpy_params(case.score, case.query_dim, DK)
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


@pytest.mark.parametrize(
    ("score", "centers", "gaussian", "masked", "implementation"),
    [
        ("additive", "fractional", True, True, "tiled"),
        ("scaled", "whole", False, True, "tiled"),
        *(
            (*case, "reference")
            for case in (
                ("own", "fractional", True, True),
                ("scaled", "shared", True, False),
                ("additive", "whole", False, False),
            )
        ),
    ],
)
def test_output_and_gradients_are_the_papers(score, centers, gaussian, masked, implementation):
    point, allowed = point_of(score, centers, gaussian), allowed_table(masked)
    cotangent = normal(B, T, DV, seed=5)

    def numpy_output(point):
        weights = numpy_weights(SCORE_CASES[score].pair, point, allowed)
        return np.einsum("bts,bsd->btd", weights, point["value"])

    with jax.enable_x64(True):
        dirty = poisoned(point, allowed)
        whole = np.issubdtype(dirty["centers"].dtype, np.integer)
        other = {"centers": dirty.pop("centers")} if whole else {}
        mask = allowed if masked else None
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


@pytest.mark.parametrize("gaussian", [False, True])
def test_weights_are_the_output_for_an_identity(gaussian):
    point, mask = point_of("additive", "fractional", gaussian), allowed_table(True)
    point = jax.tree.map(np.float32, point) | {"value": np.eye(S, dtype=np.float32)}
    options = {"radius": RADIUS, "score": SCORE_CASES["additive"].score, "mask": mask}

    @quick_jit
    def run(value, **point):
        return (
            local_attention(value=value, **point, **options),
            local_attention_weights(**point, **options),
        )

    output, weights = map(np.asarray, run(**point))
    np.testing.assert_allclose(weights, output, atol=1e-6)
    # With a Gaussian a row sums to less than 1: nothing is normalised after it.
    sums = weights.sum(-1)
    assert np.all((sums < 0.99) if gaussian else (sums == 0) | (abs(sums - 1) < 1e-6))


# --- predicted centers ---


def position_params(query_dim):
    return {"kernel": normal(query_dim, A), "v": normal(A)}


@pytest.mark.parametrize("size", [128, 8192])
@every_implementation
def test_large_logits_keep_their_digits(implementation, size):
    rng = np.random.default_rng(0)
    query, value = np.ones((T, 1), np.float32), rng.normal(size=(S, DV)).astype(np.float32)
    key = np.float32(size + rng.integers(-3, 4, (S, 1)))  # the logits, which float32 holds
    centers, sigma = np.linspace(0, S - 1, T, dtype=np.float32), 1.7

    @quick_jit
    def output(query, key):
        return local_attention(
            query, key, value, centers=centers, radius=RADIUS, sigma=sigma, score="dot",
            implementation=implementation, block_sizes=TILE,
        )  # fmt: skip

    distances = np.arange(S) - np.float64(centers)[:, None]
    weights = np.where(np.abs(distances) <= RADIUS, np.exp(key[:, 0] - np.float64(size)), 0)
    weights = weights / weights.sum(1, keepdims=True) * np.exp(-(distances**2) / (2 * sigma**2))
    assert_close("output", output(query, key), weights @ value, 2e-6)


def test_predicted_centers_are_equation_9():
    query, params = normal(B, T, 3), position_params(3)
    with jax.enable_x64(True):
        got = quick_jit(predicted_centers)(query, params, KEY_LENGTHS)
    assert_close("centers", got, numpy_centers(query, params, KEY_LENGTHS), 1e-14)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (query, params))
    assert jax.eval_shape(predicted_centers, *narrow, 300).dtype == jnp.float32


@every_implementation
def test_a_query_of_nan_sees_nothing_and_sends_nothing(implementation):
    query, key = normal(B, T, 4).astype(np.float32), normal(B, S, 4).astype(np.float32)
    position = jax.tree.map(np.float32, position_params(4))
    point = {"query": query, "position": position, "sigma": np.float32(1.2)}
    real = np.arange(T) != 3

    @quick_jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_output(point):
        centers = predicted_centers(point["query"], point["position"], np.array(S))
        output = local_attention(
            point["query"], key, key, centers=centers, sigma=point["sigma"], radius=RADIUS,
            mask=real[:, None], implementation=implementation, block_sizes=TILE,
        )  # fmt: skip
        return jnp.sum(output**2), output

    dirty = point | {"query": np.where(real[:, None], query, np.nan)}
    got, output = gradient_and_output(dirty)
    expected, clean = gradient_and_output(point)
    np.testing.assert_allclose(output, clean, atol=1e-6)
    got, expected = named(got), named(expected)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], atol=1e-5, err_msg=name)
        assert np.any(expected[name]), name


def test_a_center_of_nan_has_no_keys():
    key = normal(S, 4).astype(np.float32)
    attend = quick_jit(functools.partial(local_attention_weights, radius=1, sigma=1.0))
    weights = attend(key[:2], key, centers=np.float32([1.0, np.nan]))
    assert np.count_nonzero(weights, axis=-1).tolist() == [3, 0]
