"""What all command lines share; train.py; and evaluate.py and answers.py, which read a run."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import pytest
from command_lines import check_error, load
from html_reader import decoded_numbers
from stand_in_training import run_of_two_seeds

from attention_jax.commands import command_line
from attention_jax.commands.command_line import run_command
from attention_jax.runs.progress import say
from attention_jax.tasks.evaluation import Accuracies
from attention_jax.tasks.pages import cross_attention
from attention_jax.training import run as training
from attention_jax.training.identity import task_in

# --- a wrong word ---


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A command.

    Attributes:
        workdir: the folder of a run.
        dim: a size.
    """

    workdir: Path
    dim: int = 64
    rate: float = 1.0
    step: Literal["newest", "best"] | int = "newest"
    lengths: tuple[int, ...] = (3,)
    mask: bool = True
    schedule: Literal["cosine", "constant"] = "cosine"

    def __post_init__(self):
        if self.dim == 10:
            print("from a module of the user", file=sys.stderr)


class Terminal(io.TextIOWrapper):
    """Standard output; tyro uses colours on it where the variable TERM names a terminal."""

    def isatty(self):
        return True


@pytest.fixture(params=["utf-8", "ascii"])  # tyro draws other boxes with other encodings
def run(request, monkeypatch, capsys):
    def of_words(*words, term="xterm"):
        out = Terminal(io.BytesIO(), encoding=request.param)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as exited:
            run_command(Arguments, lambda arguments: print(arguments.dim))
        assert os.environ["COLUMNS"] == "40"  # messages are whole on a wider terminal
        out.seek(0)
        return exited.value.code or 0, out.read(), capsys.readouterr().err

    return of_words


LONG = "/a/rather/long/folder" * 8


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--dim", "wide"], ["--dim", "INT", "'wide'"]),
        (["--dim", LONG], ["--dim", "INT", LONG]),
        (["--step", "old"], ["--step", "newest", "best", "INT", "'old'"]),
        (["--lengths", "3", "b"], ["--lengths", "INT", "'b'"]),
        (["--schedule", "up"], ["--schedule", "cosine", "constant", "'up'"]),
        (["--dim"], ["--dim"]),
        (["--dimm", "8"], ["--dimm", "--dim INT"]),
        (["--bogus", "8", "--zzz=3"], ["--bogus", "--zzz"]),
        (["--dim", "4", "6"], ["6"]),
        (["--mask", "yes"], ["yes"]),
    ],
)
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_wrong_word_is_one_line_that_names_it(run, words, named, term):
    status, out, err = run("--workdir", "run", *words, term=term)
    check_error((status, out, err), *named)
    assert not re.search("[\x1b─│]|---", err)


def test_an_option_that_must_be_given(run):
    for words in ([], ["--workdr", "run"]):
        check_error(run(*words), "--workdir PATH", *words[:1])


def test_good_words_and_help(run, monkeypatch):
    assert run("--workdir", "run", "--dim", "6") == (0, "6\n", "")
    status, out, err = run("--help", term="dumb")
    assert (status, err) == (0, "")
    assert "--workdir PATH" in out
    assert max(map(len, out.splitlines())) <= 40
    assert run("--workdir", "run", "--dim", "10") == (0, "10\n", "from a module of the user\n")


def test_help_has_sections_and_formulas_on_lines_of_their_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    command = "Command:  python  -m a.b.c.d.e"
    text = f"Why?\n\nAnswer:   so,\n    and not so.\n{command}\n\n    f(x) =\n\nEnd"
    lines = ["Why?", "", "Answer: so, and not", "so.", command, "", "    f(x) =", "", "End", ""]
    assert command_line.wrapped(text).split("\n") == lines


def test_a_module_is_named_as_it_is_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["a/b.py", "--dim", "3"])
    assert command_line.command() == f"python {Path('a/b.py')} --dim 3"
    started = types.SimpleNamespace(name="a.b", origin="a/b.py")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", started)
    assert command_line.command() == "python -m a.b --dim 3"


def test_cells_of_a_table_are_no_markup(capsys):
    texts = ["[v1] :key:", "[/x]", ":key:", "runs/[v1]", "[red]3"]
    command_line.print_table(texts[0], texts[1:3], [texts[3:]])
    printed = capsys.readouterr().out
    assert all(text in printed for text in texts)


def test_a_table_in_a_file_of_windows_has_no_question_marks(monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", file)
    command_line.print_table("mean ± deviation", ["score", "loss"], [["dot", "1 ± 2"]])
    printed = file.buffer.getvalue().decode("cp1252")
    assert "1 ± 2" in printed
    assert "?" not in printed


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (
            OSError(28, "No space left"),
            2,
            "error: standard output cannot be written: No space left\n",
        ),
    ],
)
@pytest.mark.parametrize("words", [["--workdir", "run"], ["--help"]])
def test_a_closed_or_full_output_is_a_status_and_one_line(
    monkeypatch, capsys, words, error, status, line
):
    class Full(io.StringIO):
        def write(self, text):
            raise error

    done = []
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as exited:
        run_command(Arguments, lambda arguments: done.extend((say("first"), say("second"))))
    assert (exited.value.code, capsys.readouterr().err) == (status, line)
    assert len(done) == 2 or words == ["--help"]


# --- mistakes of the user, and of ours ---

CHECKS = ["raise ValueError('sizes must agree')"]
CHECKS += [f"try:\n            int('three')\n        except ValueError:\n            {CHECKS[0]}"]
BUGS = ["list(zip([1], [], strict=True))", "one, = 1, 2", "int('three')"]


@pytest.mark.parametrize("statement", [*CHECKS, *BUGS])
@pytest.mark.parametrize("while_parsing", [False, True])
def test_a_check_is_one_line_and_a_builtins_error_in_our_code_keeps_its_traceback(
    statement, while_parsing, monkeypatch, capsys, tmp_path
):
    source = f"def main(_):\n        {statement}\nclass Arguments:\n    pass"
    if while_parsing:
        source = f"class Arguments:\n    def __post_init__(self):\n        {statement}"
    (tmp_path / "ours.py").write_text(source)
    names = {"__name__": __name__}
    exec(compile(source, tmp_path / "ours.py", "exec"), names)
    monkeypatch.setattr(command_line, "_PROJECT", (tmp_path,))
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    expected = SystemExit if statement in CHECKS else ValueError
    with pytest.raises(expected) as raised:
        run_command(dataclasses.dataclass(names["Arguments"]), names.get("main"))
    if statement in CHECKS:
        assert raised.value.code == 2
        assert capsys.readouterr().err == "error: sizes must agree\n"


# --- train.py ---


def test_ctrl_c_before_training(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "prepare", mock.Mock(side_effect=KeyboardInterrupt))
    words = ("--log-gradients", "--clip-norm", "inf", "--no-mask-padding")
    assert command("train", "--workdir", "run", *words) == (130, "", "")
    task, options = training.prepare.call_args.args[0], training.prepare.call_args.kwargs
    assert (options["log_gradients"], task.train.clip_norm) == (100, math.inf)
    assert not task.model.mask_padding


@pytest.mark.parametrize(
    ("step", "status", "messages"),
    [
        (6, 143, ["stopped by a signal; --resume goes on from here"]),
        (10, 0, []),  # the signal came while the last step was saved
    ],
)
def test_sigterm_during_training(command, monkeypatch, tmp_path, step, status, messages):
    monkeypatch.chdir(tmp_path)

    def run(prepared, **_):
        return training.TrainedRun(prepared.task, {}, step, seconds=3.0, interrupted=143)

    monkeypatch.setattr(training, "run", run)
    arguments = ["--workdir", "run", "--seeds", 2, "--steps", 10, "--log-every", 1]
    found = command("train", *arguments, "--checkpoint-every", 1)
    assert found[:1] == (status,)
    summary = f"run: step {step} of 10, 2 seeds, 3 s (all seeds together)"
    after_the_table = "".join(found[1:]).partition("data=1\n")[2]
    assert " ".join(after_the_table.split()) == " ".join([summary, *messages])


# --- commands that read a run ---


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return shutil.copytree(run_of_two_seeds(), tmp_path_factory.mktemp("run") / "run")


def test_evaluate_prints_a_row_per_result_and_writes_every_seed(
    workdir, tmp_path, command, monkeypatch
):
    """tasks/test_sequences.py has the accuracies of a model."""
    out, found = tmp_path / "numbers.json", Accuracies(*[np.array([0.25, 0.75])] * 3)
    monkeypatch.setattr(
        "attention_jax.tasks.sequences.accuracies",
        lambda task, params, lengths: dict.fromkeys(lengths, found),
    )
    words = ["--workdir", workdir, "--lengths", 3, "--out", out]
    status, printed, _ = command("evaluate", *words)
    written = json.loads(out.read_text())
    names = ["exact match (%)", "exact match, length 3 (%)"]
    assert (status, list(written["results"]), written["step"]) == (0, names, 6)
    for name, by_seed in written["results"].items():
        assert by_seed == [25, 75]
        assert name in printed
    assert printed.count("50 [0, 100] (25)") == 2


LONG_WORD = "attention"  # longer than max_length


def test_answers_are_printed_drawn_and_shown_on_a_page_of_runs(
    workdir, tmp_path, command, monkeypatch
):
    drawn = {}

    def recorded(*arguments):
        drawn.update(cross_attention(*arguments))
        return drawn

    monkeypatch.setattr(load("scripts/answers.py"), "cross_attention", recorded)
    figure, page = tmp_path / "new" / "figure.png", tmp_path / "page.html"
    words = ["--inputs", LONG_WORD, "abc", "--workdir", workdir, "--figure", figure]
    options = ["--html", page, "--all-steps", "--compare", workdir]
    status, out, err = command("answers", *words, *options)
    lines = out.splitlines()
    assert status == 0
    assert err.endswith(": step 6 of 6, seed 0\n")
    assert lines[0].startswith(f"{LONG_WORD} -> ")
    assert "(right would be cba)" in lines[1]
    assert lines[2:] == [str(figure), str(page)]
    assert figure.read_bytes().startswith(b"\x89PNG")
    (data,) = re.findall(r'id="data">(.*?)</script>', page.read_text())
    captures = json.loads(data)["captures"]
    label = task_in(workdir).label
    assert [(c["panel"], c["step"], c["example"]) for c in captures] == [
        (panel, step, word)
        for panel in (label, f"{label} ({workdir})")
        for step in ("0", "4", "6")
        for word in (LONG_WORD, "abc")
    ]
    (cross,) = captures[-1]["attentions"]  # the model has no other
    weights, rows, columns = drawn["abc"]
    assert cross["key_tokens"] == columns == ["SOS", "a", "b", "c"]
    assert cross["query_tokens"] == rows
    shown = decoded_numbers(cross["arrays"]["weights"])[0]
    np.testing.assert_allclose(shown, weights, atol=1e-5)
