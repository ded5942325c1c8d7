"""Shared by all command lines: parsing by tyro, and one-line messages for a user's mistake."""

from __future__ import annotations

import contextlib
import dis
import io
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import tyro
from option_errors import option_error

from attention_jax.core.programs import one_line
from attention_jax.runs import processes
from attention_jax.tasks import TASKS

Arguments = TypeVar("Arguments")

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
TaskName = Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(TASKS)},module:Name}}")]

_SCRIPTS = Path(__file__).parent
_PROJECT = tuple(_SCRIPTS.parent / name for name in ("attention_jax", "scripts", "experiments"))


def run_command(
    arguments: type[Arguments] | Callable[[list[str]], type[Any]],
    main: Callable[[Arguments], int | None],
    **shown: str,
) -> None:
    """Parses `sys.argv`, runs `main` and exits with its status.

    A ValueError that a check of this project raises is a mistake of the user: it is printed in one
    line, and the exit status is 2. A ValueError from elsewhere keeps its traceback: from a user's
    score, from JAX, or from a builtin that this project calls, which is a bug of ours.

    Args:
        arguments: a dataclass of the options, or a function that chooses it from the words of the
            command line.
        main: what to run; returns the exit status, None for 0.
        **shown: what --help shows instead: `prog`, the program, and `description`.
    """
    sys.path.insert(0, str(Path.cwd()))  # --score and --task module:Name find modules here
    keep_compiled_programs()
    try:
        status = main(parse(arguments, sys.argv[1:], **shown))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        if is_users_mistake(error):
            print(f"error: {_in_options(str(error))}", file=sys.stderr)
            status = 2
        elif processes.are_lost(error):
            print(
                "error: the other processes of this run cannot be reached:"
                f" {one_line(error)}. Start all of them again, with --resume",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # a regular exit would wait for the other processes
        else:
            raise
    except KeyboardInterrupt:
        status = 130  # the status that shells give, without a traceback
    sys.exit(status)


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs on disk, so that the next start does not compile them again.

    They lie in `ATTENTION_JAX_CACHE`, by default `~/.cache/attention_jax`, which may be deleted at
    any time. `ATTENTION_JAX_CACHE=off` keeps none. A folder that JAX was told to use stays.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = os.environ.get("ATTENTION_JAX_CACHE") or str(caches / "attention_jax")
    if folder != "off" and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def parse(
    arguments: type[Any] | Callable[[list[str]], type[Any]], words: list[str], **shown: str
) -> Any:
    """Returns the arguments for the words of a command line; exits after --help.

    A class of options may have a method `with_other_options`, which gets the words that are not
    among its options and has to check them.

    Raises:
        ValueError: a word is wrong; the message is one line.
    """
    chosen: Any = arguments if isinstance(arguments, type) else arguments(words)
    settings: Any = {"config": (tyro.conf.OmitArgPrefixes,), **shown}
    with _mistakes_in_one_line(words):
        if not hasattr(chosen, "with_other_options"):
            return tyro.cli(chosen, args=words, **settings)
        parsed, others = tyro.cli(chosen, args=words, return_unknown_args=True, **settings)
    return parsed.with_other_options(others)


@contextlib.contextmanager
def _mistakes_in_one_line(words: list[str]) -> Iterator[None]:
    """Raises ValueError with one line where tyro prints a box and exits."""
    printed, width = io.StringIO(), os.environ.get("COLUMNS")
    if not {"-h", "--help"} & {*words}:
        # tyro breaks lines at the width of the terminal: a wide one keeps each sentence in one.
        os.environ["COLUMNS"] = "100000"
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as stop:
        if stop.code == 2 and (box := printed.getvalue()):
            printed = io.StringIO()
            refused = stop.__context__  # what tyro caught, perhaps in an error of its own
            if refused and type(refused).__module__.startswith("tyro."):
                refused = refused.__context__
            if refused and _raised_in_project(refused) and not _raised_by_statement(refused):
                raise refused from None
            raise ValueError(option_error(box, words)) from None
        raise
    finally:
        os.environ.pop("COLUMNS", None)
        if width is not None:
            os.environ["COLUMNS"] = width
        sys.stderr.write(printed.getvalue())  # what the code of a user's score printed


def _in_options(message: str) -> str:
    """The library's message with arguments named as command-line options."""
    return message.replace("resume=True", "--resume")


def is_users_mistake(error: BaseException) -> bool:
    """Whether a check of this project raised the error: a `raise ValueError` statement."""
    statement = _raised_in_project(error) and _raised_by_statement(error)
    return statement and isinstance(error, ValueError)


def _raised_in_project(error: BaseException) -> bool:
    folders = Path(_origin(error).tb_frame.f_code.co_filename).parents
    return any(folder in folders for folder in _PROJECT)


def _raised_by_statement(error: BaseException) -> bool:
    """False for an error of a builtin function, which has no frame of its own."""
    origin = _origin(error)
    return origin.tb_frame.f_code.co_code[origin.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _origin(error: BaseException) -> types.TracebackType:
    """The innermost frame of an error that was raised."""
    origin = error.__traceback__
    assert origin is not None
    while origin.tb_next is not None:
        origin = origin.tb_next
    return origin
