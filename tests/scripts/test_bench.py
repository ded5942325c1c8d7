"""scripts/bench.py: a score's rows stand beside the committed ones; wrong words are one line."""

import csv
import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_lines import call, load

from experiments import lab
from experiments.bench import cost, maps, relations, summary

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
SCORE = "mine_to_bench:Mine"


def relation_rows(scores):
    row = {"base": 0, "rate": 0.01, "factor": 1.0, "loss": 0.1, "parameters": 160}
    row |= {"interior": True, "validation": [[0.5, 0.95, 0.5]] * 3}
    right = {name: [1.0, 0.99] if name == "inner" else [0.2, 0.3] for name in relations.RELATIONS}
    return [
        {**row, "score": score, "relation": name, "right": right[name]}
        for score in scores
        for name in relations.RELATIONS
    ]


def map_rows(scores, seeds=2, task="recall"):
    row = {"kind": "map", "task": task, "rate": 0.003, "own": 0.9, "parameters": 66498}
    row |= {"deviations": [0.25, 1.0, 0.9], "accuracy": [0.95, 0.8, 0.8], "steps": 600}
    solved = [[250] * seeds, [300, *[None] * (seeds - 1)], [None] * seeds]
    return [{**row, "score": score, "solved": solved, "device": "chip"} for score in scores]


def rows_of_tests(scores):
    row = {"kind": "test", "task": "recall", "rate": 0.003, "own": 0.9, "parameters": 66498}
    row |= {"deviations": [0.25], "accuracy": [0.97], "steps": 2400, "device": "H100"}
    return [{**row, "score": score, "solved": [[400, 200, None]]} for score in scores]


def cost_rows(scores):
    row = {"over": [1.1, 1.2, 1.3], "again": [0.99, 1.0, 1.01], "steady": True, "turns": 6}
    return [{**row, "score": score, "milliseconds": 2.0, "device": "chip"} for score in scores]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs scripts/bench.py in a folder with a user's score: (exit status, output, error).

    The experiments measure nothing; the committed rows are those of scaled and additive.
    """
    (tmp_path / "mine_to_bench.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    committed = "scaled", "additive"
    rows = {
        "relations": relation_rows(committed),
        "maps": map_rows([*committed, "experiments.bench.controls:Features"], 3)
        + rows_of_tests(committed)
        + map_rows(committed, task="selective_copy"),
        "cost": cost_rows(committed),
    }
    monkeypatch.setattr(lab, "content_of", lambda name: {"rows": rows[name]})
    measure = {relations: relation_rows, maps: map_rows, cost: cost_rows}
    for experiment, rows_of in measure.items():
        monkeypatch.setattr(experiment, "run", lambda config, of=rows_of: of(config.scores))

    def run(*arguments):
        status = call(bench, *arguments, monkeypatch=monkeypatch)
        return status, *capsys.readouterr()

    return run


def test_a_users_score_has_a_line_beside_the_committed_ones(run):
    status, out, _ = run("--score", SCORE)
    assert status == 0
    _, mine, *others = _table()
    assert mine == [
        *(SCORE, "1", "never (0 of 2)", "0.25; 0.003", "250 (2 of 2)"),
        *("1.20 (1.10 to 1.30)", "66,498", "chip"),
    ]
    assert [line[0] for line in others] == ["scaled", "additive"]
    assert others[0][2:5] == ["never (0 of 3)", "0.25; 0.003", "400 (2 of 3)"]  # those of the test
    assert others[0][-1] == "chip, H100"
    assert SCORE in out
    page = Path("runs/bench/bench.html").read_text()
    assert page.count("data:image/png") == 2  # relations and maps


def test_a_score_that_solved_nothing_has_no_best_cell(run, monkeypatch):
    (row,) = map_rows([SCORE])
    never = {**row, "solved": [[None, None]] * 3}
    monkeypatch.setattr(maps, "run", lambda config: [never])
    assert run("--score", SCORE, "--tasks", "recall")[0] == 0
    assert _table()[1][1:4] == ["never (0 of 2)", "none", "never (0 of 2)"]
    # The seeds of the test have more steps, and the score's own constant is no cell.
    test = {**rows_of_tests([SCORE])[0], "solved": [[None, None, 1900]]}
    own = {**row, "solved": [*[[None, None]] * 2, [500, None]]}
    for rows, cells in (
        ([never, test], ["never (0 of 2)", "0.25; 0.003", "never (1 of 3)"]),
        ([own], ["never (1 of 2)", "none", "never (0 of 2)"]),
    ):
        assert summary.summary(relation_rows([SCORE])[:1], rows, [])[1][0][2:5] == cells


def test_each_task_has_a_figure_of_its_maps(run, monkeypatch):
    def measured(config):
        return [row for task in config.tasks for row in map_rows(config.scores, task=task)]

    monkeypatch.setattr(maps, "run", measured)
    assert run("--score", SCORE, "--tasks", "selective_copy", "recall")[0] == 0
    page = Path("runs/bench/bench.html").read_text()
    assert page.count("data:image/png") == 2
    assert ["recall: Share" in page, "selective_copy: Share" in page] == [True, True]


def test_only_what_is_asked_for_is_in_the_table(run):
    assert run("--score", SCORE, "--tasks", "cost")[0] == 0
    head, _, *others = _table()
    assert head == ["score", "time of a step / scaled dot's (95 % interval)", "device"]
    assert [line[0] for line in others] == ["scaled", "additive"]


def test_quick_measures_scaled_dot_as_quickly(run, monkeypatch):
    asked = []
    monkeypatch.setattr(maps, "run", lambda config: asked.append(config) or map_rows(config.scores))
    status, out, _ = run("--score", "dot", "--quick")
    assert status == 0
    assert "small settings" in out
    assert [line[0] for line in _table()[1:]] == [
        "dot (quick)",
        "scaled (quick)",
        "scaled",
        "additive",
    ]
    (config,) = asked
    whole = bench.Arguments(("dot",)).works()[-1].config
    assert (config.rates, len(config.deviations), config.seeds, config.tests) == ((3e-3,), 4, 2, 0)
    assert (whole.rates, whole.deviations) == (maps.Config().rates, maps.Config().deviations)
    assert whole.at_fast == ("dot",)
    assert (whole.tasks, whole.seeds, whole.tests) == (("recall",), 4, 10)
    assert (whole.extra, whole.fresh, whole.slow, whole.widths) == ((), ("own",), (), ())
    twice = bench.Arguments(("dot",), tasks=("selective_copy", "selective_copy")).works()
    assert [work.config.tasks for work in twice] == [("selective_copy",)]
    assert config.workdir != whole.workdir  # neither replaces what the other has measured


def test_progress_is_over_the_whole_and_knows_the_time_left(run, monkeypatch, tmp_path):
    def measured(config):
        cells = [(tmp_path / f"{score}.json", score) for score in config.scores]
        return [row for path, s in cells for row in lab.kept_rows(path, s, lambda s=s: [s])]

    monkeypatch.setattr(relations, "run", lambda c: measured(c) and relation_rows(c.scores))
    monkeypatch.setattr(cost, "run", lambda c: measured(c) and cost_rows(c.scores))
    monkeypatch.setattr(lab.time, "monotonic", iter(range(0, 10_000, 60)).__next__)  # 1 minute each
    _, _, err = run("--score", "dot", "general", "--tasks", "relations", "cost")
    lines = [line for line in err.splitlines() if " cells: " in line]
    assert lines == [
        "1 of 4 cells: relations, dot; 1.0 min, about 2 left",
        "2 of 4 cells: relations, general; 2.0 min, about 1 left",
        "3 of 4 cells: cost, dot; 3.0 min, about 0 left",
        "4 of 4 cells: cost, general; 4.0 min, about 0 left",
    ]


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """A function that writes the module of the score "edited_to_bench:Mine"."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text):
        (tmp_path / "edited_to_bench.py").write_text(text)
        sys.modules.pop("edited_to_bench", None)
        importlib.invalidate_caches()

    return write


def test_an_edited_score_is_measured_again(edit, tmp_path):
    kept = tmp_path / "kept.json"

    def rows(text, found):
        edit(text)
        program = lab.program_of("edited_to_bench:Mine", 16)
        return lab.kept_rows(kept, program, lambda: [{"found": found}])

    assert rows(MINE, 1) == [{"found": 1}]
    assert rows(MINE, 2) == [{"found": 1}]
    assert rows(MINE.replace("-jnp", "-2 * jnp"), 3) == [{"found": 3}]
    assert rows(WITH_INIT, 4) == [{"found": 4}]
    assert rows(WITH_INIT.replace("ones", "zeros"), 5) == [{"found": 5}]
    assert lab.program_of("dot", 16) != lab.program_of("scaled", 16)
    kept.write_text("{")
    with pytest.raises(ValueError, match=r"kept\.json is damaged"):
        rows(MINE, 6)


FEW = {"tasks": ("recall",)} | dict.fromkeys(("extra", "at_fast", "slow", "widths", "fresh"), ())


def test_the_maps_of_an_edited_score_and_its_cost_are_measured_again(edit, tmp_path, monkeypatch):
    score, counts = "edited_to_bench:Mine", itertools.count(1)

    def measured(*arguments):
        return [{"count": next(counts)}]

    def rows(text):
        edit(text)
        options = {"rates": (3e-3,), "tests": 0, "workdir": tmp_path / "maps"}
        of_maps = maps.run(maps.Config((score,), **options, **FEW))
        return of_maps + cost.run(cost.Config((score,), workdir=tmp_path / "cost"))

    for experiment in (maps, cost):
        monkeypatch.setattr(experiment, "_measured", measured)
    assert rows(MINE) == rows(MINE) == [{"count": 1}, {"count": 2}]
    assert rows(WITH_INIT) == [{"count": 3}, {"count": 4}]
    assert rows(WITH_INIT.replace("ones", "zeros")) == [{"count": 5}, {"count": 6}]


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


def test_a_group_of_cells_belongs_to_one_part(tmp_path, monkeypatch):
    monkeypatch.setattr(maps, "_measured", lambda config, cells, rows: [{"rows": len(rows)}])
    monkeypatch.setattr(maps, "_known_by", lambda config, cells, rows: [cells, len(rows)])
    options = {"rates": (3e-3, 1e-3), "workdir": tmp_path}
    config = maps.Config(("l2", "general", "cosine"), **options, **FEW)
    group = [{"rows": 0}, {"rows": 1}, {"rows": 2}]  # two maps, and the test of their best cell
    assert lab.rows_of(maps, config, "2/3") == (group, 6)
    assert {path.name.partition(",")[0] for path in tmp_path.iterdir()} == {"general"}
    assert lab.rows_of(maps, config, "1/3") == (group * 2, 3)
    assert lab.rows_of(maps, config, "3/3") == (group * 3, 0)


def _table():
    return [*csv.reader(Path("runs/bench/bench.csv").read_text().splitlines())]
