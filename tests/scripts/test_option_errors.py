"""A wrong word on a command line ends in one line: what was expected, what came, what to do."""

import dataclasses
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro
from command_line import run_command

WORDS = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="[every=STEPS]",
    instance_from_str=lambda words: _refuse(words),
    is_instance=lambda instance: isinstance(instance, str),
    str_from_instance=lambda instance: [instance],
)


def _refuse(words):
    raise ValueError(f"expected every=STEPS; got {' '.join(words)}")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A command.

    Attributes:
        workdir: the folder of a run.
        dim: a size.
        rate: a rate.
        limit: an integer or none.
        step: which.
        lengths: some sizes.
        fractions: some numbers.
        mask: yes or no.
        schedule: of the rate.
        every: parsed by a function.
    """

    workdir: Path
    dim: int = 64
    rate: float = 0.1
    limit: int | None = None
    step: Literal["newest", "best"] | int = "newest"
    lengths: tuple[int, ...] = (3,)
    fractions: tuple[float, ...] = (0.5,)
    mask: bool = True
    schedule: Literal["cosine", "constant"] = "cosine"
    every: Annotated[str, WORDS] = "100"

    def __post_init__(self):
        if self.dim % 2:
            raise ValueError(f"dim must be even; got {self.dim}")


class Terminal(io.TextIOWrapper):
    """Standard output; tyro uses colours on it where the variable TERM names a terminal."""

    def isatty(self):
        return True


@pytest.fixture(params=["utf-8", "ascii"])  # tyro draws other boxes with other encodings
def run(request, monkeypatch, capsys):
    def of_words(*words, colours=False):
        out = Terminal(io.BytesIO(), encoding=request.param)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("TERM", "xterm" if colours else "dumb")
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as exited:
            run_command(Arguments, lambda arguments: print(arguments.dim))
        out.seek(0)
        return exited.value.code or 0, out.read(), capsys.readouterr().err

    return of_words


LONG = "/a/rather/long/folder" * 20


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--dim", "wide"], "--dim must be an integer; got wide"),
        (["--dim=2.5"], "--dim must be an integer; got 2.5"),
        (["--rate", "fast"], "--rate must be a number; got fast"),
        (["--limit", "x"], "--limit must be an integer or None; got x"),
        (["--step", "old"], "--step must be an integer, newest or best; got old"),
        (["--lengths", "3", "b", "--dim", "4"], "--lengths must be integers; got 3 b"),
        (["--fractions", "x"], "--fractions must be numbers; got x"),
        (["--schedule", "up"], "--schedule must be one of cosine, constant; got up"),
        (["--every", "x", "y"], "--every: expected every=STEPS; got x y"),
        (["--dim", "7"], "dim must be even; got 7"),
        (["--dim"], "--dim must have a value; got none"),
        (["--dimm", "8"], "there is no option --dimm; did you mean --dim?"),
        (
            ["--bogus", "8", "--zzz=3"],
            "there is no option --bogus or --zzz; --help lists the options",
        ),
        (["--zzzzzz", "8"], "there is no option --zzzzzz; --help lists the options"),
        (["--dim", "4", "6"], "unexpected word '6' after --dim, which takes one value"),
        (["--mask", "yes"], "unexpected word 'yes' after --mask, which takes no value"),
        (["--dim", LONG], f"--dim must be an integer; got {LONG}"),
    ],
)
def test_one_line_for_a_wrong_word(run, monkeypatch, words, line):
    monkeypatch.setenv("COLUMNS", "40")
    assert run("--workdir", "run", *words) == (2, "", f"error: {line}\n")
    assert os.environ["COLUMNS"] == "40"


def test_one_line_in_a_terminal_with_colours(run):
    line = "error: --schedule must be one of cosine, constant; got up\n"
    assert run("--workdir", "run", "--schedule", "up", colours=True) == (2, "", line)


def test_an_option_that_must_be_given(run):
    assert run() == (2, "", "error: --workdir must be given: the folder of a run\n")
    line = "error: there is no option --workdr; did you mean '--workdir'?\n"
    assert run("--workdr", "run") == (2, "", line)
    line = "error: there is no option --bogus; --workdir must be given\n"
    assert run("--bogus", "run") == (2, "", line)


def test_good_words_and_help_are_as_before(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run("--workdir", "run", "--dim", "6") == (0, "6\n", "")
    assert "COLUMNS" not in os.environ
    monkeypatch.setenv("COLUMNS", "60")
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert "--workdir PATH" in out
    assert max(map(len, out.splitlines())) <= 60


def test_what_a_users_code_prints_is_not_lost(run, monkeypatch):
    def noisy(arguments):
        print("from a module of the user", file=sys.stderr)

    monkeypatch.setattr(Arguments, "__post_init__", noisy)
    assert run("--workdir", "run") == (0, "64\n", "from a module of the user\n")
