"""The attention benchmark: all contestants compute the same, and rows follow from measurements.

Lengths are a few dozen, so that the times mean nothing.
"""

import dataclasses
import importlib
import json
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    # So that the works share the programs that draw their parameters.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


@pytest.fixture
def works():
    from benchmarks import attention_works

    return attention_works


@pytest.fixture
def peers():
    from benchmarks import attention_peers

    return attention_peers


def usual_promotion(function):
    """Calls the function with JAX's default promotion: peers do not pass under strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return function()


def command(monkeypatch, *arguments):
    """Exit status of the script, run in this process."""
    from benchmarks import measure

    monkeypatch.setattr(measure, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        usual_promotion(lambda: runpy.run_path(str(SCRIPTS / "benchmark.py"), run_name="__main__"))
    return stopped.value.code or 0


def trial(monkeypatch, capsys, tmp_path, *patterns):
    """What a run writes and prints, with divided lengths so that it takes seconds."""
    from benchmarks import attention_speed

    monkeypatch.setattr(attention_speed, "_SHORTEST_REPEAT", 0.005)
    out = tmp_path / "results.json"
    options = ("--benchmarks", "attention", "--shrink", 256, "--repeats", 3, "--out", out)
    assert command(monkeypatch, *options, "--works", *patterns) == 0
    return json.loads(out.read_text())["benchmarks"], capsys.readouterr().out


# --- contestants do the same work ---


def float64_outcome(work):
    """Output, a direction, and the slope of <output, cotangent> along it by central differences."""
    inputs, cotangent = jax.tree.map(lambda leaf: leaf.astype(np.float64), work.arrays())
    distance = np.arange(work.lengths[1])[None, :] - np.arange(work.lengths[0])[:, None]
    table = {"": distance < 99, "causal": distance <= 0, "local 2": abs(distance) <= 2}

    def output(inputs):
        query, key, params = inputs["query"], inputs["key"], inputs["params"]
        if work.score == "additive":
            hidden = (query @ params["query_kernel"])[..., :, None, :]
            hidden = hidden + (key @ params["key_kernel"])[..., None, :, :]
            logits = np.tanh(hidden) @ params["v"]
        elif work.score == "own distance":
            pairs = query[..., :, None, :] - key[..., None, :, :]
            logits = -np.sum(pairs**2, axis=-1)
        else:
            if work.score == "general":
                query = query @ params["kernel"]
            logits = query @ key.swapaxes(-1, -2)
            logits = logits / np.sqrt(work.dim) if work.score == "scaled" else logits
        logits = np.where(table[work.mask], logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True)) @ inputs["value"]

    rng = np.random.default_rng(7)
    direction = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), inputs)

    def value(step):
        moved = jax.tree.map(lambda leaf, along: leaf + step * along, inputs, direction)
        return np.vdot(output(moved), cotangent)

    return output(inputs), direction, (value(1e-5) - value(-1e-5)) / 2e-5


def check_contestant(work, contestant):
    expected, direction, slope = float64_outcome(work)

    def ours_layout(array):
        return np.asarray(array).swapaxes(1, 2) if swapped else np.asarray(array)

    swapped = contestant.about["layout"] == "BTND"
    outcome = contestant.call()
    output, gradients = outcome if work.backward else (outcome, None)
    np.testing.assert_allclose(ours_layout(output), expected, rtol=1e-4, atol=1e-4)
    if gradients is None:
        return
    gradients = dict(gradients)
    gradients |= gradients.pop("params", {})  # PyTorch has them among the other gradients
    measured = sum(
        np.vdot(ours_layout(gradients[name]), direction[name]) for name in ("query", "key", "value")
    )
    measured += sum(
        np.vdot(np.asarray(gradients[name]), along) for name, along in direction["params"].items()
    )
    np.testing.assert_allclose(measured, slope, rtol=1e-3)


def small(works, score, **changes):
    sizes = {"length": 11, "key_length": 13, "num_heads": 3, "batch": 2, "dim": 5}
    hidden_dim = 5 if score == "additive" else None
    return works.Work(score, score, **(sizes | {"hidden_dim": hidden_dim} | changes))


def prepared(peers, name, work):
    """A contestant; the test is skipped where its library is not installed."""
    from benchmarks.measure import INSTALL

    prepare = peers.ours if name == "ours" else peers.PEERS[name]
    try:
        return usual_promotion(lambda: prepare(work))
    except LookupError as error:
        if INSTALL in str(error):
            pytest.skip(str(error))
        raise


# With the gradients comes the output; one forward pass alone per library is enough.
CASES = [
    *(("ours", score, "") for score in ("additive", "own distance", "dot", "general", "scaled")),
    *(("naive JAX", score, "") for score in ("additive", "dot", "general", "scaled")),
    *(("jax.nn", score, "") for score in ("dot", "general", "scaled")),
    *(("PyTorch SDPA", score, "") for score in ("dot", "general", "scaled")),
    *((name, "scaled", "causal") for name in ("ours", "jax.nn", "flax", "PyTorch SDPA")),
    *((name, "scaled", "local 2") for name in ("ours", "jax.nn", "flax", "PyTorch SDPA")),
    ("naive JAX", "additive", "causal"),
    ("flax", "scaled", ""),
    ("Keras", "additive", ""),
    ("PyTorch naive", "additive", ""),
    ("ours, reference", "additive", "causal"),
]
FORWARD = {name: (name, *rest) for name, *rest in CASES}.values()


@pytest.mark.parametrize(
    ("name", "score", "mask", "backward"),
    [*((*case, True) for case in CASES), *((*case, False) for case in FORWARD)],
)
def test_contestants_compute_the_same(works, peers, name, score, mask, backward):
    work = small(works, score, mask=mask, backward=backward)
    contestant = prepared(peers, name, work)
    usual_promotion(lambda: check_contestant(work, contestant))


@pytest.mark.slow  # it compiles C++ for every formula
def test_keops_computes_the_same(works, peers):
    # One test: KeOps puts its build folder on sys.path once, and fixtures restore sys.path.
    for score in ("additive", "own distance", "scaled"):
        for backward in (False, True):
            work = small(works, score, batch=1, num_heads=1, backward=backward)
            contestant = prepared(peers, "KeOps", work)
            assert contestant.most_repeats == 1
            check_contestant(work, contestant)


@pytest.mark.parametrize(
    ("name", "score", "changes"),
    [
        ("jax.nn", "additive", {}),
        ("flax", "general", {}),
        ("Keras", "scaled", {}),
        ("naive JAX", "own distance", {}),
        ("cuDNN", "scaled", {}),
        ("ours", "scaled", {"implementation": "telepathy"}),
    ],
)
def test_an_unsupported_work_raises_lookup_error(works, peers, name, score, changes):
    with pytest.raises(LookupError, match=r"score|cuDNN|implementation"):
        prepared(peers, name, small(works, score, **changes))


def test_a_contestant_that_does_not_fit_in_memory_is_absent(works, peers, monkeypatch):
    from benchmarks import attention_contestant

    monkeypatch.setattr(attention_contestant, "free_bytes", lambda: 1000)
    with pytest.raises(LookupError, match=r"it needs .* GiB, and .* GiB are free"):
        prepared(peers, "naive JAX", small(works, "additive"))


def test_variations_of_ours_change_the_option_in_their_name(works, peers, monkeypatch):
    work = works.all_works()["causal-grad"]
    variations = []
    monkeypatch.setattr(peers, "ours", variations.append)
    for name in ("reference", "not causal", "scaled dot", "half as long"):
        peers.PEERS[f"ours, {name}"](work)
    assert variations == [
        dataclasses.replace(work, implementation="reference"),
        dataclasses.replace(work, mask=""),
        dataclasses.replace(work, score="scaled"),
        dataclasses.replace(work, length=2048),
    ]


# --- what is reported ---


def test_rows_follow_from_the_measurements(monkeypatch, capsys, tmp_path):
    results, printed = trial(monkeypatch, capsys, tmp_path, "scaled-grad")
    ours, *peers = results["attention"]["rows"]
    assert ours["contestant"] == "ours"
    assert [row["contestant"] for row in peers][:3] == ["naive JAX", "jax.nn", "flax"]
    assert ours["times_ours"] == 1
    for row in (ours, *peers[:3]):
        assert len(row["repeat_seconds"]) == 3
        median = sorted(row["repeat_seconds"])[1] / row["calls_in_a_repeat"]
        assert row["milliseconds"] == pytest.approx(1000 * median)
        assert row["times_ours"] == pytest.approx(row["milliseconds"] / ours["milliseconds"])
        assert row["temporary_mib"] > 0
        assert row["compile_seconds"] > 0
        assert row["shape"] == "B1 N4 T=S=16 D64"
        assert (row["score"], row["direction"]) == ("scaled", "forward + backward")
        assert (row["mask"], row["dtype"]) == ("none", "float32")
        assert row["contestant"] in printed
    assert results["attention"]["settings"]["shrink"] == 256
    assert results["attention-memory"]["rows"] == []
    by_number = {(row["claim"], row["what"]): row for row in results["attention-targets"]["rows"]}
    target = by_number["scaled dot forward + backward", "time of jax.nn / ours"]
    assert target["found"] == peers[1]["times_ours"]
    assert by_number["additive forward", "time of Keras / ours"]["met"] == "not measured"


def test_a_peer_that_is_not_installed_is_absent(monkeypatch, capsys, tmp_path):
    import_module = importlib.import_module

    def without_peers(name, package=None):
        if name in ("keras", "torch", "pykeops"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return import_module(name, package)

    monkeypatch.setattr(importlib, "import_module", without_peers)
    results, printed = trial(monkeypatch, capsys, tmp_path, "additive")
    rows = {row["contestant"]: row for row in results["attention"]["rows"]}
    assert rows["naive JAX"]["times_ours"] > 0
    for name in ("Keras", "PyTorch naive", "KeOps"):
        assert "milliseconds" not in rows[name]
        assert "install -e '.[bench]'" in rows[name]["absent"]
        assert f"{name}: absent" in printed
        assert f"{name} is absent (additive): No module named" in printed


@pytest.mark.slow
def test_memory_of_every_derivative_is_compiled(monkeypatch, capsys, tmp_path):
    results, printed = trial(monkeypatch, capsys, tmp_path, "memory-tiled-additive-*")
    rows = results["attention-memory"]["rows"]
    assert [row["direction"] for row in rows[::2]] == ["grad", "jvp", "jvp-of-grad", "grad-of-grad"]
    for shorter, longer in zip(rows[::2], rows[1::2], strict=True):
        assert (shorter["length"], longer["length"]) == (4096, 16384)
        hidden_dim = 128 if shorter["direction"] == "grad" else 64
        for row, length in ((shorter, 16), (longer, 64)):
            assert row["shape"] == f"B1 N1 T=S={length} D64 A{hidden_dim}"
        ratio = longer["temporary_mib"] / shorter["temporary_mib"]
        assert longer["times_shorter"] == pytest.approx(ratio)
    assert "jvp-of-grad" in printed


@pytest.mark.slow
def test_crossover_compares_tiled_with_reference(monkeypatch, capsys, tmp_path, path):
    from benchmarks import crossover

    monkeypatch.setattr(crossover, "_LENGTHS", (8, 16))
    monkeypatch.setattr(crossover, "_BATCHES", (1, 3))
    monkeypatch.setattr(crossover, "_MOST_PAIRS", 16**2)
    out = tmp_path / "results.json"
    options = ("--benchmarks", "crossover", "--repeats", 1, "--out", out)
    assert command(monkeypatch, *options) == 0
    rows = json.loads(out.read_text())["benchmarks"]["crossover"]["rows"]
    assert [row["pairs"] for row in rows] == [64, 256, 192] * 3
    for row in rows:
        ratio = row["reference_milliseconds"] / row["milliseconds"]
        assert row["times_ours"] == pytest.approx(ratio)
        assert row["implementation"] == "tiled"


def test_targets_are_met_or_not(path):
    from benchmarks.attention_targets import targets_met

    def timed(work, contestant, times, **more):
        return {"work": work, "contestant": contestant, "times_ours": times, **more}

    rows = [
        timed("scaled", "ours", 1.0, score="scaled", direction="forward", compile_seconds=99.0),
        timed("scaled", "jax.nn", 4.1, score="scaled", direction="forward", compile_seconds=99.0),
        timed("causal", "ours, not causal", 1.6, score="scaled", direction="forward"),
        {
            "work": "memory-tiled-scaled-grad",
            "implementation": "tiled",
            "score": "scaled",
            "direction": "grad",
            "length": 16384,
            "temporary_mib": 128.5,
            "times_shorter": 4.0,
            "compile_seconds": 14.0,
        },
        {
            "work": "memory-tiled-additive-grad-of-grad",
            "implementation": "tiled",
            "score": "additive",
            "direction": "grad-of-grad",
            "length": 16384,
            "temporary_mib": 286.2,
        },
    ]
    met = {(row["claim"], row["what"]): (row["found"], row["met"]) for row in targets_met(rows)}
    assert met["scaled dot forward", "time of jax.nn / ours"] == (4.1, "yes")
    assert met["scaled dot forward", "time of PyTorch SDPA / ours"] == (None, "not measured")
    assert met["causal forward", "our time / ours, not causal"] == (1 / 1.6, "no")
    claim = "scaled forward + backward, T=S=16384"
    assert met[claim, "temporary MiB"] == (128.5, "no")
    assert met[claim, "temporary memory / that of T=S=4096"] == (4.0, "yes")
    assert met["scaled forward + backward, any size", "compile seconds"] == (14.0, "yes")
    claim = "tiled, additive, grad-of-grad, T=S=16384"
    assert met[claim, "temporary MiB"] == (286.2, "no")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--works", "scaled", "adittive"], "got 'adittive'"),
        (["--implementation", "telepathy"], "got 'telepathy'"),
        (["--shrink", 0], "shrink must be at least 1; got 0"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(monkeypatch, capsys, arguments, message):
    assert command(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_every_target_reads_a_row_that_exists(works, monkeypatch):
    from benchmarks import attention_memory, attention_targets

    lookups = []
    monkeypatch.setattr(
        attention_targets, "_entry", lambda rows, entry, **where: lookups.append(where)
    )
    attention_targets.targets_met([])
    timed, compiled = works.all_works(), attention_memory.all_programs()
    assert len(lookups) >= 20
    for where in lookups:
        if "contestant" in where:
            assert where["contestant"] in timed[where["work"]].peers
        else:
            assert where["work"] in compiled
