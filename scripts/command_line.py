"""What every command line does: parse by tyro, and put a user's mistake in one line."""

from __future__ import annotations

import os
import sys
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import tyro

from attention_jax.core.one_line import one_line
from attention_jax.nn.position_config import NAMED_POSITIONS, PositionConfig, PositionKind
from attention_jax.runs import processes

Arguments = TypeVar("Arguments")

_SCRIPTS = Path(__file__).parent
_OURS = tuple(_SCRIPTS.parent / name for name in ("attention_jax", "scripts", "experiments"))


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _positions(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[PositionConfig] | None:
    """--positions NAME [setting=value ...]: one option for what is a dataclass elsewhere."""
    if info.type is not PositionConfig:
        return None
    names = [*typing.get_args(PositionKind), *NAMED_POSITIONS]
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{{{','.join(names)}}} [SETTING=VALUE ...]",
        instance_from_str=PositionConfig.from_words,
        is_instance=lambda instance: isinstance(instance, PositionConfig),
        str_from_instance=PositionConfig.to_words,
    )


def run_command(
    arguments: type[Arguments] | Callable[[list[str]], type[Any]],
    main: Callable[[Arguments], int | None],
) -> None:
    """Parses `sys.argv`, runs `main` and exits with its status; 2 and one line for a mistake.

    `arguments` are what there is to say, a dataclass; or a function that picks it by the words.
    A ValueError that our own code raises is the user's mistake. One from anywhere else, such as a
    user's score or JAX, keeps its traceback: it says where to look.
    """
    sys.path.insert(0, str(Path.cwd()))  # so that --score module:Name finds a module lying here
    try:
        chosen: Any = arguments if isinstance(arguments, type) else arguments(sys.argv[1:])
        parsed = tyro.cli(chosen, config=(tyro.conf.OmitArgPrefixes,), registry=_REGISTRY)
        status = main(parsed)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        if _is_users_mistake(error):
            print(f"error: {error}", file=sys.stderr)
            status = 2
        elif processes.are_lost(error):
            print(
                "error: the other processes of this run cannot be reached:"
                f" {one_line(error)}. Start all of them again, with --resume",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # what Python does at its end would wait for them
        else:
            raise
    except KeyboardInterrupt:
        status = 130  # as shells say it, without a traceback
    sys.exit(status)


def _is_users_mistake(error: Exception) -> bool:
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, ValueError) and any(folder in raised_in.parents for folder in _OURS)
