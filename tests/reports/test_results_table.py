"""The table of runs: which settings are chosen, on which seeds, and text that a paper can take."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from toy_task import toy

from attention_jax.reports.results_table import ResultsTable
from attention_jax.reports.table_text import latex_text
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run_results import EvaluatedRun
from attention_jax.training.task import Result

TEXT = r"a|b_c\d %&#$~^}<i>*`[x]" + "\n"


def run(score, rate, match, loss=(1.0, 1.0, 1.0), *, step=8, folder="runs/a"):
    """A run of three seeds that was trained to `step` of 8."""
    task = Reversal()
    model = dataclasses.replace(task.model, score=score)
    train = dataclasses.replace(task.train, learning_rate=rate, steps=8, seeds=3)
    task = dataclasses.replace(task, model=model, train=train)
    results = {
        "exact match (%)": Result(match, True, 0.0, 100.0),
        "training loss": Result(loss, False),
    }
    return EvaluatedRun(Path(folder), task, step, results, 12.3, {})


@pytest.mark.parametrize(
    ("runs", "chosen"),
    [
        ([run("dot", 1, [50, 60, 99]), run("dot", 2, [60, 51, 0])], [1]),  # by the first two seeds
        ([run("dot", 1, [9, 9, 9], [3, 1, 0]), run("dot", 2, [9, 9, 9], [1, 1, 9])], [1]),
        ([run("dot", 1, [9, 9, 9]), run("dot", 2, [9, 9, 9])], [0]),
        ([run("dot", 1, [99, math.nan, 9]), run("dot", 2, [1, 1, 1])], [1]),
        ([run("dot", 1, [99, 99, 9], [1, math.inf, 1]), run("dot", 2, [1, 1, 1])], [1]),
        ([run("dot", 1, [9, 9, math.nan]), run("dot", 2, [1, 1, 1])], [0]),  # a reported seed
        ([run("dot", 1, [9, 9, 9], step=6), run("dot", 2, [1, 1, 1])], [1]),
        ([run("dot", 1, [math.nan] * 3), run("scaled", 1, [1, 1, 1])], [1]),
        ([run("dot", 1, [9, 9, 9]), run("scaled", 1, [1, 1, 1])], [0, 1]),  # one of each score
    ],
)
def test_the_best_run_of_each_score_is_chosen(runs, chosen):
    table = ResultsTable.of(runs, choose_on=2)
    assert [index for index, row in enumerate(table.rows) if row.chosen] == chosen
    for one, row in zip(runs, table.rows, strict=True):
        match = one.results["exact match (%)"].by_seed
        assert row.results["exact match (%)"].by_seed == match[2:]
    assert not any(row.chosen for row in ResultsTable.of(runs).rows)
    with pytest.raises(ValueError, match="choose_on must be from 0 to 2"):
        ResultsTable.of(runs, choose_on=3)


def test_a_model_of_a_users_own_may_have_no_score():
    result = {"training loss": Result([1.0, 2.0], False)}
    runs = [EvaluatedRun(None, toy(steps=n), n, result, 1.0, {}) for n in (4, 6)]
    assert [row.settings for row in ResultsTable.of(runs).rows] == [{"steps": 4}, {"steps": 6}]


def tables():
    """Tables with text of users, diverged seeds, a chosen and an unfinished run."""
    runs = [
        run("dot", 1e-3, [50.0, 60.0, 70.0], folder=TEXT),
        run("dot", 1e-3, [50.0, math.nan, 7.0], [1e-5, -2e-5, 3e-5]),
        run("scaled", 1e-3, [1.0, 2.0, 3.0], step=6),
    ]
    runs = [dataclasses.replace(each, results={TEXT: each.results["training loss"], **each.results})
            for each in runs]  # fmt: skip
    return ResultsTable.of(runs, choose_on=1), ResultsTable.of(runs)


def test_markdown_shows_the_cells():
    for table in tables():
        caption, _, *lines = table.markdown().splitlines()
        assert caption.startswith("reversal, 8 steps, n = ")
        cells = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in lines]
        bold = [False, *(row.chosen for row in table.rows)]
        texts = [table.head, *table.lines]
        for line, expected, is_bold in zip(cells[:1] + cells[2:], texts, bold, strict=True):
            assert [cell.startswith("**") for cell in line] == [is_bold] * len(line)
            shown = [re.sub(r"\*\*(.*)\*\*", r"\1", cell) for cell in line]
            assert [re.sub(r"\\(.)", r"\1", cell) for cell in shown] == [
                cell.replace("\n", r"\n") for cell in expected
            ]


def test_latex_has_balanced_groups_and_all_columns():
    for table in tables():
        text = table.latex()
        assert text.count(r"\textbf") == len(table.head) * sum(row.chosen for row in table.rows)
        bare = re.sub(r"\\[\\{}%&#$_]", lambda sign: "\n" if sign[0] == r"\\" else "", text)
        depth = 0
        for letter in bare:
            depth += (letter == "{") - (letter == "}")
            assert depth >= 0
        assert depth == 0
        assert bare.count("$") % 2 == 0
        (columns,) = re.findall(r"\\begin{tabular}{(\w+)}", text)
        rows = bare.partition(r"\hline")[2].count("&")
        assert columns == "l" + "r" * (len(table.head) - 1)
        assert rows == (len(table.rows) + 1) * (len(columns) - 1)
        assert not set(re.sub(r"\$[^$]*\$", "", bare)) & set("%#_~^<>|")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\b", r"a\textbackslash{}b"), ("a_b & 5 %", r"a\_b \& 5 \%"),
        ("2.5e-05 [-1, 3]", r"$2.5 \times 10^{-5}$ {[}$-1$, 3{]}"), ("x-1, v1e-5", "x-1, v1e-5"),
    ],
)  # fmt: skip
def test_latex_of_text(text, expected):
    assert latex_text(text) == expected
