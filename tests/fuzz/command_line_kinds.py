"""Kinds for the command lines, run in this process: good and bad options.

`_begin` replaces the slow work, so that a case tests parsing, checks and the files that they leave.
Good options reach the work. Bad options end with status 2 and a short message, without a traceback,
and leave no new files.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from command_line import run_command
from command_line_words import (
    BAD_ANALYZE,
    BAD_BENCHMARK,
    BAD_EVALUATE,
    BAD_REPRODUCE,
    BAD_REVERSE,
    BAD_TRAIN,
    GOOD_ANALYZE,
    GOOD_BENCHMARK,
    GOOD_EVALUATE,
    GOOD_REPRODUCE,
    GOOD_REVERSE,
    GOOD_TRAIN,
    Words,
)
from hypothesis import strategies as st
from outcomes import ERROR, RESULT, Kind

from attention_jax.nn.block_config import BlockConfig
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.reversal import evaluation as reversal_evaluation
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.reversal.task import ReversalConfig
from attention_jax.training.loop import LoopConfig
from attention_jax.training.run import train_run

ROOT = Path(__file__).parents[2]


class _Begun(BaseException):
    """Raised where the work would begin, after all checks."""


def _begin(*_: Any, **__: Any) -> Any:
    raise _Begun


@functools.cache
def script(name: str) -> Any:
    """Returns the module of scripts/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    with mock.patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]):
        spec.loader.exec_module(module)
    return module


@functools.cache
def trained_run() -> Path:
    """Returns the folder of a run with two steps and two seeds, made once."""
    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name) / "run"
    config = ReversalConfig(
        model=Seq2SeqConfig(score="dot", block=BlockConfig(dim=4, hidden_dim=3), encoder_layers=0),
        loop=LoopConfig(seeds=2, steps=2, log_every=1, checkpoint_every=1),
        batch_size=3,
        max_length=4,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("attention_jax.training.run.train", _only_saved))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        train_run(REVERSAL, config, folder)
    return folder


def _only_saved(_training: Any, state: Any, records: Any, _interruption: Any) -> Any:
    """Replaces training: saves two checkpoints and learns nothing."""
    for step in (1, 2):
        state = state._replace(step=jnp.full_like(state.step, step))
        records.checkpoints.save(step, state)
    records.checkpoints.wait()
    return state


@dataclasses.dataclass(frozen=True)
class Run:
    """The end of a command."""

    status: int | str  # "begun" if the command reached its work
    printed: str
    new: list[str]  # new files and folders
    content: dict[str, Any]  # of the new JSON files


def run(name: str, words: list[str], replaced: dict[str, Any], folder: Path) -> Run:
    """Runs a command in `folder`, in this process."""
    module, printed = script(name), io.StringIO()
    if name == "benchmark":
        begin = {key: value._replace(run=_begin) for key, value in module.BENCHMARKS.items()}
        replaced = {**replaced, "script_benchmark.BENCHMARKS": begin}
    if name == "reproduce":
        replaced = {**replaced, "script_reproduce.ROOT": folder}
    before, here, path = _below(folder), Path.cwd(), sys.path[:]
    status: Any = "begun"
    with contextlib.ExitStack() as stack:
        for target, value in replaced.items():
            stack.enter_context(mock.patch(target, value))
        stack.enter_context(mock.patch.object(sys, "argv", [f"{name}.py", *words]))
        stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "200"}))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        os.chdir(folder)
        try:
            run_command(getattr(module, "arguments_of", None) or module.Arguments, module.main)
        except SystemExit as exited:
            status = exited.code or 0
        except _Begun:
            pass
        finally:
            os.chdir(here)
            sys.path[:] = path
    new = sorted(_below(folder) - before)
    content = {n: json.loads((folder / n).read_text()) for n in new if n.endswith(".json")}
    return Run(status, printed.getvalue(), new, content)


def _below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, its required words, its good and bad words, and replacements for its work."""

    name: str
    needed: tuple[str, ...]
    good: list[Words]
    bad: list[Words]
    replaced: dict[str, Any]

    @property
    def cases(self) -> st.SearchStrategy:
        """Draws (words, whether they are good)."""

        @st.composite
        def draw_words(draw: Any) -> tuple[Words, bool]:
            chosen = draw(st.lists(st.sampled_from(self.good), max_size=4))
            chosen = list({words[0]: words for words in chosen}.values())  # each option once
            good = draw(st.integers(0, 3)) == 0
            if not good:
                wrong = draw(st.sampled_from(self.bad))
                chosen = [words for words in chosen if words[0] != wrong[0]]
                if draw(st.integers(0, 9)) or not self.needed:
                    chosen.insert(draw(st.integers(0, len(chosen))), wrong)
                else:
                    return [word for words in chosen for word in words], False
            # Positional words come first, or an option would take them as further values.
            positional = [words for words in chosen if not words[0].startswith("--")]
            named = [words for words in chosen if words[0].startswith("--")]
            return [word for words in (*positional, self.needed, *named) for word in words], good

        return draw_words()

    def call(self, case: tuple[Words, bool]) -> Run:
        words, _ = case
        with tempfile.TemporaryDirectory() as folder:
            if "run" in self.needed and self.name != "train":
                shutil.copytree(trained_run(), Path(folder) / "run")
            return run(self.name, words, self.replaced, Path(folder))


def check_begins(ended: Run) -> None:
    """Asserts that the command reached its work, or finished it if it is quick.

    reproduce.py ends with status 1 if a claim of a named experiment is a MISS, and says which.
    """
    missed = ended.status == 1 and "MISS: " in ended.printed
    assert ended.status in ("begun", 0) or missed, f"status {ended.status}: {ended.printed[-300:]}"
    assert "Traceback" not in ended.printed, ended.printed


def check_mistake(ended: Run) -> None:
    """Asserts status 2, a short message, and no new files."""
    assert ended.status == 2, f"status {ended.status}: {ended.printed[-300:]}"
    assert "Traceback" not in ended.printed, ended.printed
    assert 0 < len(ended.printed.strip()) <= 4000, f"{len(ended.printed)} characters"
    assert ended.new == [], f"left behind: {ended.new}"


def _fake_batch(rng: Any, *, batch_size: int, max_length: int, **_: Any) -> Any:
    """Returns strings of one repeated letter, without compiling anything."""
    lengths, letters = (
        np.full(batch_size, max_length, "i4"),
        np.ones((batch_size, max_length), "i4"),
    )
    return Batch(letters, lengths, letters, letters, lengths)


def _fake_evaluation(config: Any, beams: int, params: Any, batch: Any) -> Any:
    return reversal_evaluation.Evaluation(*(np.array([0.5, 0.25]) for _ in range(3)))


def _fake_decode(model: Any, batch: Any, *, beams: int, return_weights: bool) -> Any:
    assert return_weights
    weights = jnp.ones((1, *batch.targets.shape, batch.source.shape[1]))
    return reversal_evaluation.Decoded(batch.targets, weights)


class CommandKind(Kind):
    """The kind of a command: a mistake ends in exit status 2 instead of an error."""

    def judge(self, case: Any) -> str:
        ended = self.call(case)
        if self.expect(case):
            check_begins(ended)
            if "run/config.json" in ended.new:
                assert ended.content["run/config.json"].keys() >= {"model", "loop"}
            return RESULT
        check_mistake(ended)
        return ERROR


def of_command(command: Command, many: int, few: int) -> Kind:
    name = f"scripts/{command.name}.py"
    return CommandKind(name, command.cases, command.call, lambda case: case[1], None, many, few)


WORK = "attention_jax.tasks.reversal.task"
TRAIN = Command(
    "train",
    ("--workdir", "run"),
    GOOD_TRAIN,
    BAD_TRAIN,
    {"attention_jax.training.run.Checkpoints": _begin},
)
EVALUATE = Command(
    "evaluate", ("--workdir", "run"), GOOD_EVALUATE, BAD_EVALUATE,
    {
        "attention_jax.tasks.reversal.evaluation._evaluate": _fake_evaluation,
        "attention_jax.tasks.reversal.evaluation.random_batch": _fake_batch,
    },
)  # fmt: skip
REVERSE = Command(
    "reverse", ("word", "--workdir", "run"), GOOD_REVERSE, BAD_REVERSE,
    {"attention_jax.tasks.reversal.evaluation.decode": _fake_decode},
)  # fmt: skip
ANALYZE = Command(
    "analyze_gradients", ("--workdir", "run"), GOOD_ANALYZE, BAD_ANALYZE,
    {"script_analyze_gradients.analyze_run": _begin},
)  # fmt: skip
BENCHMARK = Command("benchmark", (), GOOD_BENCHMARK, BAD_BENCHMARK, {})
REPRODUCE = Command(
    "reproduce", (), GOOD_REPRODUCE, BAD_REPRODUCE, {"script_reproduce._run": _begin}
)

KINDS = [
    of_command(TRAIN, 2500, 25), of_command(EVALUATE, 100, 6), of_command(REVERSE, 60, 4),
    of_command(ANALYZE, 500, 8), of_command(BENCHMARK, 500, 10), of_command(REPRODUCE, 200, 10),
]  # fmt: skip
