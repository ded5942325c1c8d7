"""The command scripts/benchmark.py: turns, noise, targets, tables; no test depends on a time."""

import itertools
import json
from pathlib import Path

import jax
import pytest
from command_lines import load

from benchmarks import alone, measure, tables, targets
from benchmarks.measure import Contestant, Race
from benchmarks.peers import PEERS
from benchmarks.works import WORKS

benchmark = load("scripts/benchmark.py")


@pytest.fixture(autouse=True)
def quick_turns(monkeypatch):
    """Turns of one call; shared programs."""
    monkeypatch.setattr(measure, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


# --- turns and noise ---


def test_contestants_take_turns_and_the_first_call_of_a_turn_does_not_count(monkeypatch):
    calls, now = [], [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure, "_TURN_SECONDS", 0.5)

    def contestant(name, seconds):
        def call():
            calls.append(name)
            now[0] += next(seconds)

        return call

    quick = itertools.chain([1.0], itertools.cycle([0.25, 0.125, 0.125]))
    turns = measure.interleaved(
        {"quick": contestant("quick", quick), "slow": contestant("slow", itertools.repeat(3.0))}, 4
    )
    quick, slow = ["quick"] * 3, ["slow"]
    assert calls == ["quick", *slow, *quick, *slow, *slow, *quick, *quick, *slow, *quick]
    assert turns == {"quick": [125.0] * 4, "slow": [3000.0] * 3}  # a slow one has three turns


def test_a_function_takes_as_long_as_itself_on_a_machine_that_slows_down(monkeypatch):
    now = [1.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def call():
        now[0] *= 1.05

    turns = measure.interleaved({"one": call, "same": call}, 8)
    low, median, high = measure.ratio(*({"turns": turns[name]} for name in ("same", "one")))
    assert median == pytest.approx(1, abs=0.01)
    assert low < 1 < high


def test_a_race_has_a_row_for_each_contestant(monkeypatch):
    turns = {"ours": [4.0, 2.0, 3.0], "peer": [8.0, 6.0, 6.0]}
    monkeypatch.setattr(measure, "interleaved", lambda *_: turns)

    def absent():
        raise LookupError("it is not installed")

    def fails():
        raise RuntimeError("no memory\nfor this")

    contestants = {
        name: lambda name=name: Contestant(lambda count: 1, {"about": name}) for name in turns
    }
    work = {"work": "w", "unit": "steps"}
    contestants |= {"none": absent, "failing": fails}
    ours, peer, none, failing = measure.run(Race(work, contestants, {"rate": 30}), 3)
    assert (ours["milliseconds"], ours["quartiles"]) == (3, [2.5, 3.5])
    assert ours["rate"] == 10_000
    assert peer["about"] == "peer"
    assert none["absent"] == "it is not installed"
    assert failing["error"] == "RuntimeError: no memory"
    assert measure.ratio(peer, ours) == (2.0, 2.0, 2.5)  # of 2, 3 and 2, turn by turn
    assert measure.ratio(peer, none) is None
    assert tables.table(tables.RACES, [ours, peer, none]).splitlines()[-1] == (
        "| w | - | ours: 3 (2.5-3.5) ms, 10,000 steps/s | peer 2 (2-2.5) |"
    )


@pytest.mark.parametrize(
    ("bound", "measured", "verdict"),
    [
        ("at least", (4.1, 4.2, 4.3), "yes"),
        ("at least", (3.9, 4.2, 4.3), "yes, within noise"),
        ("at least", (3.7, 3.9, 4.1), "MISS, within noise"),
        ("at least", (3.7, 3.8, 3.9), "MISS"),
        ("at least", (4.0, 4.0, 4.0), "yes"),
        ("at most", (3.7, 3.8, 4.1), "yes, within noise"),
        ("at most", (4.1, 4.2, 4.3), "MISS"),
    ],
)
def test_a_target_is_not_finer_than_the_noise(bound, measured, verdict):
    assert targets.judged("w", "peer / ours", f"{bound} 4", *measured)["met"] == verdict


def test_targets_are_computed_from_rows():
    def row(work, contestant, **entries):
        return {"work": work, "contestant": contestant, **entries}

    grad = {"score": "scaled", "direction": "forward + backward"}
    shorter = "ours, a quarter as long"
    rows = [
        row("scaled", "ours", turns=[1.0, 1.0, 1.0]),
        row("scaled", "jax.nn", turns=[3.0, 4.1, 5.0]),
        row("entmax", "ours", temporary_mib=33.0, compile_seconds=2.0, **grad),
        row("entmax", "ours, softmax", temporary_mib=99.0, compile_seconds=99.0, **grad),
        row("small-scaled", "ours", compile_seconds=13.0, **grad),
        row("memory-scaled-grad", shorter, temporary_mib=32.125, **grad),
        row("memory-scaled-grad", "ours", temporary_mib=128.5, **grad),
    ]
    found = targets.targets_of("attention", rows) + targets.targets_of("attention_memory", rows)
    found = {(row["claim"], row["what"]): row for row in found}
    verdicts = {case: (row["found"], row["met"]) for case, row in found.items()}
    memory = "temporary memory / that of a quarter of the length"
    assert verdicts == {
        ("scaled", "time of jax.nn / ours"): (4.1, "yes, within noise"),
        ("scaled", "time of PyTorch SDPA / ours"): (None, "not measured"),
        ("small-scaled", "time of ours / ours, reference"): (None, "not measured"),
        ("entmax", "time of ours / ours, softmax"): (None, "not measured"),
        ("entmax", "temporary MiB"): (33.0, "MISS"),
        ("memory-scaled-grad", "temporary MiB"): (128.5, "MISS"),
        ("memory-scaled-grad", memory): (4.0, "yes"),
        ("scaled, forward + backward", "seconds to compile, the longest"): (13.0, "yes"),
    }
    assert found["scaled", "time of jax.nn / ours"]["quartiles"] == [3.55, 4.55]


def test_every_target_reads_a_case_that_exists():
    directions = {f"{work.score}, {work.direction}" for work in WORKS["attention"]}
    for name in targets.TARGETS.keys() & benchmark.CASES.keys():
        cases = benchmark.CASES[name](benchmark.Arguments(shrink=64))
        for case, numbers in targets.TARGETS[name].items():
            assert case in {*cases, *directions}
            for number in numbers:
                if " / " in number:
                    assert {*number.split(" / ")} <= {*cases[case].contestants}


# --- the command ---


def test_benchmarks_from_end_to_end(monkeypatch, command, tmp_path):
    monkeypatch.setitem(PEERS, "PyTorch SDPA", lambda work: measure.import_peer("no_such_module"))
    out = tmp_path / "results.json"
    words = ("--benchmarks", "attention", "local", "--shrink", 512, "--repeats", 3, "--out", out)
    chosen = ("--works", "bfloat16", "memory-scaled-jvp", "local-m")
    status, printed, _ = command("benchmark", *words, *chosen)
    content = json.loads(out.read_text())
    assert status == 0
    assert content["command"].startswith("python scripts/benchmark.py --benchmarks")
    assert len(content["environment"]["sources"]) == 64
    reports = {name: report["rows"] for name, report in content["benchmarks"].items()}
    ours, jax_nn, absent = reports["attention"]
    assert ours["what"] == "forward, B1 N4 T=S=8 D64, bfloat16"
    assert len(ours["turns"]) == len(jax_nn["turns"]) == 3
    assert ours["compile_seconds"] > 0
    assert "install -e '.[bench]'" in absent["absent"]
    shorter, longer = reports["attention_memory"]
    assert [row["contestant"] for row in (shorter, longer)] == ["ours, a quarter as long", "ours"]
    assert 0 < shorter["temporary_mib"] < longer["temporary_mib"]
    assert [row["contestant"] for row in reports["local"]] == ["local", "global"]
    cases = ["memory-scaled-jvp", "local-m"]
    assert {row["claim"] for row in reports["targets"]} <= {*cases}
    assert "| bfloat16 | forward, B1 N4" in printed


@pytest.mark.slow  # these compile training steps and programs for many devices
@pytest.mark.parametrize("name", ["decoding", "reversal", "translation", "ring"])
def test_other_benchmarks_from_end_to_end(command, name):
    words = ("--benchmarks", name, "--shrink", 512, "--repeats", 1, "--scores", "dot", "scaled")
    status, printed, _ = command("benchmark", *words)
    assert (status, printed.count("\n| ") > 3) == (0, True)


def test_contestants_alone_take_turns(monkeypatch, tmp_path, capsys):
    calls = []

    def one(name, contestant, arguments, python, folder):
        calls.append(contestant)
        return [{"milliseconds": 8.0 if contestant == "ours" else 2.0, "cores": 1.5}]

    monkeypatch.setattr(alone, "_one", one)
    monkeypatch.setattr(alone.jax, "__version__", "0.12.0.1")
    out = tmp_path / "alone.json"
    alone.main(alone.Arguments(("scaled",), before=Path(__file__).parents[2], repeats=2, out=out))
    assert calls == ["ours", "ours, before", "ours, before", "ours"]
    reports = json.loads(out.read_text())["benchmarks"]
    assert [row["milliseconds"] for row in reports["alone"]["rows"]] == [8.0, 2.0]
    met = {row["what"]: row["met"] for row in reports["alone-targets"]["rows"]}
    assert met["time of ours / ours, before"] == "MISS"
    assert "| 1.50 |" in capsys.readouterr().out
