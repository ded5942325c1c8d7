"""worked_example.py: by hand, against NumPy, and the committed numbers."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import Score, attention
from experiments.scores import general_score_cost, worked_example
from experiments.scores.chosen_scores import fresh_params
from experiments.torch_random import TorchRandom

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

COMMITTED = json.loads((EXPERIMENTS / "scores" / "worked_example.json").read_text())


@pytest.mark.parametrize("expectation", worked_example.expectations(COMMITTED), ids=str)
def test_committed_numbers(expectation):
    assert expectation.met, expectation


def test_it_runs_and_draws():
    numbers = worked_example.run(worked_example.QUICK)
    numbers["config"] = dataclasses.asdict(worked_example.QUICK)
    missed = [item for item in worked_example.expectations(numbers) if not item.met]
    assert not missed, missed
    assert set(worked_example.plot(numbers)) == set(worked_example.CAPTIONS)
    assert json.loads(json.dumps(numbers["three_tokens"])) == COMMITTED["three_tokens"]


def test_any_scores():
    config = dataclasses.replace(worked_example.QUICK, scores=("dot", "score_cases:OwnCosine"))
    numbers = worked_example.run(config) | {"config": dataclasses.asdict(config)}
    assert [str(item) for item in worked_example.expectations(numbers) if not item.met] == []
    # The kernel of a fresh score of its own, and the angle between projected query and key.
    kernel = np.asarray(
        fresh_params("score_cases:OwnCosine", jax.random.key(2), 4)["projection"]["kernel"]
    )
    query, key = np.array(worked_example.QUERY) @ kernel, np.array(worked_example.KEY)
    cosine = query @ key / np.linalg.norm(query) / np.linalg.norm(key)
    np.testing.assert_allclose(
        numbers["scores"]["score_cases:OwnCosine"]["logit"], cosine, atol=1e-6
    )
    assert numbers["same_order_as_dot"]["dot"] == 1
    assert f"| score_cases:OwnCosine | {cosine:.4f} |" in worked_example.report(numbers)
    assert set(worked_example.plot(numbers)) == set(worked_example.CAPTIONS)


def test_torch_numbers():
    """Compares with PyTorch 2: fewer than 16 numbers, and more, with and without a remainder."""
    np.testing.assert_allclose(
        TorchRandom(0).randn(3), [1.5409961, -0.2934289, -2.1787894], rtol=1e-6
    )
    of_21 = TorchRandom(0).randn(21)[[0, 4, 5, 20]]
    np.testing.assert_allclose(of_21, [-1.1258, 0.8487, -1.5551, 0.6181], atol=6e-5)
    last_row = [0.5616, -0.2481, -1.0800, 0.5916, 0.7242, -0.3492, -0.5290, -0.6895]
    np.testing.assert_allclose(TorchRandom(3).randn(5, 8)[-1], last_row, atol=6e-5)
    # A pair's second number is kept, also from one call to the next.
    one_by_one = TorchRandom(0)
    np.testing.assert_array_equal(
        np.concatenate([one_by_one.randn(1), one_by_one.randn(2)]), TorchRandom(0).randn(3)
    )


def test_scores_of_the_pair_in_numpy():
    random = TorchRandom(11)
    kernel, both, v = (0.3 * random.randn(*shape).astype(float) for shape in ((4, 4), (4, 8), (4,)))
    s, h = np.array(worked_example.QUERY), np.array(worked_example.KEY)
    expected = {
        "dot": s @ h,
        "scaled": s @ h / 2,
        "general": s @ kernel @ h,
        "additive": v @ np.tanh(both @ np.concatenate([s, h])),
    }
    for name, score in expected.items():
        np.testing.assert_allclose(COMMITTED["scores"][name]["logit"], score, atol=2e-6)
        np.testing.assert_allclose(sum(COMMITTED["scores"][name]["summands"]), score, atol=5e-6)
    transposed = COMMITTED["transposed"]
    np.testing.assert_allclose(transposed["W h"], s @ (kernel @ h), atol=2e-6)
    np.testing.assert_allclose(transposed["general"], s @ (kernel @ h), atol=2e-6)
    np.testing.assert_allclose(transposed["W^T h"], s @ (kernel.T @ h), atol=2e-6)


def test_three_tokens_by_hand():
    """E11.1: e^(1/sqrt 2) = 2.0281 and e^(1/(2 sqrt 2)) = 1.4241, so a row sums to 4.4522."""
    tables = worked_example.three_tokens()
    weights = [[0.4555, 0.2246, 0.3199], [0.2246, 0.4555, 0.3199], [0.3333, 0.3333, 0.3333]]
    np.testing.assert_allclose(tables["QK^T"], [[1, 0, 0.5], [0, 1, 0.5], [1, 1, 1]])
    np.testing.assert_allclose(tables["A"], weights, atol=6e-5)
    np.testing.assert_allclose(
        tables["AV"], [[0.6155, 0.3845], [0.3845, 0.6155], [0.5, 0.5]], atol=6e-5
    )
    assert int(np.argmax(tables["entropy"])) == 2


def test_loop_form_in_numpy():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=shape) for shape in ((3, 5), (7, 5), (7, 2)))
    weights = np.exp(query @ key.T / np.sqrt(5))
    weights /= weights.sum(axis=1, keepdims=True)
    got = worked_example.loop_form(*(jnp.asarray(x, jnp.float32) for x in (query, key, value)))
    np.testing.assert_allclose(got, weights @ value, atol=1e-6)


def test_general_is_dot_on_projected_keys():
    """Exercise 38.1, on random problems: the keys W h have the same weights with dot."""
    rng = np.random.default_rng(1)
    shapes = ((30, 5, 8), (30, 7, 8), (30, 7, 3), (30, 8, 8))
    query, key, value, kernel = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    kernel /= 8  # logits of standard deviation 1
    general = attention(query, key, value, score="general", params={"kernel": kernel})
    projected = attention(query, key @ kernel.swapaxes(1, 2), value, score="dot")
    np.testing.assert_allclose(general, projected, atol=2e-6)


def test_counting_multiplications():
    arrays = (jnp.ones((3, 5)), jnp.ones((5, 7)))
    count = general_score_cost.count_multiplications
    assert count(jnp.matmul, arrays) == 3 * 5 * 7
    assert count(lambda a, b: jnp.einsum("ij,kj->ik", a, b.T) + 1, arrays) == 3 * 5 * 7
    counts = general_score_cost.multiplications(5, 7, 3)
    assert counts["pairs"]["counted"] == 5 * 7 * (3 * 3 + 3)
    assert counts["keys"]["counted"] == 7 * 3 * 3 + 5 * 7 * 3
    assert counts["queries"]["counted"] == 5 * 3 * 3 + 5 * 7 * 3


@dataclasses.dataclass(frozen=True)
class Transposed(Score):
    """A score with a mistake: its logits are [S, T]."""

    def pair(self, params, q_features, k_features):
        return k_features @ q_features.T


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"scores": ("dot", "dot")}, "scores must be different; got dot, dot"),
        ({"scores": ("skaled",)}, "did you mean 'scaled'"),
        ({"scores": ("test_worked_example:Transposed",)}, "Transposed.*: pair must return"),
        ({"keys": 1}, "keys must be at least 2; got 1"),
        ({"source_lengths": ()}, "source_lengths must be one or more"),
        ({"source_lengths": (3, 0)}, "source_lengths must be one or more"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        worked_example.Config(**settings)
