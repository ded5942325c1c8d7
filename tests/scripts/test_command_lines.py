"""What all command lines share, and evaluate.py and answers.py, which read a run."""

import dataclasses
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Literal

import command_line
import numpy as np
import pytest
from command_line import run_command
from command_lines import call, load

from attention_jax.analysis.attention_page.page_data import decoded_numbers
from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.pages import cross_attention
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import load_run, train_run
from attention_jax.training.task import TrainConfig

evaluate_script = load("scripts/evaluate.py")
answers_script = load("scripts/answers.py")


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
        (["--lengths", "3", "b"], ["--lengths", "INT", "'3 b'"]),
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
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert all(name in err for name in named)
    assert not re.search("[\x1b─│]|---", err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dim", "wide"], "--dim must be INT; got 'wide'"),
        (["--rate=fast"], "--rate must be FLOAT; got 'fast'"),
        (["--step", "2", "--step", "old"], "--step must be {newest,best}|INT; got 'old'"),
        (["--bogus", "8", "--zzz=3"], "unknown option --bogus 8, --zzz=3; see --help"),
        (["--dim", "4", "6"], "unexpected 6; see --help"),
    ],
)
def test_what_was_expected_and_what_came(run, words, message):
    assert run("--workdir", "run", *words) == (2, "", f"error: {message}\n")


def test_an_option_that_must_be_given(run):
    for words in ([], ["--workdr", "run"]):
        status, out, err = run(*words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert all(name in err for name in ("--workdir PATH", *words[:1]))


def test_good_words_and_help(run, monkeypatch):
    assert run("--workdir", "run", "--dim", "6") == (0, "6\n", "")
    status, out, err = run("--help", term="dumb")
    assert (status, err) == (0, "")
    assert "--workdir PATH" in out
    assert max(map(len, out.splitlines())) <= 40
    assert run("--workdir", "run", "--dim", "10") == (0, "10\n", "from a module of the user\n")


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


# --- commands that read a run ---


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    task = Reversal(
        ModelConfig(
            score="general", dim=8, hidden_dim=12, encoder_layers=0, decoder_self_attention=False
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


def test_answers_write_a_page_of_runs_side_by_side(workdir, tmp_path, monkeypatch, capsys):
    page, figure = tmp_path / "page.html", tmp_path / "figure.png"
    words = ["--inputs", "hello", "abc", "--workdir", workdir, "--figure", figure]
    options = ["--html", page, "--all-steps", "--compare", workdir]
    assert call(answers_script, *words, *options, monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    (data,) = re.findall(r'id="data">(.*?)</script>', page.read_text())
    captures = json.loads(data)["captures"]
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
    weights, rows, columns = cross_attention(run.task, params, answers.batch, answers.labels)["abc"]
    assert cross["key_tokens"] == columns == ["SOS", "a", "b", "c"]
    assert cross["query_tokens"] == rows
    shown = decoded_numbers(cross["arrays"]["weights"])[0]
    np.testing.assert_allclose(shown, weights, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "words", "named"),
    [
        (evaluate_script, ["--workdir", "nowhere"], "nowhere"),
        (evaluate_script, ["--lengths", "0"], "lengths"),
        (evaluate_script, ["--average", "0"], "average"),
        (evaluate_script, ["--out", "no/x"], "out"),
        (evaluate_script, ["--out", "RUN"], "out"),
        (answers_script, ["--workdir", "nowhere"], "nowhere"),
        (answers_script, ["--inputs", "Hello"], "'Hello'"),
        (answers_script, ["--inputs", ""], "empty"),
        (answers_script, ["--seed-index", "2"], "seed_index"),
        (answers_script, ["--figure", "a.jpg"], "a.jpg"),
        (answers_script, ["--html", "a.htm"], "a.htm"),
        (answers_script, ["--html", "no/a.html"], "no"),
        (answers_script, ["--all-steps"], "html"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(module, words, named, workdir, monkeypatch, capsys):
    words = [str(workdir) if word == "RUN" else word for word in words]
    arguments = [] if "--workdir" in words else ["--workdir", workdir]
    assert call(module, *arguments, *words, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert named in err


def test_a_damaged_checkpoint_is_one_line(workdir, tmp_path, monkeypatch, capsys):
    damaged = tmp_path / "run"
    shutil.copytree(workdir, damaged)

    def damage(step):
        for path in (damaged / "checkpoints" / str(step)).rglob("_METADATA"):
            path.write_text("")

    damage(4)
    assert not call(evaluate_script, "--workdir", damaged, monkeypatch=monkeypatch)
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: ")
    assert (captured.err.count("\n"), "step 4" in captured.err) == (1, True)
    assert "step 2, 2 seeds" in captured.out
    damage(2)
    assert call(evaluate_script, "--workdir", damaged, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr().err
    assert all(f"step {step}: " in printed for step in (4, 2))
