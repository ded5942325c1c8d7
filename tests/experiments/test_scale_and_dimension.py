"""scale_and_dimension.py: its bookkeeping, and the committed numbers."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
from command_lines import ROOT

from experiments.experiment import conduct
from experiments.reversal import scale_and_dimension as experiment
from experiments.reversal import scale_and_dimension_answers as answers
from experiments.reversal import scale_and_dimension_training as training
from experiments.reversal.arms import loss_of_guessing

RESULTS = ROOT / "experiments" / "reversal"
# Claims that a few steps of training do not support.
LEARNED = ("dot's loss ends above", "scaled dot is not the worst", "scaling harms at no")


@pytest.fixture(scope="module")
def numbers():
    return json.loads((RESULTS / "scale_and_dimension.json").read_text())


# --- bookkeeping ---


def test_every_number_comes_from_its_own_run(monkeypatch):
    """Replaces training by numbers that encode the request."""
    kinds = ("DOT", "ADDITIVE", "GENERAL", "HALF_ADDITIVE", "PROJECTED_DOT")

    def encoded(score, dim, size, rate, seed):
        of_size = 100 * size.factor if size.sd is None else -size.sd
        return kinds.index(score) * 1000 + dim + of_size + rate + 0.5 * seed

    def trained(config, runs, *, every, **_):
        model, loop = config.model, config.train
        score = model.score.split(":")[1]
        losses = np.array(
            [[encoded(score, model.dim, *run, seed) for seed in range(loop.seeds)] for run in runs]
        )
        looks = np.arange(loop.steps // every + 1)
        curves = dict.fromkeys(experiment.CURVES, losses[..., None] + looks)
        rest = {"curves": curves, "exact_match": losses, "factor": losses}
        return {"loss": losses, "parameters": np.array(7), **rest}

    monkeypatch.setattr(training, "trained", trained)
    monkeypatch.setattr(experiment, "significant", lambda numbers: np.asarray(numbers).tolist())
    config = experiment.Config(
        dims=(4, 8), steps=(3, 5), size_dims=(8,), sizes=(2, 3), score_dim=8, score_size=0.5,
        rates=(0.125, 0.25), seeds=2, look_every=1,
    )  # fmt: skip
    numbers = experiment.run(config)
    size_of = training.Size

    def check(arm, score, dim, size):
        rates = [8 / dim * rate for rate in config.rates]
        assert [float(rate) for rate in arm["rates"]] == rates
        for rate, of_rate in zip(rates, arm["rates"].values(), strict=True):
            by_seed = [encoded(score, dim, size, rate, seed) for seed in (0, 1)]
            assert of_rate["loss"] == of_rate["exact_match"] == by_seed
        return of_rate  # of the last rate

    for dim, steps in ((4, 3), (8, 5)):
        of_dim = numbers["dimension"][str(dim)]
        assert of_dim["steps"] == list(range(steps + 1))
        last = check(of_dim["dot"], "DOT", dim, size_of())
        best = of_dim["dot"]["rates"][answers.best_rate(of_dim["dot"])]
        assert np.array(of_dim["dot"]["curves"]["entropy"]).shape == (steps + 1, 2)
        assert best["entropy"] == of_dim["dot"]["curves"]["entropy"][-1] != last["entropy"]
        check(of_dim["scaled"], "DOT", dim, size_of(dim**-0.5))
    assert list(numbers["size"]) == ["8"]
    for size in (2, 3):
        check(numbers["size"]["8"][f"{size}"], "DOT", 8, size_of(sd=size))
    found = {what: dict(arms) for what, arms in numbers["scores"].items()}
    as_they_are, equal, parameters, both = found.values()
    for arms, additive, dot in (
        (as_they_are, "ADDITIVE", "DOT"), (parameters, "HALF_ADDITIVE", "PROJECTED_DOT"),
    ):  # fmt: skip
        check(arms["additive"], additive, 8, size_of())
        check(arms["dot"], dot, 8, size_of())
        check(arms["general"], "GENERAL", 8, size_of())
        check(arms["scaled"], dot, 8, size_of((8 if dot == "DOT" else 4) ** -0.5))
    for arms, additive, dot in (
        (equal, "ADDITIVE", "DOT"), (both, "HALF_ADDITIVE", "PROJECTED_DOT"),
    ):  # fmt: skip
        check(arms["additive"], additive, 8, size_of(sd=0.5))
        check(arms["dot = scaled"], dot, 8, size_of(sd=0.5))
        check(arms["general"], "GENERAL", 8, size_of(sd=0.5))


# --- reading the numbers ---


def arm(**losses):
    return {
        "rates": {rate: {"loss": values, "exact_match": values} for rate, values in losses.items()}
    }


def test_an_arm_is_read_at_its_best_rate():
    of_two = arm(a=[1.0, 5.0, 3.0], b=[2.0, 2.5, 3.0])
    assert answers.best_rate(of_two) == "b"
    assert answers.at_best_rate(of_two, "exact_match").tolist() == [2.0, 2.5, 3.0]


def test_difference_of_paired_seeds_by_hand():
    # Gaps 1, 2, 3: mean 2, deviation 1.
    gap, bound = answers.difference(arm(a=[2.0, 4.0, 6.0]), arm(b=[1.0, 2.0, 3.0]))
    assert (gap, bound) == pytest.approx((2, 2 / math.sqrt(3)))


def test_sizes_that_fail_are_larger_and_worse_than_by_chance():
    arms = {
        "0.5": arm(a=[5.0, 5.1, 5.2]),  # worse, but smaller
        "1": arm(a=[1.0, 1.2, 1.1]),
        "4": arm(a=[1.9, 0.6, 1.1]),  # worse, but by chance
        "16": arm(a=[2.0, 2.1, 2.2]),
        "8": arm(a=[1.5, 1.8, 1.7]),
    }
    assert answers.sizes_that_fail(arms) == ("1", ["8", "16"])


def test_guessing_letters_costs():
    assert loss_of_guessing() == pytest.approx(5.5 / 6.5 * math.log(26))


# --- the committed numbers ---


def test_dot_begins_with_logits_sqrt_d_times_as_large_as_scaled_dots(numbers):
    for dim, arms in numbers["dimension"].items():
        dot, scaled = (np.array(arms[score]["initial_logit_sd"]) for score in ("dot", "scaled"))
        np.testing.assert_allclose(dot, math.sqrt(int(dim)) * scaled, rtol=2e-4)


def test_logits_begin_at_the_size_that_was_set(numbers):
    sized = [(float(sd), arm) for arms in numbers["size"].values() for sd, arm in arms.items()]
    for what in ("equal logits", "equal logits and parameters"):
        arms = numbers["scores"][what].values()
        sized += [(numbers["config"]["score_size"], arm) for arm in arms]
    assert len(sized) == 2 * 6 + 2 * 3
    for sd, arm in sized:
        np.testing.assert_allclose(arm["initial_logit_sd"], sd, rtol=2e-4)


def test_equal_parameters_are_equal_up_to_half_the_dimension(numbers):
    dim = numbers["config"]["score_dim"]
    for what in ("equal parameters", "equal logits and parameters"):
        for arm in numbers["scores"][what].values():
            assert dim**2 <= arm["parameters"] <= dim**2 + dim // 2


def swap(arms, a, b):
    arms[a], arms[b] = arms[b], arms[a]


def spoil(numbers, claim):
    config = numbers["config"]
    largest = numbers["dimension"][str(config["dims"][-1])]
    if claim in ("at d = 256 unscaled dot's loss", "at d = 256 dot begins"):
        swap(largest, "dot", "scaled")
    elif claim.startswith("scaling harms"):
        rates = numbers["dimension"]["16"]["scaled"]["rates"]
        rates["0.004"]["loss"] = [3.0, 3.0, 3.0]
    else:
        swap(numbers["scores"]["as they are"], "scaled", "dot")


@pytest.mark.parametrize(
    "claim",
    [
        "at d = 256 unscaled dot's loss",
        "at d = 256 dot begins",
        "scaling harms",
        "at d = 64, padding masked",
    ],
)
def test_other_numbers_do_not(numbers, claim):
    changed = copy.deepcopy(numbers)
    spoil(changed, claim)
    (found,) = [one for one in experiment.expectations(changed) if one.claim.startswith(claim)]
    assert not found.met


def test_figures_and_tables_come_from_the_numbers(numbers):
    assert list(experiment.plot(numbers)) == list(experiment.CAPTIONS)
    lines = experiment.report(numbers).splitlines()
    for dim, of_dim in numbers["dimension"].items():
        by_rate = of_dim["dot"]["rates"]
        rate = min(by_rate, key=lambda rate: sum(by_rate[rate]["loss"]))
        (row,) = [line for line in lines if line.startswith(f"| {dim} | dot |")]
        mean = float(f"{np.mean(by_rate[rate]['loss']):.2g}")
        assert row.startswith(f"| {dim} | dot | {rate} | {mean:g} ± ")
        entropy = of_dim["dot"]["curves"]["entropy"]
        assert f"| {np.mean(entropy[0]):.2f} → {np.mean(entropy[-1]):.2f} |" in row
    best = min(
        numbers["scores"]["equal logits and parameters"].items(),
        key=lambda arm: min(np.mean(rate["loss"]) for rate in arm[1]["rates"].values()),
    )[0]
    assert any(line.startswith(f"| equal logits and parameters | {best} ") for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": (), "steps": ()}, "dims must be at least one, each once"),
        ({"rates": (1e-3, 1e-3)}, "rates must be at least one, each once"),
        ({"size_dims": ()}, "size_dims must be at least one, each once"),
        ({"sizes": (1.0, 0.0)}, "sizes must be finite and greater than 0; got 0.0"),
        ({"score_size": math.inf}, "score_size must be finite and greater than 0; got inf"),
        ({"seeds": 1}, "seeds must be at least 2; got 1"),
        ({"steps": (400, 400)}, "steps must be one for each of dims"),
        ({"steps": (400, 400, 310)}, "steps must be multiples of look_every 50; got 310"),
        ({"dims": (16, 64, 258)}, "dims must be multiples of 4; got 258"),
        ({"size_dims": (32,)}, r"size_dims must be among dims \(16, 64, 256\); got 32"),
        ({"score_dim": 32}, r"score_dim must be among dims \(16, 64, 256\); got 32"),
    ],
)
def test_mistakes_before_anything_is_computed(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment.Config(), **settings)


@pytest.mark.slow
def test_quick_run(tmp_path, capsys):
    conduct(experiment, experiment.QUICK, tmp_path)
    numbers = json.loads((tmp_path / "scale_and_dimension.json").read_text())
    missed = [one.claim for one in experiment.expectations(numbers) if not one.met]
    assert [claim for claim in missed if not any(part in claim for part in LEARNED)] == []
    assert {path.stem for path in tmp_path.glob("*.png")} == set(experiment.CAPTIONS)
    assert "Which score is best in a fair comparison?" in capsys.readouterr().out
