"""Local attention against the paper's formulas with all pairs stored, and window centers."""

import functools

import chex
import conformance as suite
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_cases import agree
from flax import nnx
from oracles import normal as narrow_normal
from score_cases import numpy_params

import attention_jax as aj

B, T, S, DV, A = 2, 5, 7, 3, 4
RADIUS = 2
normal = functools.partial(narrow_normal, dtype=np.float64)


def plain_weights(score, point, allowed):
    """Equations 7 and 10, with everything stored, as JAX differentiates them."""
    distances = np.arange(S, dtype=float)[None, None] - point["centers"][..., None]
    seen = allowed & (abs(jax.lax.stop_gradient(distances)) <= RADIUS)
    logits = jax.vmap(score, (None, 0, 0))(point["params"], point["query"], point["key"])
    weights = aj.masked_softmax(logits + point["bias"], seen)
    if "sigma" in point:
        weights = weights * jnp.exp(-(distances**2) / (2 * point["sigma"][:, None, None] ** 2))
    return weights


CENTERS = {
    "whole": np.array([[0, 3, 6, -2, 20]] * 2),  # the last is beside all keys
    "fractional": np.array([[0.3, 2.25, 6.0, -1.7, 9.5], [3.5, 1.0, -4.0, 2.9, 0.0]]),
}


def point_of(score_name, centers, gaussian):
    case = suite.SCORE_CASES[score_name]
    point = {
        "query": normal(B, T, case.query_dim),
        "key": normal(B, S, suite.DK) / 2,
        "value": normal(B, S, DV),
        "bias": normal(B, T, S),
        "params": jax.tree.map(np.float64, numpy_params(case.score, case.query_dim, suite.DK)),
        "centers": CENTERS[centers],
    }
    return point | ({"sigma": np.array([1.3, 0.8])} if gaussian else {})


def allowed_table(masked):
    table = np.ones((B, T, S), bool)
    if masked:
        table &= np.arange(S) < np.array([6, 4])[:, None, None]
        table[1, 0] = False
    return table


@pytest.mark.parametrize(
    ("score", "centers", "gaussian", "masked", "implementation"),
    [
        ("general", "fractional", True, True, "tiled"),
        ("scaled", "whole", False, False, "reference"),
    ],
)
def test_output_and_gradients_are_the_papers(score, centers, gaussian, masked, implementation):
    """With NaN in keys, values and biases that no allowed pair reads."""
    point, allowed = point_of(score, centers, gaussian), allowed_table(masked)
    cotangent, dirty = normal(B, T, DV, seed=5), suite.poisoned(point, allowed)
    fixed = {"centers": dirty.pop("centers")} if centers == "whole" else {}
    score = suite.SCORE_CASES[score].score

    def both(attend, point):
        output, pull_back = jax.vjp(attend, {k: x for k, x in point.items() if k not in fixed})
        return output, pull_back(jnp.asarray(cotangent))[0]

    def attend(floats):
        return aj.local_attention(
            **floats, **fixed, radius=RADIUS, score=score, mask=allowed,
            implementation=implementation, block_sizes=suite.TILE,
        )  # fmt: skip

    with jax.enable_x64(True):
        output, gradients = suite.quick_jit(functools.partial(both, attend))(dirty)
        expected, expected_gradients = suite.quick_jit(
            functools.partial(
                both, lambda x: plain_weights(score, {**x, **fixed}, allowed) @ x["value"]
            )
        )(point)
        weights = aj.local_attention_weights(
            **{name: array for name, array in dirty.items() if name != "value"}, **fixed,
            radius=RADIUS, score=score, mask=allowed,
        )  # fmt: skip
        expected_weights = np.asarray(plain_weights(score, point, allowed))
    suite.assert_close("weights", weights, expected_weights, 1e-13)
    suite.assert_close("output", output, np.asarray(expected), 1e-13)
    beside = ~np.any(expected, axis=-1)
    assert beside.any()
    assert not np.any(np.asarray(output)[beside])
    agree(gradients, expected_gradients, 1e-10)


@pytest.mark.parametrize("implementation", suite.ALL_IMPLEMENTATIONS)
def test_large_logits_keep_their_digits(implementation):
    rng, size = np.random.default_rng(0), 8192
    query, value = np.ones((T, 1), np.float32), rng.normal(size=(S, DV)).astype(np.float32)
    key = np.float32(size + rng.integers(-3, 4, (S, 1)))  # the logits, which float32 holds
    centers, sigma = np.linspace(0, S - 1, T, dtype=np.float32), 1.7
    output = aj.local_attention(
        query, key, value, centers=centers, radius=RADIUS, sigma=sigma, score="dot",
        implementation=implementation, block_sizes=suite.TILE,
    )  # fmt: skip
    distances = np.arange(S) - np.float64(centers)[:, None]
    weights = np.where(np.abs(distances) <= RADIUS, np.exp(key[:, 0] - np.float64(size)), 0)
    weights = weights / weights.sum(1, keepdims=True) * np.exp(-(distances**2) / (2 * sigma**2))
    suite.assert_close("output", output, weights @ value, 2e-6)


# --- centers ---


def test_predicted_centers_are_equation_9():
    query, params, lengths = normal(B, T, 3), {"kernel": normal(3, A), "v": normal(A)}, [6, 4]
    with jax.enable_x64(True):
        got = suite.quick_jit(aj.predicted_centers)(query, params, np.array(lengths))
    hidden = np.tanh(query @ params["kernel"])
    expected = np.array(lengths)[:, None] / (1 + np.exp(-hidden @ params["v"]))
    suite.assert_close("centers", got, expected, 1e-14)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (query, params))
    assert jax.eval_shape(aj.predicted_centers, *narrow, 300).dtype == jnp.float32


def test_known_alignments():
    assert aj.monotonic_centers(4).tolist() == [0, 1, 2, 3]
    centers = aj.reversed_centers(3, np.array([[5], [2]]))
    assert centers.tolist() == [[[4, 3, 2]], [[1, 0, -1]]]
    assert aj.reversed_centers(2, np.array([0], np.uint8)).tolist() == [[-1, -2]]
    # Radius 0 around the anti-diagonal turns a string around.
    value = np.arange(7, dtype=np.float32)[:, None]
    output = aj.local_attention(value, value, value, centers=aj.reversed_centers(7, 5), radius=0)
    assert np.asarray(output)[:, 0].tolist() == [4, 3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("implementation", suite.ALL_IMPLEMENTATIONS)
def test_a_center_of_nan_makes_its_row_and_gradients_nan(implementation):
    """But not where the mask hides the row, and not those of the other example."""
    real = np.arange(T) < np.array([[T], [T - 1]])  # the last query of the second is padding
    clean = {name: narrow_normal(B, n, 4) for name, n in (("query", T), ("key", S), ("value", S))}
    clean |= {"centers": np.float32(CENTERS["fractional"]), "sigma": np.ones(B, np.float32)}
    unknown = np.zeros((B, T), bool)
    unknown[:, T - 1] = True

    @suite.quick_jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_outputs(point):
        attend = functools.partial(
            aj.local_attention, radius=RADIUS, mask=real[:, :, None], implementation=implementation,
            block_sizes=suite.TILE,
        )  # fmt: skip
        output, plain = attend(**point), attend(**(point | {"sigma": None}))
        return jnp.sum(output), (output, plain)

    dirty = clean | {"centers": np.where(unknown, np.nan, clean["centers"])}
    gradient, outputs = gradient_and_outputs(dirty)
    expected_gradient, expected = gradient_and_outputs(clean)
    for got, wanted in zip(outputs, expected, strict=True):
        assert np.isnan(got[0, -1]).all()
        got, wanted = (np.where((unknown & real)[..., None], 0, array) for array in (got, wanted))
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    for name, array in gradient.items():
        of_row = array[0, -1] if name == "centers" else array[0]
        assert name == "query" or np.isnan(of_row).all(), name  # the reference stops it there
        np.testing.assert_allclose(array[1], expected_gradient[name][1], atol=1e-5)


@aj.mask_dataclass
class Span(aj.Mask):
    """The learned span of a user: a number for each query."""

    widths: jax.Array = aj.array_field("T")

    def allowed(self, i, j):
        distances = abs(i[:, None] - j[None, :]).astype(float)
        return distances <= jnp.take(self.widths, i, axis=-1)[..., None]


def test_a_window_of_nan_in_other_attention():
    tokens = narrow_normal(T, 3)
    heads = tokens[:, None]
    centers = np.array([0, np.nan, 2, 3, 4], np.float32)
    unknown = np.isnan(centers)
    mask = aj.window_mask(centers, 1)
    for output in (
        aj.attention(tokens, tokens, tokens, mask=mask & aj.causal_mask()),
        aj.attention(tokens, tokens, tokens, mask=Span(centers) & aj.causal_mask()),
        aj.attention(tokens, tokens, tokens, mask=Span(centers), implementation="tiled"),
        aj.interop.dot_product_attention(heads, heads, heads, mask=Span(centers)),
        aj.coverage_attention(tokens, tokens, tokens, mask=mask, coverage_kernel=tokens[0]).output,
        aj.monotonic_attention(tokens, tokens, tokens, mask=mask, return_weights=False),
    ):
        assert np.isnan(output[1]).all()
        assert not np.isnan(output[0]).any()
    output = aj.attention(
        tokens, tokens, tokens, mask=mask & aj.token_mask(np.ones(T, bool), ~unknown)
    )
    assert not output[1].any()
    layer = aj.nn.LocalPAttention("dot", 3, 3, radius=1, rngs=nnx.Rngs(0))
    output = layer(np.where(unknown[:, None], np.nan, tokens), tokens)
    np.testing.assert_array_equal(np.isnan(output).any(1), unknown)


def test_a_padded_query_of_nan_sends_nothing():
    query, key = narrow_normal(B, T, 4), narrow_normal(B, S, 4)
    position = {"kernel": narrow_normal(4, A), "v": narrow_normal(A)}
    point = {"query": query, "position": position, "sigma": np.float32(1.2)}
    real = np.arange(T) != 3

    @suite.quick_jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_output(point):
        centers = aj.predicted_centers(point["query"], point["position"], np.array(S))
        output = aj.local_attention(
            point["query"], key, key, centers=centers, sigma=point["sigma"], radius=RADIUS,
            mask=real[:, None], implementation="tiled", block_sizes=suite.TILE,
        )  # fmt: skip
        return jnp.sum(output**2), output

    dirty = point | {"query": np.where(real[:, None], query, np.nan)}
    got, output = gradient_and_output(dirty)
    expected, clean = gradient_and_output(point)
    np.testing.assert_allclose(output, clean, atol=1e-6)
    chex.assert_trees_all_close(got, expected, rtol=1e-7, atol=1e-5)
    assert all(map(np.any, jax.tree.leaves(expected)))


def test_centers_beyond_the_range_of_a_narrow_dtype():
    for center in (np.array([127], np.int8), np.array([255], np.uint8), np.array([2], np.uint32)):
        (keys,) = np.nonzero(np.asarray(aj.window_mask(center, 2).materialize(1, 300))[0])
        assert keys.mean() == center[0]
        assert len(keys) == 5
    narrow = np.array([1000], jnp.bfloat16)  # where bfloat16 knows every fourth number
    (keys,) = np.nonzero(np.asarray(aj.window_mask(narrow, 1).materialize(1, 1010))[0])
    assert keys.tolist() == [999, 1000, 1001]


def test_centers_far_from_all_keys_see_nothing_and_send_nothing():
    extremes = np.iinfo(np.int32)
    mask = aj.window_mask(np.array([extremes.min, extremes.min + 3, extremes.max]), 1)
    assert not np.any(mask.materialize(3, S))
    tokens = narrow_normal(4, 3)

    def total(sigma, centers):
        options = {"centers": centers, "sigma": sigma, "implementation": "reference"}
        return jnp.sum(aj.local_attention(tokens, tokens, tokens, radius=RADIUS, **options) ** 2)

    gradient = suite.quick_jit(jax.grad(total, (0, 1)))
    dsigma, dcenters = gradient(1.3, np.array([1.5, np.inf, 2.0, -np.inf], np.float32))
    expected, _ = gradient(1.3, np.array([1.5, -9.0, 2.0, 99.0], np.float32))
    np.testing.assert_allclose(dsigma, expected, rtol=1e-6)
    assert np.nonzero(np.asarray(dcenters))[0].tolist() == [0, 2]
    # Nor does a Gaussian that is 0 at all keys but its center, where its slope overflows.
    dsigma, dcenters = gradient(1e-20, np.array([1.5, 1.0, 2.0, 0.0], np.float32))
    assert dsigma == 0
    assert not np.any(dcenters)
