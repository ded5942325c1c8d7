"""complexity_ledger.py: the naive forms are the scores, and the counts are those stated."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from command_lines import ROOT
from numpy_model import PAIRS, normal, softmax_where

from attention_jax import SCORES, Score
from experiments.costs import complexity_ledger as experiment

T, S, D = 5, 7, 3


QUERY, KEY, VALUE = normal(T, D), normal(S, D, seed=3), normal(S, D, seed=4)


@pytest.fixture(scope="module")
def naive():
    """{score: (params, output)} of one program."""

    @jax.jit
    def outputs(rng):
        results = {}
        for name, score in SCORES.items():
            params = score.init(rng, D, D)
            results[name] = params, experiment.naive_attention(name)(QUERY, KEY, VALUE, params)
        return results

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return outputs(jax.random.key(1))


@pytest.mark.parametrize("name", SCORES)
def test_a_naive_form_is_its_score(naive, name):
    params, output = naive[name]
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    logits = PAIRS[name](wide, QUERY[:, None].astype(float), KEY[None].astype(float))
    np.testing.assert_allclose(output, softmax_where(logits) @ VALUE, atol=2e-6)


def test_growth_of_increments_sees_through_a_constant():
    lengths = (1, 2, 4, 8)
    with_constant = [1000 + 3 * n for n in lengths]
    assert experiment.growth_of_increments(lengths, with_constant) == pytest.approx(1)
    squares = [1000 + 3 * n * n for n in lengths]
    assert experiment.growth_of_increments(lengths, squares) == pytest.approx(2)
    assert experiment.growth_of_increments(lengths, [5, 5, 5, 5]) == 0
    assert experiment.growth_of_increments(lengths, [1, 2, 2, 8]) == pytest.approx(0.9)


def test_temporary_memory_of_real_programs():
    config, table = experiment.QUICK, 4 * 128 * 128
    held = [
        experiment._temporary("additive", "naive", 128, backward, config) for backward in (0, 1)
    ]
    assert held[0] >= config.dim * table  # [T, S, A]
    assert held[1] >= 2 * config.dim * table  # and its gradient
    assert experiment._temporary("scaled", "tiled", 128, False, config) < table / 2


def counted(monkeypatch, exponents, scores=tuple(experiment.PUBLISHED_PARAMETERS)):
    """Returns the numbers of a run whose memory grows by `exponents`, without compiling."""

    def temporary(score, form, length, backward, config):
        return 1000 + (700 if form == "naive" else 7) * length ** exponents[form]

    monkeypatch.setattr(experiment, "_temporary", temporary)
    config = dataclasses.replace(experiment.QUICK, scores=scores)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        numbers = experiment.run(config)
    return json.loads(json.dumps(numbers | {"config": dataclasses.asdict(config)}, default=str))


def test_a_run_meets_its_expectations(monkeypatch):
    numbers = counted(monkeypatch, {"naive": 2, "reference": 2, "tiled": 1})
    assert [str(one) for one in experiment.expectations(numbers) if not one.met] == []
    assert numbers["scores"]["general"]["parameters"] == 16 * 16
    sources = {check.claim: check.source for check in experiment.expectations(numbers)}
    assert sources["parameters of additive at d = 16"] == "8256 at d = 64"
    assert not any("d = 64" in claim for claim in sources)
    assert numbers["scores"]["scaled"]["memory"]["tiled"]["forward"]["bytes"][0] == 1448
    assert numbers["stated_flops_per_query"]["additive"][0] == 2 * 64 * (2 * 16**2 + 16)


def test_tiles_that_grow_as_a_square_miss_their_bounds(monkeypatch):
    numbers = counted(monkeypatch, {"naive": 2, "reference": 2, "tiled": 2})
    missed = [one.claim for one in experiment.expectations(numbers) if not one.met]
    assert len(missed) == 4 * 2
    assert all("tiled" in claim for claim in missed)


@dataclasses.dataclass(frozen=True)
class Halved(Score):
    """A user's own: half of the dot product."""

    def pair(self, params, q_features, k_features):
        return 0.5 * q_features @ k_features.T


def test_a_score_of_ones_own_is_counted_and_drawn(monkeypatch):
    own = f"{__name__}:Halved"
    numbers = counted(
        monkeypatch, {"naive": 2, "reference": 2, "tiled": 1}, scores=("general", own)
    )
    counts = numbers["scores"][own]
    assert counts["parameters"] == 0
    # d multiplications and d additions per pair, and d multiplications of each query by a half.
    assert counts["pair"][0] == 2 * 16
    assert counts["query"][0] + counts["key"][0] == 0
    assert list(counts["memory"]) == ["reference", "tiled"]
    assert [str(one) for one in experiment.expectations(numbers) if not one.met] == []
    of_own = [check for check in experiment.expectations(numbers) if own in check.claim]
    assert len(of_own) == 4
    assert {check.verdict for check in of_own} == {"ours"}
    assert f"| {own} | 0 |" in experiment.report(numbers)
    memory, operations = experiment.plot(numbers).values()
    assert memory.axes[1].get_title() == f"{own}, 0 parameters"
    assert [line.get_label() for line in operations.axes[0].lines] == ["general", own]


def test_the_committed_numbers():
    numbers = json.loads((ROOT / "experiments/costs/complexity_ledger.json").read_text())
    found = experiment.expectations(numbers)
    assert len(found) == 4 + 1 + 3 + 1 + 2 + len(SCORES) * 3 * 2 + 1
    assert [check.claim for check in found if check.verdict == "contradicted"] == [
        "operations of scaled for one query, T = 4096: T d + d / 2 multiply-adds"
    ]
    assert set(experiment.plot(numbers)) == set(experiment.CAPTIONS)


def test_the_price_of_additive_is_that_of_the_result_files():
    ledger = json.loads((ROOT / "experiments/costs/complexity_ledger.json").read_text())
    text = experiment.price_of_additive(ledger)
    assert "| parameters at d = 64 | 8,256 | 0 |" in text
    results = ROOT / "scripts/benchmarks/results/benchmark.json"
    rows = json.loads(results.read_text())["benchmarks"]["attention"]["rows"]
    additive, scaled = (
        row["milliseconds"]
        for work in ("small-additive", "small-scaled")
        for row in rows
        if row["work"] == work and row["contestant"] == "ours"
    )
    assert f"T = 9, S = 8, d = 64 | {additive:.2f} | {scaled:.2f} |" in text
    assert text in (ROOT / "experiments/costs/README.md").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": ("dott",)}, "score must be one of .*; got 'dott'"),
        ({"scores": ()}, "scores must be one or more, each once"),
        ({"scores": ("dot", "dot")}, "scores must be one or more, each once"),
        ({"lengths": (64, 128)}, "at least three, rising"),
        ({"lengths": (64, 256, 128)}, "at least three, rising"),
        ({"dim": 0}, "dim must be at least 1; got 0"),
        ({"block": 0}, "block must be at least 1; got 0"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment.Config(), **settings)
