"""What all command lines share: parsing by tyro, messages of one line, and tables."""

import contextlib
import dataclasses
import errno
import inspect
import io
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin
from unittest import mock

import jax
import rich.console
import rich.table
import tyro

from attention_jax.core.errors import one_line
from attention_jax.core.names import did_you_mean
from attention_jax.runs.checkpoints import StepName
from attention_jax.runs.processes import several, together
from attention_jax.runs.progress import end_of_output, say, warn
from attention_jax.tasks import TASKS
from attention_jax.training.run import TrainedRun, load_run

Arguments = TypeVar("Arguments")
Cell = TypeVar("Cell")

# The type of every option --scores, with what its help says of the words; see `get_score`.
ScoreNames = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="SCORE [SCORE ...]",
        help_behavior_hint=lambda default: (
            f'(each a name, module:Name, or one with arguments, "additive(hidden_dim=32)";'
            f" default: {default})"
        ),
    ),
]

# The type of every option --task; see `task_of`.
TaskName = Annotated[str, tyro.conf.arg(name="task", metavar=f"{{{','.join(TASKS)},module:Name}}")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfARun:
    """The options of a command that reads a checkpoint of a run.

    Attributes:
        workdir: a run folder made by scripts/train.py.
        score: what the score of the run is called now, "module:Name", if its file or its class was
            renamed; it must give the same numbers. scripts/train.py --resume records the new name.
            "task=module:Name normalizer=module:Name" are new names of other parts, those of
            `load_run`.
        step: the newest good checkpoint, the best (see --keep-best of scripts/train.py), a step
            that is kept, or 0 for the model before training.
    """

    workdir: Path
    score: str | None = None
    step: StepName = "newest"

    def run(self) -> TrainedRun:
        """The run with the parameters of this step."""
        return load_run(self.workdir, self.step, score=self.score)


_CLOSED_PIPE = 141  # 128 + SIGPIPE: the status that shells give
_NO_OUTPUT = (errno.EPIPE, errno.ENOSPC)
_FOLDERS = ("attention_jax", "benchmarks", "experiments", "scripts")
_PROJECT = tuple(Path(__file__).parents[2] / folder for folder in _FOLDERS)


def run_command(
    arguments: type[Arguments] | Callable[[list[str]], Arguments],
    main: Callable[[Arguments], int | None],
    **shown: str,
) -> None:
    """Parses `sys.argv`, runs `main` and exits with its status.

    A ValueError that a check of this project raises is a mistake of the user: it is printed in one
    line, and the exit status is 2. A ValueError from elsewhere keeps its traceback: from a user's
    score, from JAX, or from a builtin that this project calls, which is a bug of ours.

    A warning is one line, too. Where standard output is closed or full, `main` still does all of
    its work. The exit status is then 141 for a pipe that its reader has closed, otherwise 2 with
    one line.

    Args:
        arguments: a dataclass of the options, or a function from the words of the command line to
            an instance of one, for options that depend on other options.
        main: what to run; returns the exit status, None for 0.
        **shown: further arguments of `parse`.
    """
    sys.path.insert(0, str(Path.cwd()))  # --score and --task module:Name find modules here
    keep_compiled_programs()
    status: Any
    lost: OSError | None = None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: warn(" ".join(str(message).split()))
            with together():
                words = sys.argv[1:]
                if isinstance(arguments, type):
                    given = parse(arguments, words, **shown)
                else:
                    given = arguments(words)
            status = main(given)
    except KeyboardInterrupt:
        status = 130  # the status that shells give, without a traceback
        if several():  # JAX would wait for the others, which wait for this process
            os._exit(status)
    except SystemExit as stop:  # after --help, or a signal
        status = stop.code
    except Exception as error:
        if is_users_mistake(error):
            message = str(error).replace("resume=True", "--resume")
            say(f"error: {message}", error=True)
            status = 2
        elif isinstance(error, OSError) and error.filename is None and error.errno in _NO_OUTPUT:
            status, lost = 0, error  # of tyro, which prints --help
        else:
            if several():
                _end_alone(error)
            raise
    lost = end_of_output() or lost
    if not status and lost is not None:
        status = _CLOSED_PIPE if isinstance(lost, BrokenPipeError) else 2
        if status == 2:
            reason = lost.strerror or lost
            say(f"error: standard output cannot be written: {reason}", error=True)
    sys.exit(status)


def _end_alone(error: Exception) -> None:
    """Ends this process at once after an error of this process alone: a bug, or a lost process.

    Otherwise JAX would wait at the end for the others, which wait for this one.
    """
    if re.match(r"[A-Z_]+: ", str(error)):  # a status of XLA's runtime
        message = f"error: process {jax.process_index()} cannot go on: {one_line(error)}"
        say(f"{message}; --resume goes on from the last checkpoint", error=True)
    else:
        traceback.print_exception(error)
    os._exit(1)


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs on disk, so that the next start does not compile them again.

    They lie in `ATTENTION_JAX_CACHE`, by default `~/.cache/attention_jax`, which may be deleted at
    any time. `ATTENTION_JAX_CACHE=off` keeps none. If `JAX_COMPILATION_CACHE_DIR` names a folder,
    that one is used.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = os.environ.get("ATTENTION_JAX_CACHE") or str(caches / "attention_jax")
    if folder != "off" and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def parse(arguments: Any, words: list[str], description: str = "", **options: Any) -> Any:
    """Returns an instance of a dataclass for the words of a command line; exits after --help.

    Args:
        arguments: the dataclass, whose fields are the options.
        words: the words.
        description: what --help shows before the options; by default the dataclass's docstring.
        **options: further arguments of `tyro.cli`.

    Raises:
        ValueError: a word is wrong; the message is one line.
    """
    # tyro breaks lines at the width of the terminal; a message stays whole on a wide one.
    width = {"COLUMNS": "100000"}
    if {"-h", "--help"} & {*words}:  # tyro joins lines of a description, and wraps none
        text = description or inspect.getdoc(get_origin(arguments) or arguments) or ""
        say(wrapped(text.partition("\nAttributes:\n")[0]))
        width = {}
    printed = io.StringIO()
    try:
        with mock.patch.dict(os.environ, width), contextlib.redirect_stderr(printed):
            options |= {"prog": " ".join(_program(sys.argv[0])), "description": ""}
            config = (tyro.conf.OmitArgPrefixes,)
            parsed = tyro.cli(arguments, args=words, config=config, **options)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        error = stop.__context__  # what tyro caught, perhaps in an error of its own
        while error is not None and type(error).__module__.startswith("tyro."):
            error = error.__context__
        if error is not None and _origin(error)[0]:
            raise error from None
        raise ValueError(_message(printed.getvalue())) from None
    if text := printed.getvalue().rstrip("\n"):
        say(text, error=True)  # what the code of a user's score printed
    return parsed


def wrapped(text: str) -> str:
    """A docstring at the terminal's width; a section, as in "Answer: ...", begins a line.

    Commands, and what is indented after an empty line, such as formulas, stay as they are.
    """
    width, parts = shutil.get_terminal_size().columns, []
    for part in re.split(r"\n(?=\n|[A-Z]\w+: |\d\. )", text.strip()):
        lines = textwrap.wrap(" ".join(part.split()), width, break_on_hyphens=False)
        is_kept = re.match(r"\n |Command: ", part)
        parts.append(part if is_kept else "\n" * part.startswith("\n") + "\n".join(lines))
    return "\n".join(parts) + "\n"


def share_of(cells: Sequence[Cell], part: str | None) -> Sequence[Cell]:
    """Returns the cells of the option --part I/N: every N-th, from the I-th on; or all cells.

    Raises:
        ValueError: the part is not I/N with I from 1 to N.
    """
    first, _, parts = ("1/1" if part is None else part).partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise ValueError(f"part must be I/N with I from 1 to N; got {part!r}")
    return cells[int(first) - 1 :: int(parts)]


def check_names(option: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError for the first of an option's names that is not among the known ones."""
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{option} must be of {', '.join(known)}; got {name!r}{hint}")


def command() -> str:
    """The command of this process, for the files that it writes."""
    return shlex.join([*_program(sys.argv[0]), *sys.argv[1:]])


def _program(file: str) -> list[str]:
    """How this process was started: a module by python -m, or a file."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:
        return ["python", "-m", spec.name]
    with contextlib.suppress(ValueError):  # on another drive of Windows
        file = os.path.relpath(file)
    return ["python", Path(file).as_posix()]


def print_table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints a table whose first column is text and whose others are numbers."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    literal: Any = {"markup": False, "emoji": False}  # users write [v1] and :key:
    width = None if is_terminal else 1000  # a file has room for every column
    # It reads the encoding of standard output, by which it chooses the lines of the table.
    console = rich.console.Console(force_terminal=is_terminal, width=width, **literal)
    table = rich.table.Table(title=title)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    with console.capture() as printed:
        console.print(table)
    say(printed.get().rstrip("\n"))


def _message(box: str) -> str:
    """The message in tyro's frame as one line, without its explanations of options."""
    text = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯]", "", box).partition("For full helptext")[0]
    lines = [line for line in text.splitlines()[1:] if not re.match(r" {5,}[^-\s]", line)]
    sections = re.split(r"\n[ ─-]*\n", "\n".join(["", *lines, ""]))
    message = "; ".join(" ".join(text.split()).rstrip(".") for text in sections if text.strip())
    parsing = r"Error parsing (--\S+): (.+?)(; Got errors: .*)?; Argument helptext: \1 (.+)"
    message = re.sub(parsing, r"\1 must be \4: \2", message)
    # tyro suggests nothing where a required option is missing, too.
    both = re.fullmatch(r"Missing from .*?: (.+); Unrecognized options: (--\S+)", message)
    return message + (did_you_mean(both[2], re.findall(r"--[\w-]+", both[1])) if both else "")


def is_users_mistake(error: BaseException) -> bool:
    """Whether a check of this project raised the error: a `raise ValueError` statement."""
    return isinstance(error, ValueError) and all(_origin(error))


def _origin(error: BaseException) -> tuple[bool, bool]:
    """Whether an error comes from this project, and whether a `raise` statement raised it.

    An error of a builtin function is raised where the function is called.
    """
    *_, frame = traceback.extract_tb(error.__traceback__)
    of_project = any(folder in Path(frame.filename).parents for folder in _PROJECT)
    return of_project, (frame.line or "").startswith("raise ")
