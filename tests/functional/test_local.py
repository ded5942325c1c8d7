"""Local attention against the paper's formulas, pair by pair in NumPy.

Gradients are compared with the complex step. The edges of a window have no gradient, on either
side.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, DK, SCORE_CASES, TILE, assert_close, named, quick_jit
from oracles import complex_step
from oracles import normal as narrow_normal
from score_cases import numpy_params

from attention_jax import (
    local_attention,
    local_attention_weights,
    monotonic_centers,
    predicted_centers,
    reversed_centers,
    window_mask,
)

B, T, S, DV, A = 2, 5, 7, 3, 4
RADIUS = 2
every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
normal = functools.partial(narrow_normal, dtype=np.float64)

# --- the paper's formulas, with NumPy ---


def numpy_output(pair, point, allowed):
    """Equations 7 and 10, [P, T, Dv], of one example; leaves have an axis of perturbations."""
    point = jax.tree.map(lambda leaf: np.asarray(leaf, complex), point)
    size = max(len(leaf) for leaf in jax.tree.leaves(point))
    output = np.zeros((size, T, DV), complex)
    for i in range(T):
        center = point["centers"][:, i]
        keys = np.arange(S)[allowed[i] & (abs(np.arange(S) - center[0].real) <= RADIUS)]
        logits = [
            pair(point["params"], point["query"][:, i], point["key"][:, j]) + point["bias"][:, i, j]
            for j in keys
        ]
        exponentials = [np.exp(logit - logits[0].real.max()) for logit in logits]
        for j, share in zip(keys, exponentials, strict=True):
            if "sigma" in point:
                share = share * np.exp(-((j - center) ** 2) / (2 * point["sigma"] ** 2))
            output[:, i] += (share / sum(exponentials))[:, None] * point["value"][:, j]
    return output


CENTERS = {
    "whole": np.array([[0, 3, 6, -2, 20]] * 2),  # the last is beside all keys
    "fractional": np.array([[0.3, 2.25, 6.0, -1.7, 9.5], [3.5, 1.0, -4.0, 2.9, 0.0]]),
}


def point_of(score_name, centers, gaussian):
    case = SCORE_CASES[score_name]
    point = {
        "query": normal(B, T, case.query_dim),
        "key": normal(B, S, DK) / 2,
        "value": normal(B, S, DV),
        "bias": normal(B, T, S),
        "params": jax.tree.map(np.float64, numpy_params(case.score, case.query_dim, DK)),
        "centers": CENTERS[centers],
    }
    return point | ({"sigma": np.array(1.3)} if gaussian else {})


def allowed_table(masked):
    table = np.ones((B, T, S), bool)
    if masked:
        table &= np.arange(S) < np.array([6, 4])[:, None, None]
        table[1, 0] = False
    return table


@pytest.mark.parametrize(
    ("score", "centers", "gaussian", "masked", "implementation"),
    [
        ("additive", "fractional", True, True, "tiled"),
        ("scaled", "whole", False, True, "tiled"),
        ("own", "fractional", True, True, "reference"),
        ("additive", "whole", False, False, "reference"),
    ],
)
def test_output_and_gradients_are_the_papers(score, centers, gaussian, masked, implementation):
    """With NaN in keys, values and biases that no allowed pair reads."""
    point, allowed = point_of(score, centers, gaussian), allowed_table(masked)
    cotangent, keys = normal(B, T, DV, seed=5), ~allowed.any(1)[..., None]
    bad = {"key": keys, "value": keys, "bias": ~allowed}
    dirty = point | {name: np.where(where, np.nan, point[name]) for name, where in bad.items()}
    fixed = {"centers": dirty.pop("centers")} if centers == "whole" else {}

    @quick_jit
    def both(floats):
        def attend(floats):
            return local_attention(
                **floats, **fixed, radius=RADIUS, score=SCORE_CASES[score].score, mask=allowed,
                implementation=implementation, block_sizes=TILE,
            )  # fmt: skip

        output, pull_back = jax.vjp(attend, floats)
        return output, pull_back(jnp.asarray(cotangent))[0]

    with jax.enable_x64(True):
        output, gradients = both(dirty)
    expected_gradients = []
    for b in range(B):
        shared = ("params", "sigma")
        example = {name: x if name in shared else x[b] for name, x in point.items()}

        def of_example(example, b=b):
            return numpy_output(SCORE_CASES[score].logits, example, allowed[b])

        expected = of_example(jax.tree.map(lambda leaf: leaf[None], example))[0].real
        assert_close("output", output[b], expected, 1e-13)
        beside = ~np.any(expected, axis=-1)
        assert beside.any()
        assert not np.any(np.asarray(output[b])[beside])
        expected_gradients.append(
            complex_step(lambda x, b=b: (of_example(x).imag * cotangent[b]).sum((1, 2)), example)
        )
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *expected_gradients)
    for name in ("params", "sigma"):
        expected |= {name: jax.tree.map(lambda leaf: leaf.sum(0), expected.get(name, {}))}
    for path, leaf in named(gradients).items():
        assert_close(path, leaf, named(expected)[path], 1e-10)
        assert np.any(leaf), path


def test_weights_are_the_output_for_an_identity():
    for gaussian in (False, True):
        point = jax.tree.map(np.float32, point_of("additive", "fractional", gaussian))
        point["value"] = np.eye(S, dtype=np.float32)
        options = {"radius": RADIUS, "score": "additive", "mask": allowed_table(True)}

        @quick_jit
        def run(value, options=options, **point):
            return (
                local_attention(value=value, **point, **options),
                local_attention_weights(**point, **options),
            )

        output, weights = map(np.asarray, run(**point))
        np.testing.assert_allclose(weights, output, atol=1e-6)
        # With a Gaussian a row sums to less than 1: nothing is normalised after it.
        sums = weights.sum(-1)
        assert np.all((sums < 0.99) if gaussian else (sums == 0) | (abs(sums - 1) < 1e-6))


@pytest.mark.parametrize("size", [128, 8192])
@every_implementation
def test_large_logits_keep_their_digits(implementation, size):
    rng = np.random.default_rng(0)
    query, value = np.ones((T, 1), np.float32), rng.normal(size=(S, DV)).astype(np.float32)
    key = np.float32(size + rng.integers(-3, 4, (S, 1)))  # the logits, which float32 holds
    centers, sigma = np.linspace(0, S - 1, T, dtype=np.float32), 1.7
    output = local_attention(
        query, key, value, centers=centers, radius=RADIUS, sigma=sigma, score="dot",
        implementation=implementation, block_sizes=TILE,
    )  # fmt: skip
    distances = np.arange(S) - np.float64(centers)[:, None]
    weights = np.where(np.abs(distances) <= RADIUS, np.exp(key[:, 0] - np.float64(size)), 0)
    weights = weights / weights.sum(1, keepdims=True) * np.exp(-(distances**2) / (2 * sigma**2))
    assert_close("output", output, weights @ value, 2e-6)


# --- centers ---


def test_predicted_centers_are_equation_9():
    query, params, lengths = normal(B, T, 3), {"kernel": normal(3, A), "v": normal(A)}, [6, 4]
    with jax.enable_x64(True):
        got = quick_jit(predicted_centers)(query, params, np.array(lengths))
    hidden = np.tanh(query @ params["kernel"])
    expected = np.array(lengths)[:, None] / (1 + np.exp(-hidden @ params["v"]))
    assert_close("centers", got, expected, 1e-14)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (query, params))
    assert jax.eval_shape(predicted_centers, *narrow, 300).dtype == jnp.float32


def test_known_alignments():
    assert monotonic_centers(4).tolist() == [0, 1, 2, 3]
    centers = reversed_centers(3, np.array([[5], [2]]))
    assert centers.tolist() == [[[4, 3, 2]], [[1, 0, -1]]]
    # Radius 0 around the anti-diagonal turns a string around.
    value = np.arange(7, dtype=np.float32)[:, None]
    output = local_attention(value, value, value, centers=reversed_centers(7, 5), radius=0)
    assert np.asarray(output)[:, 0].tolist() == [4, 3, 2, 1, 0, 0, 0]


@every_implementation
def test_a_query_of_nan_sees_nothing_and_sends_nothing(implementation):
    query, key = narrow_normal(B, T, 4), narrow_normal(B, S, 4)
    position = {"kernel": narrow_normal(4, A), "v": narrow_normal(A)}
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
    for name, leaf in named(expected).items():
        np.testing.assert_allclose(named(got)[name], leaf, atol=1e-5, err_msg=name)
        assert np.any(leaf), name


# --- batches, dtypes, dropout ---


def test_heads_and_examples_are_a_loop():
    query, key, sigma = narrow_normal(B, 3, T, 4), narrow_normal(B, 3, S, 4), [0.7, 1.4, 2.1]
    centers = np.float32(CENTERS["fractional"])

    @quick_jit
    def attend(query, key, centers, sigma):
        options = {"centers": centers, "radius": RADIUS, "sigma": sigma}
        return local_attention(query, key, key, **options, implementation="tiled")

    got = np.asarray(attend(query, key, centers[:, None, :], np.float32(sigma)))
    for b, n in np.ndindex(B, 3):
        expected = attend(query[b, n], key[b, n], centers[b], np.float32(sigma[n]))
        np.testing.assert_allclose(got[b, n], expected, atol=2e-6)


def test_centers_beyond_the_range_of_a_narrow_dtype():
    query = narrow_normal(1, 4)
    key, value = np.broadcast_to(query, (300, 4)), np.arange(300, dtype=np.float32)[:, None]
    for center in (np.array([127], np.int8), np.array([255], np.uint8), np.array([2], np.uint32)):
        output = local_attention(query, key, value, centers=center, radius=2)
        np.testing.assert_allclose(output, center[None, :], rtol=1e-6)
    narrow = np.array([256], jnp.bfloat16)  # where bfloat16 knows every second number
    assert window_mask(narrow, 1).materialize(1, 300).sum() == 3


def test_arguments_without_effect_are_refused():
    tokens, where = jnp.ones((3, 2)), {"centers": jnp.ones(3), "radius": 1}
    for call in (
        lambda: local_attention(tokens, tokens, tokens, **where, return_statistics=True),
        lambda: local_attention_weights(tokens, tokens, **where, dropout_rate=0.5),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call()
