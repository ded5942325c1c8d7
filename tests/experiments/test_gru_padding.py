"""gru_padding.py: the GRU against NumPy and PyTorch, the arms, and what the numbers must hold."""

import copy
import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import ROOT
from numpy_gru import numpy_logits

from attention_jax import Score
from attention_jax.tasks.vocabulary import PAD
from experiments.experiment import conduct
from experiments.reversal import gru_model, published
from experiments.reversal import gru_padding as experiment
from experiments.reversal.strings import reversal_batch

B, S, T, E, H = 3, 7, 5, 11, 13
LENGTHS = np.array([7, 2, 5])
SCORES = ("additive", "dot", "general", "scaled")


@dataclasses.dataclass(frozen=True)
class Mine(Score):
    """e(q, k) = -|q - k|_1"""

    def pair(self, params, q, k):
        return -jnp.sum(jnp.abs(q[:, None, :] - k[None, :, :]), axis=-1)


@pytest.fixture(scope="module")
def case():
    """{score: parameters}, and the logits without and with the mask, of one program."""
    rng = np.random.default_rng(3)
    source, target_inputs = rng.integers(1, 29, (B, S)), rng.integers(1, 29, (B, T))
    source[np.arange(S) >= LENGTHS[:, None]] = PAD
    real = jnp.asarray(source != PAD)

    @jax.jit
    def compute():
        found = {}
        for index, score in enumerate(SCORES):
            config = gru_model.GRUConfig(score, embedding_dim=E, hidden_dim=H)
            params = gru_model.init(config, jax.random.key(index))
            found[score] = (
                params,
                [
                    gru_model.logits(config, params, source, target_inputs, mask)
                    for mask in (jnp.ones_like(real), real)
                ],
            )
        return found

    return source, target_inputs, jax.device_get(compute())


def torch_state(score, params):
    """The parameters by their names in PyTorch, float64; PAD's embedding is 0."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    state = {}
    for name in ("source_embedding", "target_embedding"):
        state[f"{name}.weight"] = params[name].copy()
        state[f"{name}.weight"][PAD] = 0
    for name, ending in (("encoder", "_l0"), ("decoder", "")):
        for ours, theirs in (("input", "ih"), ("state", "hh")):
            state[f"{name}.weight_{theirs}{ending}"] = params[name][f"{ours}_kernel"].T
            state[f"{name}.bias_{theirs}{ending}"] = params[name][f"{ours}_bias"]
    state["logits.weight"], state["logits.bias"] = (
        params["logits"]["kernel"].T,
        params["logits"]["bias"],
    )
    if score == "additive":
        kernels = (params["score"]["query_kernel"].T, params["score"]["key_kernel"].T)
        state["score.hidden.weight"] = np.concatenate(kernels, axis=1)
        state["score.v.weight"] = params["score"]["v"][None]
    if score == "general":
        state["score.weight"] = params["score"]["kernel"]
    return state


@pytest.mark.parametrize("score", SCORES)
def test_logits_equal_a_gru_in_numpy(case, score):
    source, target_inputs, by_score = case
    params, (bare, masked) = by_score[score]
    state = torch_state(score, params)
    for found, lengths in ((bare, None), (masked, LENGTHS)):
        expected = numpy_logits(score, state, source, target_inputs, lengths)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(bare - masked).max() > 1e-3


def test_initial_parameters_are_distributed_as_in_pytorch():
    @jax.jit
    def init(rng):
        return [
            gru_model.init(gru_model.GRUConfig(score), rng) for score in ("general", "additive")
        ]

    params, of_additive = jax.device_get(init(jax.random.key(5)))
    # A linear layer or GRU: uniform up to 1 / sqrt(fan-in), or 1 / sqrt(H).
    for arrays, bound in (
        (params["encoder"], 96**-0.5), (params["decoder"], 96**-0.5),
        (params["logits"], 192**-0.5),
        ({name: of_additive["score"][name] for name in ("query_kernel", "key_kernel")}, 192**-0.5),
        ({"v": of_additive["score"]["v"]}, 96**-0.5),
    ):  # fmt: skip
        for name, array in arrays.items():
            assert np.abs(array).max() <= bound
            assert np.std(array) == pytest.approx(bound / 3**0.5, rel=0.25), name
    assert np.std(params["source_embedding"]) == pytest.approx(1, rel=0.1)
    # Theirs has 0.1 randn(H, H).
    assert np.std(params["score"]["kernel"]) == pytest.approx(0.1, rel=0.05)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 119_197


def test_strings_are_reversals_of_one_length():
    config = experiment.Config(strings=5)
    batch = experiment._strings(config, 3, 8)
    assert batch.source.shape == (5, 8)
    assert np.all(np.asarray(batch.source != PAD).sum(axis=1) == 3)
    again = reversal_batch(batch.source[:, :3], jnp.full(5, 3), source_start=False)
    np.testing.assert_array_equal(batch.targets[:, :4], again.targets)


@pytest.fixture(scope="module")
def numbers():
    path = ROOT / "experiments" / "reversal" / "gru_padding.json"
    return json.loads(path.read_text())


def test_the_published_ranking_would_not_be_contradicted_by_a_worse_scaled_dot(numbers):
    changed = copy.deepcopy(numbers)
    masked = changed["scores"]["scaled"]["masked"]["letters_right"]
    for length in ("3", "5", "7"):
        masked[length] = [0.9 for _ in masked[length]]
    (found,) = [check for check in experiment.expectations(changed) if check.contradicts]
    assert found.verdict == "MISS"
    assert found.measured == pytest.approx(-0.1, abs=0.005)


def test_the_report_shows_published_and_measured_numbers(numbers):
    report = experiment.report(numbers)
    assert "| scaled | as published, one training | 39 | 17 | 30 | 12 |" in report
    for score, arms in numbers["scores"].items():
        for arm, title in (("unmasked", "no mask"), ("masked", "padding masked")):
            means = [100 * np.mean(arms[arm]["letters_right"][n]) for n in ("3", "5", "7", "10")]
            (row,) = [
                line for line in report.splitlines() if line.startswith(f"| {score} | {title} |")
            ]
            shown = [cell.split(" ± ")[0] for cell in row.split(" | ")[2:]]
            assert shown == [f"{mean:.0f}" for mean in means]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"scores": ("dott",)}, "dott"),
        ({"steps": 30}, "steps must be a multiple of 25; got 30"),
        ({"strings": 0}, "strings must be at least 1; got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1; got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be greater than 0; got -1.0"),
    ],
)
def test_mistakes_before_anything_is_trained(settings, message):
    with pytest.raises(ValueError, match=message):
        experiment.Config(**settings)


@pytest.mark.slow
def test_a_run_with_two_scores_one_of_them_a_users_own(tmp_path, monkeypatch, capsys):
    module = types.ModuleType("scores_of_a_user")
    module.Mine = Mine
    monkeypatch.setitem(sys.modules, "scores_of_a_user", module)
    config = experiment.Config(
        scores=("dot", "scores_of_a_user:Mine"), seeds=2, steps=25, batch_size=4, embedding_dim=3,
        hidden_dim=5, strings=3,
    )  # fmt: skip
    conduct(experiment, config, tmp_path)
    numbers = json.loads((tmp_path / "gru_padding.json").read_text())
    assert list(numbers["scores"]) == list(config.scores)
    for arms in numbers["scores"].values():
        assert list(arms["masked"]["letters_right"]) == [str(n) for n in range(3, 11)]
        assert list(arms["unmasked"]["letters_right_padded"]) == [str(n) for n in range(3, 9)]
        # Both arms start alike, and learn from the same strings, but one sees padding.
        assert np.shape(arms["masked"]["loss"]) == (2,)
        assert arms["masked"]["loss"] != arms["unmasked"]["loss"]
    claims = [check.claim for check in experiment.expectations(numbers)]
    assert [claim for claim in claims if "published" in claim] == [
        "dot, no mask: largest difference from the published numbers"
    ]
    printed = capsys.readouterr().out
    assert "| dot | as published, one training |" in printed
    assert "| scores_of_a_user:Mine | padding masked |" in printed
    assert set(published.LETTERS_RIGHT) == set(SCORES)
