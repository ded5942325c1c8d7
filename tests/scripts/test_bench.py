"""scripts/bench.py: a score's rows stand beside the committed ones; wrong words are one line."""

import csv
import dataclasses
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import call, load

from attention_jax.training.task import Result, TrainConfig
from experiments import lab
from experiments.bench import learning, relations, training

bench = load("scripts/bench.py")
MINE = """
import jax.numpy as jnp

def Mine(q, k):
    return -jnp.abs(q[:, None] - k[None]).sum(-1)
"""
WITH_INIT = """
import jax.numpy as jnp
from attention_jax import Score

class Mine(Score):
    def init(self, rng, query_dim, key_dim):
        return {"width": jnp.ones(())}

    def pair(self, params, q, k):
        return params["width"] * (q @ k.T)
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs scripts/bench.py in a folder with a user's score: (exit status, output, error)."""
    (tmp_path / "mine_to_bench.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = call(bench, *arguments, monkeypatch=monkeypatch)
        return status, *capsys.readouterr()

    return run


def test_a_users_score_has_a_row_beside_the_committed_ones(run, monkeypatch):
    asked = []

    def measured(config):
        asked.append(config)
        row = {"right": [1.0, 0.99], "rate": 0.01, "factor": 1.0, "loss": 0.1, "base": 0}
        row |= {"parameters": 160, "interior": True, "validation": [[1.0]]}
        names = relations.RELATIONS
        return [{**row, "score": s, "relation": name} for s in config.scores for name in names]

    monkeypatch.setattr(relations, "run", measured)
    status, out, _ = run("--score", "mine_to_bench:Mine", "--tasks", "relations")
    assert status == 0
    assert asked[0].scores == ("mine_to_bench:Mine",)
    rows = _table()
    assert rows[1] == ["mine_to_bench:Mine", str(len(relations.RELATIONS))]
    others = {row["score"] for row in lab.content_of("relations")["rows"]}
    assert {row[0] for row in rows[2:]} == others
    assert "mine_to_bench:Mine" in out
    assert "data:image/png" in Path("runs/bench/bench.html").read_text()


def test_quick_measures_scaled_dot_as_quickly(run, monkeypatch):
    monkeypatch.setattr(learning, "run", lambda config: [_row(s, "recall") for s in config.scores])
    status, _, _ = run("--score", "dot", "--tasks", "recall", "--quick")
    rows = _table()
    assert status == 0
    assert [row[0] for row in rows[1:3]] == ["dot (quick)", "scaled (quick)"]
    assert {row["score"] for row in lab.content_of("learning")["rows"]} == {r[0] for r in rows[3:]}


def test_an_edited_score_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file, kept = tmp_path / "edited_to_bench.py", tmp_path / "kept.json"

    def rows(text, found):
        file.write_text(text)
        sys.modules.pop("edited_to_bench", None)
        importlib.invalidate_caches()
        program = lab.program_of("edited_to_bench:Mine", 16)
        return lab.kept_rows(kept, program, lambda: [{"found": found}])

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rows(MINE, 1) == [{"found": 1}]
    assert rows(MINE, 2) == [{"found": 1}]
    assert rows(MINE.replace("-jnp", "-2 * jnp"), 3) == [{"found": 3}]
    assert rows(WITH_INIT, 4) == [{"found": 4}]
    assert rows(WITH_INIT.replace("ones", "zeros"), 5) == [{"found": 5}]
    assert lab.program_of("dot", 16) != lab.program_of("scaled", 16)
    kept.write_text("{")
    with pytest.raises(ValueError, match=r"kept\.json is damaged"):
        rows(MINE, 6)


def test_parts_share_the_files_of_cells(tmp_path):
    def run(part):
        cells = [(tmp_path / f"{name}.json", name) for name in "abcde"]
        measured = [lab.kept_rows(path, {}, lambda n=name: [n + part]) for path, name in cells]
        return [row for rows in measured for row in rows]

    experiment = SimpleNamespace(run=run, __file__="cells.py")
    assert lab.rows_of(experiment, "2", "2/2") == (["b2", "d2"], 3)
    assert lab.rows_of(experiment, "1", "1/2") == (["a1", "b2", "c1", "d2", "e1"], 0)
    with pytest.raises(ValueError, match="part must be I/N"):
        lab.rows_of(experiment, "0", "3/2")
    assert lab.rows_of(experiment, "0", None) == lab.rows_of(experiment, "3", "3/3")


class Trained(NamedTuple):
    params: Any


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A task whose loss is (factor - seed)^2 + (rate - seed)^2."""

    name: ClassVar[str] = "chosen"
    train: TrainConfig = TrainConfig(seeds=2, steps=40)

    def evaluate(self, params):
        return {"loss": Result(params["params"]["factor"].tolist(), False)}


def test_one_more_seed_chooses_factor_and_rate_for_all(monkeypatch):
    def initial_state(task):
        seeds = jnp.arange(task.train.seeds, dtype=jnp.float32)
        return Trained({"seed": seeds, "params": {"factor": jnp.ones_like(seeds)}})

    def train_steps(task, steps, state):
        assert steps == 2
        seed, factor = state.params["seed"], state.params["params"]["factor"]
        return state, {"loss": (factor - seed) ** 2 + (task.rate - seed) ** 2}

    def at_rate(task, rate):
        return SimpleNamespace(train=task.train, rate=rate)

    for function in (initial_state, train_steps):
        monkeypatch.setattr(training, function.__name__, function)
    monkeypatch.setattr(training, "AtRate", at_rate)
    row = training.learned(Chosen(), (0.0, 1.0, 2.0), (0.0, 1.0, 2.0))
    assert (row["factor"], row["rate"], row["by_seed"]) == (2.0, 2.0, [2.0, 2.0])
    # The middle rate for each factor, then each rate for the best of them.
    assert row["trials"] == [[0, 1, 5], [1, 1, 2], [2, 1, 1], [2, 0, 4], [2, 2, 0]]
    assert np.all(np.array(row["curve"]) == [8, 2])  # of the seeds 0 and 1


def _table():
    return [*csv.reader(Path("runs/bench/bench.csv").read_text().splitlines())]


def _row(score, task):
    curve = [[0.1 * i, 0.1 * i] for i in range(training.LOOKS)]
    row = {"metric": "accuracy (%)", "larger_is_better": True, "by_seed": [90.0, 80.0]}
    row |= {"factor": 1.0, "rate": 0.01, "every": 5, "curve_of": "accuracy", "curve": curve}
    return {**row, "score": score, "task": task}
