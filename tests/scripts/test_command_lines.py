"""The command lines that read a run: evaluate.py and answers.py, and the experiment on top."""

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
import typing

import numpy as np
import pytest
from benchmarks.measure import Options
from command_line import ScoreNames, run_command
from command_lines import ROOT, call, load

from attention_jax.analysis.attention_page.page_data import decoded_numbers
from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.pages import cross_attention
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import load_run, train_run
from attention_jax.training.task import TrainConfig
from experiments import catalogue
from experiments.experiment import conduct

evaluate_script = load("scripts/evaluate.py")
answers_script = load("scripts/answers.py")
comparison = importlib.import_module("experiments.reversal.reversal_comparison")
padding_mask = importlib.import_module("experiments.reversal.padding_mask")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    task = Reversal(
        ModelConfig(
            score="general",
            dim=8,
            hidden_dim=12,
            encoder_layers=0,
            decoder_self_attention=False,
        ),
        TrainConfig(seeds=2, steps=4, log_every=2, checkpoint_every=2, batch_size=3),
    )
    train_run(task, folder)
    return folder


def test_evaluate_prints_a_row_per_result_and_writes_every_seed(
    workdir, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "numbers.json"
    arguments = ["--workdir", workdir, "--lengths", "3", "5", "--out", out]
    assert call(evaluate_script, *arguments, monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "general, softmax, positions sinusoidal, step 4, 2 seeds" in " ".join(printed.split())
    written = json.loads(out.read_text())
    names = ["exact match (%)", "exact match, length 3 (%)", "exact match, length 5 (%)"]
    assert list(written["results"]) == names
    assert written["steps"] == [4]
    for name, by_seed in written["results"].items():
        assert len(by_seed) == 2
        assert all(0 <= share <= 100 for share in by_seed)
        assert name in printed


def test_answers_are_printed_and_drawn(workdir, tmp_path, monkeypatch, capsys):
    figure = tmp_path / "new" / "figure.png"
    arguments = ["--inputs", "hello", "abc", "--workdir", workdir, "--figure", figure]
    assert call(answers_script, *arguments, monkeypatch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("hello -> ")
    assert "(right would be cba)" in lines[1]
    assert lines[2] == str(figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert call(answers_script, "--workdir", workdir, monkeypatch=monkeypatch) == 0
    assert (workdir / "figures" / "answers.png").exists()


def captures_of(page):
    (data,) = re.findall(r'id="data">(.*?)</script>', page.read_text())
    return json.loads(data)["captures"]


def test_answers_write_a_page_of_runs_side_by_side(workdir, tmp_path, monkeypatch, capsys):
    page, figure = tmp_path / "page.html", tmp_path / "figure.png"
    words = ["--inputs", "hello", "abc", "--workdir", workdir, "--figure", figure]
    options = ["--html", page, "--all-steps", "--compare", workdir]
    assert call(answers_script, *words, *options, monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == str(page)
    captures = captures_of(page)
    run = load_run(workdir)
    assert [(c["panel"], c["step"], c["example"]) for c in captures] == [
        (panel, step, word)
        for panel in (run.task.label, f"{run.task.label} ({workdir})")
        for step in ("0", "2", "4")
        for word in ("hello", "abc")
    ]
    (cross,) = captures[-1]["attentions"]  # the model has no other
    params = run.params_of(0)
    answers = run.task.answers(params, ["hello", "abc"])
    panels = cross_attention(run.task, params, answers.batch, answers.labels)
    weights, rows, columns = panels["abc"]
    assert cross["key_tokens"] == columns == ["SOS", "a", "b", "c"]
    assert cross["query_tokens"] == rows
    shown = decoded_numbers(cross["arrays"]["weights"])[0]
    np.testing.assert_allclose(shown, weights, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (evaluate_script, ["--workdir", "nowhere"], "nowhere has no config.json"),
        (
            evaluate_script,
            ["--workdir", "RUN", "--lengths", "0"],
            "lengths must be at least 1; got 0",
        ),
        (evaluate_script, ["--workdir", "RUN", "--average", "0"], "average must be at least 1"),
        (evaluate_script, ["--workdir", "RUN", "--out", "no/x"], "out must be a file in a folder"),
        (evaluate_script, ["--workdr", "RUN"], "--workdir"),
        (answers_script, ["--workdir", "RUN", "--inputs", "Hello"], "got 'H' in 'Hello'"),
        (answers_script, ["--workdir", "RUN", "--inputs", ""], "none of them empty"),
        (
            answers_script,
            ["--workdir", "RUN", "--seed-index", "2"],
            "seed_index must be from 0 to 1; got 2",
        ),
        (answers_script, ["--workdir", "nowhere"], "nowhere has no config.json"),
        (answers_script, ["--workdir", "RUN", "--figure", "a.jpg"], "ends in .png; got a.jpg"),
        (answers_script, ["--workdir", "RUN", "--html", "a.htm"], "ends in .html; got a.htm"),
        (answers_script, ["--workdir", "RUN", "--html", "no/a.html"], "folder that exists"),
        (answers_script, ["--workdir", "RUN", "--all-steps"], "belong to a page, html"),
        (evaluate_script, ["--workdir", "RUN", "--out", "RUN"], "out must be a file in a folder"),
        (comparison, ["--scores", "dot", "sclaed"], "did you mean 'scaled'?"),
        (comparison, ["--word", "Hello"], "got 'H' in 'Hello'"),
        (comparison, ["--strings", "0"], "strings must be at least 1; got 0"),
        (comparison, ["--results", __file__], "results must be a folder"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(
    module, arguments, message, workdir, monkeypatch, capsys
):
    arguments = [workdir if argument == "RUN" else argument for argument in arguments]
    assert call(module, *arguments, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_damaged_checkpoint_is_one_line(workdir, tmp_path, monkeypatch, capsys):
    damaged = tmp_path / "run"
    shutil.copytree(workdir, damaged)

    def damage(step):
        for path in (damaged / "checkpoints" / str(step)).rglob("_METADATA"):
            path.write_text("")

    damage(4)
    arguments = ("--workdir", damaged)
    assert not call(evaluate_script, *arguments, monkeypatch=monkeypatch)
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: the checkpoint of step 4 is damaged (")
    assert captured.err.endswith("; that of step 2 is used\n")
    assert "step 2, 2 seeds" in captured.out
    damage(2)
    assert call(evaluate_script, *arguments, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr().err
    assert f"error: no checkpoint in {damaged}/checkpoints can be used: step 4: " in printed
    assert "; step 2: " in printed


def test_a_value_error_from_elsewhere_keeps_its_traceback(monkeypatch):
    def main(_):  # stands where a user's score would fail
        int("three")

    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="invalid literal"):
        run_command(comparison.Config, main)


CHECKS = ("raise ValueError('sizes must agree')",)
CHECKS += (f"try: int('three')\n        except ValueError: {CHECKS[0]}",)
BUGS = ("list(zip([1], [], strict=True))", "[pair for pair in zip([1], [], strict=True)]")
BUGS += ("one, = 1, 2", "int('three')")


@pytest.mark.parametrize("statement", [*CHECKS, *BUGS])
@pytest.mark.parametrize("while_parsing", [False, True])
def test_a_check_is_one_line_and_a_builtins_error_in_our_code_is_ours(
    statement, while_parsing, monkeypatch, capsys
):
    source = f"def main(_):\n        {statement}\nclass Arguments:\n    pass"
    if while_parsing:
        source = f"class Arguments:\n    def __post_init__(self):\n        {statement}"
    names = {"__name__": __name__}
    exec(compile(source, ROOT / "attention_jax" / "a_file.py", "exec"), names)
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    expected = SystemExit if statement in CHECKS else ValueError
    with pytest.raises(expected) as raised:
        run_command(dataclasses.dataclass(names["Arguments"]), names.get("main"))
    if statement in CHECKS:
        assert raised.value.code == 2
        assert capsys.readouterr().err == "error: sizes must agree\n"


def small_comparison(tmp_path, **settings):
    config = dataclasses.replace(comparison.Config(), seeds=2, steps=2, strings=3, word="ab")
    return dataclasses.replace(config, workdir=tmp_path / "runs", **settings)


def numbers_in(folder, name="reversal_comparison"):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.slow
def test_comparison_writes_numbers_and_figures(tmp_path, capsys):
    config = small_comparison(tmp_path, scores=("dot",), near=(10,), far=(12,), far_strings=(2,))
    conduct(comparison, config, tmp_path)
    dot = numbers_in(tmp_path)["scores"]["dot"]
    exact = dot["accuracy"]["free_running_exact"]
    assert list(exact) == ["3", "4", "5", "6", "7", "8", "10", "12"]
    assert dot["column_labels"] == ["SOS", "a", "b"]
    assert all(len(by_seed) == 2 for by_seed in exact.values())
    for name in ("losses", "heatmaps", "accuracy"):
        figure = tmp_path / f"reversal_{name}.png"
        assert figure.read_bytes().startswith(b"\x89PNG")
    assert "| dot |" in capsys.readouterr().out
    # A run whose session was killed after its last checkpoint has no timing: said, not guessed.
    (config.workdir / "dot" / "timing.jsonl").unlink()
    conduct(comparison, config, tmp_path)
    assert numbers_in(tmp_path)["scores"]["dot"]["seconds"] is None
    assert "not known" in capsys.readouterr().out


def test_help_says_what_an_experiment_asks_and_how_long_it_takes():
    words = [sys.executable, "-m", "experiments.costs.complexity_ledger", "--help"]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    shown = " ".join(result.stdout.split())
    assert "What does each score cost in parameters, operations and memory" in shown
    assert "# 2 minutes on 2 CPU cores" in shown
    assert "--lengths" in shown


@pytest.mark.slow
def test_a_missing_mask_has_both_arms_and_trains_nothing_twice(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_scores.py").write_text(
        "from attention_jax.scores import Dot\n\n\nclass Own(Dot):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    scores = ["dot", "own_scores:Own"]
    config = dataclasses.replace(
        padding_mask.Config(), seeds=2, steps=2, strings=3, scores=tuple(scores),
        workdir=tmp_path / "runs",
    )  # fmt: skip
    conduct(padding_mask, config, tmp_path)
    numbers = numbers_in(tmp_path, "padding_mask")
    assert list(numbers["masked"]) == list(numbers["unmasked"]) == scores
    assert numbers["masked"]["own_scores:Own"] == numbers["masked"]["dot"]
    printed = capsys.readouterr().out
    assert "| model | dot | own_scores:Own |" in printed
    assert "own_scores:Own: exact match of lengths 3-8, worst seed" in printed
    assert "10" not in numbers["unmasked"]["dot"]["accuracy_padded"]["free_running_exact"]
    conduct(padding_mask, config, tmp_path)
    again = numbers_in(tmp_path, "padding_mask")
    for arm in ("masked", "unmasked"):
        assert again[arm] == numbers[arm]


def test_every_option_scores_says_that_scores_have_arguments(monkeypatch, capsys):
    classes = [catalogue.load(name).Config for name in catalogue.SUBJECT_OF]
    classes += [load("scripts/sweep.py").Arguments, Options]
    hints = [typing.get_type_hints(each, include_extras=True) for each in classes]
    of_scores = [hint["scores"] for hint in hints if "scores" in hint]
    assert len(of_scores) >= 15
    assert all(hint == ScoreNames for hint in of_scores)
    monkeypatch.setenv("COLUMNS", "300")
    assert call(comparison, "--help", monkeypatch=monkeypatch) == 0
    assert '"additive(hidden_dim=32)"; default: additive dot' in capsys.readouterr().out
