"""The committed results hold what the READMEs claim, and the READMEs show their tables."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from benchmarks import readme_tables

from experiments import catalogue
from experiments.experiment import numbers_path

ROOT = Path(__file__).parents[2]

FRONT_PAGE, REVERSAL, SCRIPTS = (
    (ROOT / folder / "README.md").read_text() for folder in ("", "experiments/reversal", "scripts")
)
BENCHMARK_RESULTS = ROOT / "scripts" / "benchmarks" / "results"


def numbers_of(name):
    """The committed numbers of an experiment."""
    return json.loads(numbers_path(catalogue.folder_of(name), name).read_text())


NUMBERS = numbers_of("reversal_comparison")


@pytest.mark.parametrize("name", catalogue.SUBJECT_OF)
def test_the_default_settings_are_those_of_the_committed_results(name):
    """Settings that were added since, each with the value that the results had, may be missing."""
    settings = json.loads(json.dumps(asdict(catalogue.load(name).Config()), default=str))

    def assert_within(committed, settings):
        if isinstance(committed, dict):
            for name, value in committed.items():
                assert_within(value, settings[name])
        else:
            assert committed == settings

    assert_within(numbers_of(name)["config"], settings)


SCORES = ["additive", "dot", "general", "scaled"]


@pytest.mark.parametrize("score", SCORES)
def test_claims_on_reversal_are_about_the_means_of_the_seeds(score):
    measured = {
        check.claim: check.measured
        for check in catalogue.load("reversal_comparison").expectations(NUMBERS)
    }
    by_length = NUMBERS["scores"][score]["accuracy"]["free_running_exact"]
    lengths = [by_length[length] for length in "345678"]
    by_seed = [sum(shares) / 6 for shares in zip(*lengths, strict=True)]
    assert len(by_seed) >= 5
    for which, shares in {
        "lengths 3-8": by_seed, **{f"length {n}": by_length[n] for n in ("10", "20", "50")}
    }.items():  # fmt: skip
        exact = f"{score}: exact match, {which},"
        assert measured[f"{exact} mean of the seeds"] == pytest.approx(np.mean(shares))
        assert measured[f"{exact} worst seed"] == pytest.approx(min(shares))
    far = measured[f"{score}: exact match, length 200, mean of the seeds"]
    assert far == pytest.approx(np.mean(by_length["200"]))


@pytest.mark.parametrize("score", SCORES)
def test_claims_on_a_missing_mask_are_about_the_means_of_the_seeds(score):
    numbers = numbers_of("padding_mask")
    checks = catalogue.load("padding_mask").expectations(numbers)
    measured = {check.claim: check.measured for check in checks}
    unmasked = numbers["unmasked"][score]
    for key, which in (("accuracy", "bare"), ("accuracy_padded", "padded")):
        shares = unmasked[key]["teacher_forced_tokens"]["5"]
        claim = f"{score}, no mask: letters right of {which} strings of length 5"
        assert measured[claim] == pytest.approx(sum(shares) / len(shares))


def test_the_front_page_shows_the_table_of_results():
    comparison = catalogue.load("reversal_comparison")
    table = comparison.table(NUMBERS)
    assert table in FRONT_PAGE
    assert comparison.report(NUMBERS) in REVERSAL
    for score in SCORES:
        by_seed = NUMBERS["scores"][score]["accuracy"]["free_running_exact"]["50"]
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {score} |")]
        assert f"| {100 * np.mean(by_seed):.2f} ± {100 * np.std(by_seed, ddof=1):.2f} (" in row


def test_claims_on_kinds_of_attention_are_about_the_worst_seed_or_the_best():
    family = catalogue.load("attention_family")
    numbers = numbers_of("attention_family")
    assert list(numbers["arms"]) == [*family.Config().scores, *family.ARMS]
    checks = {check.claim: check for check in family.expectations(numbers)}
    assert len(checks) == len(numbers["arms"])
    for arm, measured in numbers["arms"].items():
        by_length = [measured["accuracy"]["free_running_exact"][n] for n in "345678"]
        by_seed = [sum(shares) / 6 for shares in zip(*by_length, strict=True)]
        assert len(by_seed) >= 3
        fails = arm in ("local-m, diagonal", "monotonic") or arm.endswith(
            ("encoder, local-m, diagonal", "encoder, monotonic")
        )
        claim = f"{arm}: exact match of lengths 3-8, {'best' if fails else 'worst'} seed"
        assert checks[claim].measured == pytest.approx((max if fails else min)(by_seed))
    assert family.report(numbers) in REVERSAL


BENCHMARKS = json.loads((BENCHMARK_RESULTS / "benchmark.json").read_text())["benchmarks"]

COMPILED = {f"compiled {name}" for name in ("programs", "targets", "tiles", "against tiles")}


@pytest.mark.parametrize(
    ("name", "markers"),
    [
        ("benchmark", {"attention speed", "attention memory", "targets", "local", "decoding"}),
        ("ring_memory", {"ring"}),
        ("compiled_programs", COMPILED),
        ("compiled_steps", {"compiled steps"}),
        ("compiled_h100", {"compiled h100", "compiled h100 targets"}),
        ("translation_speed", {"translation", "translation parts"}),
        ("normalizers", {"normalizers"}),
    ],
)
def test_readmes_show_the_committed_tables(name, markers):
    tables = readme_tables.tables_of(BENCHMARK_RESULTS / f"{name}.json")
    assert tables.keys() == markers
    assert readme_tables.written(SCRIPTS, tables) == SCRIPTS
    wrong = {marker: table.replace("1", "2") for marker, table in tables.items()}
    assert readme_tables.written(SCRIPTS, wrong) != SCRIPTS


def test_the_normalizers_were_measured_as_the_readme_says():
    content = json.loads((BENCHMARK_RESULTS / "normalizers.json").read_text())
    report = content["benchmarks"]["normalizers"]
    assert "--benchmarks normalizers --repeats 7" in content["command"]
    assert report["settings"] == {"repeats": 7, "shrink": 1}
    assert not content["environment"]["git_commit"].endswith("-dirty")
    memory = [row["memory_met"] for row in report["rows"] if "memory_met" in row]
    assert memory == ["yes"] * 3


def test_memory_is_linear_and_within_its_targets_except_one():
    rows = BENCHMARKS["attention-targets"]["rows"]
    memory = [row for row in rows if "temporary" in row["what"]]
    assert len(memory) == 13
    missed = [(row["claim"], row["what"]) for row in memory if row["met"] != "yes"]
    assert missed == [("tiled, additive, grad-of-grad, T=S=16384", "temporary MiB")]


def test_windows_and_caches_pay_as_they_should():
    rows = [*BENCHMARKS["local"]["rows"], *BENCHMARKS["decoding"]["rows"]]
    with_target = [row for row in rows if "target" in row]
    assert len(with_target) >= 3
    assert [row for row in with_target if row["met"] != "yes"] == []


def test_readme_shows_the_committed_benchmark():
    rows = BENCHMARKS["reversal"]["rows"]
    ours = [row for row in rows if row["model"] == "ours"]
    assert len(ours) == 4
    for row in ours:
        assert f"| {row['score']} | {row['steps_per_second']:.0f} steps/s |" in SCRIPTS
        assert f"| {row['times_peer']:.1f}× |" in SCRIPTS


def test_readme_says_what_logging_gradients_costs():
    numbers = json.loads((BENCHMARK_RESULTS / "gradient_log.json").read_text())
    rows = numbers["benchmarks"]["gradient-log"]["rows"]
    for row in rows:
        assert row["share"] <= 0.1
        assert f"{100 * row['share']:.1f} % " in SCRIPTS
    assert [row["score"] for row in rows] == ["scaled", "additive"]


def test_memory_of_the_ring_falls_with_the_number_of_devices():
    numbers = json.loads((BENCHMARK_RESULTS / "ring_memory.json").read_text())
    rows = numbers["benchmarks"]["ring"]["rows"]
    alone, many = ([row for row in rows if row["devices"] == count] for count in (1, 8))
    assert len(alone) == len(many) == 4
    for one, eight in zip(alone, many, strict=True):
        assert eight["argument_mib"] == pytest.approx(one["argument_mib"] / 8, rel=0.1)
        # What is left of additive attention is a tile, the same on any number of devices.
        assert eight["temporary_mib"] < one["temporary_mib"] / (
            4 if one["score"] == "scaled" else 2
        )


def test_the_translator_was_measured_with_every_score():
    numbers = json.loads((BENCHMARK_RESULTS / "translation_speed.json").read_text())
    rows = numbers["benchmarks"]["translation"]["rows"]
    assert {row["score"] for row in rows} == {"additive", "dot", "general", "scaled"}
    additive = {row["variant"]: row for row in rows if row["score"] == "additive"}
    optax, ours = additive["optax loss"], additive["ours"]
    assert optax["temporary_mib"] == pytest.approx(ours["temporary_mib"], rel=0.02)
    words = f"takes {optax['times_ours']:.2f} times as long in this run, with the same memory"
    assert words in SCRIPTS
    assert f"a step takes {additive['nnx.Dropout']['times_ours']:.2f} times as long" in SCRIPTS
    parts = numbers["benchmarks"]["translation-parts"]["rows"]
    share = parts[0]["gflop_per_second"] / parts[-1]["gflop_per_second"]
    assert f"it computes at {share:.0%}".replace("%", " %") in SCRIPTS
