"""gradient_analysis.py: its mathematics on tiny cases, and the committed numbers."""

import copy
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import ROOT

from attention_jax.analysis import CapturedAttention, OutputGradient
from attention_jax.scores import Additive, Score
from experiments.experiment import conduct
from experiments.gradients import gradient_analysis as analysis
from experiments.gradients import gradient_questions as questions
from experiments.reversal.strings import reversal_batch

T, S, D, DV = 5, 7, 3, 11
RESULTS = ROOT / "experiments" / "gradients"
TRAINED = (
    "ends above",
    "ends below",
    "needs its padding",
)  # claims that two steps of training do not support


@pytest.fixture(scope="module")
def numbers():
    return json.loads((RESULTS / "gradient_analysis.json").read_text())


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


# --- 1. the size of a dot product ---


def test_entropy_of_standard_normal_logits_of_two_keys():
    gap = np.linspace(-12, 12, 4001)  # of deviation sqrt(2)
    p = 1 / (1 + np.exp(-gap))
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    density = np.exp(-(gap**2) / 4) / math.sqrt(4 * math.pi)
    expected = np.sum(entropy * density) * (gap[1] - gap[0])
    found = questions.limit_of_entropy(2, samples=100_000, seed=0)
    assert found == pytest.approx(expected, abs=4 * 0.2 / math.sqrt(100_000))


def test_random_rows_of_two_keys_by_hand():
    found = questions.random_products(D, source_length=2, samples=101, seed=3)
    for rows in found.values():
        gap = np.sqrt(2 * rows["logit_variance"].astype(np.float64))  # one degree of freedom
        p = 1 / (1 + np.exp(-gap))
        entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
        np.testing.assert_allclose(rows["jacobian_norm"], 2 * p * (1 - p), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(rows["entropy"], entropy, rtol=1e-3, atol=1e-6)
    dot, scaled = found["dot"]["logit_variance"], found["scaled"]["logit_variance"]
    np.testing.assert_allclose(dot, D * scaled, rtol=1e-4, atol=1e-6)
    assert not np.allclose(found["dot"]["dlogits_norm"], found["scaled"]["dlogits_norm"])


# --- 2. the tanh ---


def norm(gradient):
    return float(np.linalg.norm(gradient))


def output_along(logits, value, doutput):
    """A loss with gradient doutput in the output."""
    return jnp.sum((jax.nn.softmax(logits) @ value) * doutput)


def test_additive_gradients_and_saturation_against_the_formula():
    query, key, value, doutput = arrays((T, D), (S, D), (S, DV), (T, DV))

    def units(params):
        q, k = query @ params["query_kernel"], key @ params["key_kernel"]
        return jnp.tanh(q[:, None, :] + k[None, :, :])

    def loss(params):
        return output_along(units(params) @ params["v"], value, doutput)

    @jax.jit
    def both(rng):
        params = Additive(hidden_dim=13).init(rng, D, D)
        params = {**params, "query_kernel": 5 * params["query_kernel"]}
        found = questions._additive(params, query, key, value, doutput)
        return params, units(params), jax.grad(loss)(params), found

    params, materialised, expected, found = jax.device_get(both(jax.random.key(0)))
    for name, gradient in expected.items():
        assert float(found[name]) == pytest.approx(norm(gradient), rel=1e-4)
    materialised = materialised.astype(np.float64)
    logits = materialised @ params["v"]
    assert float(found["saturated_units"]) == pytest.approx(np.mean(np.abs(materialised) > 0.99))
    assert 0.1 < float(found["saturated_units"]) < 0.9
    bound = np.abs(params["v"]).sum()
    assert float(found["largest_logit_of_bound"]) == pytest.approx(
        np.abs(logits).max() / bound, rel=1e-5
    )
    assert float(found["logit_variance"]) == pytest.approx(logits.var(-1).mean(), rel=1e-4)


def test_projected_dot_gradients_against_the_formula():
    query, key, value, doutput, wq, wk = arrays(
        (T, D), (S, D), (S, DV), (T, DV), (D, 13), (D, 13), seed=2
    )

    def loss(kernels):
        logits = (query @ kernels["query_kernel"]) @ (key @ kernels["key_kernel"]).T / 13**0.5
        return output_along(logits, value, doutput)

    kernels = {"query_kernel": wq, "key_kernel": wk}

    @jax.jit
    def both(kernels):
        found = questions._projected_dot(kernels, query, key, value, doutput)
        return found, jax.grad(loss)(kernels)

    found, expected = both(kernels)
    for name, gradient in expected.items():
        assert float(found[name]) == pytest.approx(norm(gradient), rel=1e-4)


def test_kernels_at_scale_one_give_unit_variance():
    found = questions.growing_kernels((1.0, 30.0), dim=16, length=S, samples=64, seed=0)
    assert found["additive"]["largest_logit_of_bound"].max() <= 1  # no logit exceeds sum |v|
    variances = found["scaled"]["logit_variance"][0] * S / (S - 1)
    assert abs(variances.mean() - 1) < 4 * questions.standard_error(variances)
    # 30 times the kernels on either side: 900 times the logits.
    growth = found["scaled"]["logit_variance"][1] / found["scaled"]["logit_variance"][0]
    np.testing.assert_allclose(growth, 900.0**2, rtol=1e-3)


# --- 3. padding ---


def test_shares_at_padding_on_paper():
    # Two strings, of 1 and 2 letters, padded to 3; two queries, of which the loss depends on the
    # first of each string and on the second of the second.
    weights = np.array([[[0.5, 0.3, 0.2], [9, 9, 9]], [[0.1, 0.2, 0.7], [0.4, 0.5, 0.1]]])
    doutput = np.array([[[1.0], [0.0]], [[1.0], [-1.0]]])
    dlogits = np.array([[[-4.0, 3.0, 1.0], [0, 0, 0]], [[1, 1, -2], [3, -1, -2]]])
    weights, doutput, dlogits = (x.astype(np.float32) for x in (weights, doutput, dlogits))
    seen = dict.fromkeys(CapturedAttention._fields) | {"weights": weights}
    gradient = OutputGradient(doutput, None, dlogits)
    batch = reversal_batch(
        np.full((2, 3), 5, np.int32), np.array([1, 2], np.int32), source_start=False
    )
    padding_shares = jax.jit(questions.padding_shares)
    shares = padding_shares(CapturedAttention(**seen), gradient, batch)
    assert float(shares["weights"]) == pytest.approx((0.5 + 0.7 + 0.1) / 3)
    assert float(shares["gradient"]) == pytest.approx((4 + 2 + 2) / (8 + 4 + 6))
    assert float(shares["keys"]) == pytest.approx((2 + 1 + 1) / 9)
    # A head more, the same in both.
    two_heads = CapturedAttention(**seen | {"weights": np.stack([weights, weights], 1)})
    gradient = OutputGradient(*(np.stack([x, x], 1) for x in (doutput, doutput, dlogits)))
    again = padding_shares(two_heads, gradient, batch)
    assert jax.tree.map(float, again) == pytest.approx(jax.tree.map(float, shares))


def test_wider_batches_hold_the_same_strings():
    letters = np.array([[5, 6, 7], [8, 9, 10]], np.int32)
    batch = reversal_batch(letters, np.array([2, 3], np.int32), source_start=False)
    wide = jax.device_get(jax.jit(questions.widened, static_argnums=1)(batch, S))
    assert wide.source.tolist() == [[5, 6, 0, 0, 0, 0, 0], [8, 9, 10, 0, 0, 0, 0]]
    assert wide.targets[:, :4].tolist() == np.asarray(batch.targets).tolist()
    assert wide.targets.shape == (2, S + 1)
    assert wide.target_lengths.tolist() == [3, 4]


# --- 4. curvature ---


def test_sum_of_squared_eigenvalues_of_a_known_hessian():
    # Of a diagonal Hessian |H z|^2 is the same for all signs.
    def loss(params):
        return jnp.sum(params["x"] ** 2) + 1.5 * params["y"] ** 2 / 3

    params = {"x": np.ones(2, np.float32), "y": np.float32(4)}
    squares = jax.jit(
        lambda rng: questions._sum_of_squared_eigenvalues(loss, params, rng, samples=3)
    )
    found = squares(jax.random.key(0))
    assert float(found) == pytest.approx(2**2 + 2**2 + 1)


# --- the committed numbers ---


def test_claims_and_verdicts_of_the_committed_numbers(numbers):
    found = analysis.expectations(numbers)
    claims = [one.claim for one in found]
    assert all(any(part in claim for claim in claims) for part in TRAINED)
    contradicted = [one.claim for one in found if one.verdict == "contradicted"]
    assert len(contradicted) == 3
    assert "ends below that of guessing" in contradicted[-1]


def test_the_mask_leaves_nothing_at_padding(numbers):
    masked = numbers["padding"]["masked, 8"]
    for place in (questions.CROSS, questions.SELF):
        assert np.max(masked[place]["weights"]) == np.max(masked[place]["gradient"]) == 0
    # Losses are kept to five digits.
    np.testing.assert_allclose(masked["bare"], masked["padded"], atol=2e-4)


def test_the_mean_square_of_dlogits_is_that_of_the_jacobian(numbers):
    for of_score in numbers["random"]["scores"].values():
        excess, errors = (np.array(of_score["excess"][name]) for name in ("mean", "error"))
        assert np.max(np.abs(excess) / errors) < 4.5  # the largest of many


@pytest.mark.parametrize(
    ("claim", "path"),
    [
        ("the variance of unscaled", ("random", "scores", "dot", "logit_variance", "mean")),
        ("entropy of scaled dot", ("random", "scores", "scaled", "entropy", "mean")),
        ("unscaled dot's mean Jacobian", ("random", "scores", "dot", "jacobian_norm", "mean")),
        ("median |dlogits|", ("random", "scores", "dot", "dlogits_norm", "median")),
        ("share of units", ("kernels", "additive", "saturated_units", "mean")),
        ("variance of additive", ("kernels", "additive", "logit_variance", "mean")),
        ("mean gradient into the query", ("random", "scores", "scaled", "dquery_rms", "mean")),
        ("entropy of the weights at scale", ("kernels", "scaled", "entropy", "mean")),
        ("an eigenvalue lies", ("curvature", "dot", "largest_residual")),
    ],
)
def test_other_numbers_do_not(numbers, claim, path):
    changed = copy.deepcopy(numbers)
    *parents, last = path
    place = changed
    for name in parents:
        place = place[name]
    place[last] = (1.7 * np.array(place[last]) + 2.7).tolist()
    (found,) = [one for one in analysis.expectations(changed) if one.claim.startswith(claim)]
    assert not found.met


def test_figures_and_answers_come_from_the_numbers(numbers):
    figures = analysis.plot(numbers)
    assert list(figures) == list(analysis.CAPTIONS)
    text = analysis.report(numbers)
    assert text.count("?*") == 4  # questions
    losses = np.array(numbers["training"]["dot"]["loss"][-1])
    assert f"a loss of {float(f'{losses.mean():.3g}'):g} ± " in text
    for score, arm in numbers["curvature"].items():
        largest = np.mean(arm["largest"][-1])
        assert f"| {score} | {float(f'{largest:.2g}'):g} ± " in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": ()}, "dims must be at least one; got none"),
        ({"dims": (4, 0)}, "dims must be at least 1; got 0"),
        ({"kernel_scales": (0.0,)}, "kernel_scales must be greater than 0; got 0.0"),
        ({"trained_steps": 7}, "trained_steps must be a multiple of look_every 25; got 7"),
        ({"seeds": 1}, "seeds must be at least 2; got 1"),
        ({"widths": (7,)}, "widths must be at least 8; got 7"),
        ({"scores": ("dott",)}, "dott"),
        ({"model_dims": (15,)}, "dim must be a multiple of 2, .*; got 15"),
        ({"num_heads": 3}, "dim must be a multiple of 3 heads; got 64"),
        ({"learning_rate": 0.0}, "learning_rate must be greater than 0; got 0.0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
    ],
)
def test_mistakes_before_anything_is_computed(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(analysis.Config(), **settings)


@pytest.mark.slow
def test_quick_run(tmp_path, capsys):
    conduct(analysis, analysis.QUICK, tmp_path)
    numbers = json.loads((tmp_path / "gradient_analysis.json").read_text())
    missed = [one.claim for one in analysis.expectations(numbers) if not one.met]
    assert [claim for claim in missed if not any(part in claim for part in TRAINED)] == []
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"{stem}.png" for stem in analysis.CAPTIONS
    }
    assert "*Why does unscaled dot stop learning at large d?*" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True)
class Halved(Score):
    """A user's own: half of the dot product."""

    def pair(self, params, q_features, k_features):
        return 0.5 * q_features @ k_features.T


@pytest.mark.slow
def test_curvature_of_any_scores(monkeypatch, numbers):
    own = f"{__name__}:Halved"
    monkeypatch.setattr(analysis, "_learning", lambda config, score, dim, every: {})
    for name in ("_random", "_kernels", "_padding"):
        part = numbers[name.removeprefix("_")]
        monkeypatch.setattr(analysis, name, lambda config, part=part: part)
    config = dataclasses.replace(
        analysis.QUICK, scores=("general", own), dim=8, num_heads=2, iterations=3, strings=3
    )
    found = {**numbers, "curvature": analysis.run(config)["curvature"]}
    assert list(found["curvature"]) == ["general", own]
    assert np.shape(found["curvature"][own]["largest"]) == (2, config.seeds)
    assert f"| {own} | " in analysis.report(found)
    axes = analysis.plot(found)["gradient_analysis_curvature"].axes
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["general", own]
