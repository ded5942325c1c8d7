"""Random command lines and damaged run folders, in this process and without the slow work.

A right command line reaches the work. A wrong one, or one of a damaged folder, ends with status 2
and a short message, without a traceback, and leaves the files as they were.
"""

import contextlib
import functools
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from command_lines import call, load
from hypothesis import given
from hypothesis import strategies as st
from stand_in_training import OPTIONS, run_of_two_seeds
from strategies import examples


class _Begun(BaseException):
    """Raised where the work would begin, after all checks."""


def _begin(*_, **__):
    raise _Begun


# --- command lines ---

count = st.integers(1, 9).map(str)


def counts(names):
    return dict.fromkeys((f"--{name}" for name in names.split()), count)


def words(*values):
    """Draws one of the values: one word, or a tuple of words."""
    return st.sampled_from(values)


COMMANDS = {  # {command: (words that it needs, {option: right words}, its slow work)}
    "train": (
        ("--workdir", "run"),
        {
            "--score": words("additive", "dot", "general", "scaled", "cosine"),
            **counts("seeds batch-size hidden-dim encoder-layers decoder-layers"),
            "--steps": words("50", "100"), "--dim": words("8", "16"), "--letters": words("1", "26"),
            "--max-length": words("9", "8"), "--learning-rate": words("0.1", "1e-3"),
            "--clip-norm": words("2", "inf"), "--dropout-rate": words("0", "0.5"),
            "--norm": words("pre", "post"), "--activation": words("relu", "swiglu"),
            "--positions": words("learned", "none"), "--position-anchor": words("start", "both"),
            "--log-gradients": words((), "every=25"), "--normalize-qk": words(()),
            "--resume": words(()), "--no-mask-padding": words(()),
        },
        {"attention_jax.training.run.Checkpoints": _begin},
    ),
    "evaluate": (
        ("--workdir", "run"),
        {"--lengths": words("3", ("1", "2")), "--out": words("out.json")},
        {"attention_jax.tasks.sequences.accuracies": _begin},
    ),
    "answers": (
        ("--workdir", "run"),
        {"--inputs": words("abc", ("a", "word")), "--seed-index": words("0", "1"),
         **counts("beams"), "--figure": words("a.png", "new/a.png")},
        {"attention_jax.tasks.sequences.best_answers": _begin},
    ),
    "analyze_gradients": (
        ("--workdir", "run"),
        {"--compare": words("run"), "--iterations": words("0", "3"), "--samples": words("2"),
         "--out": words("page.html")},
        {"analyze_gradients.analyze_run": _begin},
    ),
    "benchmark": (
        (),
        {"--benchmarks": words("local", ("attention", "decoding")), "--shrink": words("64"),
         "--scores": words("dot", ("dot", "additive")), "--out": words("out.json")},
        {},
    ),
    "reproduce": (
        (),
        {"worked_example": words(()), "--quick": words(()), "--force": words(())},
        {"experiments.lab.conduct": _begin},
    ),
}  # fmt: skip


@functools.cache
def trained_run() -> dict[str, bytes]:
    """Returns the files of a run of two seeds."""
    return {f"run/{name}": data for name, data in files_below(run_of_two_seeds()).items()}


def files_below(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@contextlib.contextmanager
def folder_of(run: bool):
    """Makes a temporary folder the current one, with the folder of a run in it if asked."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in trained_run().items() if run else ():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_bytes(content)
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(here)


def run(name, arguments):
    """Runs a command in the current folder; returns its status, or "begun", and what it printed."""
    module, printed = load(f"scripts/{name}.py"), io.StringIO()
    replaced = dict(COMMANDS[name][2])
    if name == "benchmark":
        begun = {
            key: tuple(each._replace(cases=lambda options: {"case": _begin}) for each in value)
            for key, value in module.BENCHMARKS.items()
        }
        replaced["benchmark.BENCHMARKS"] = begun
    if name == "reproduce":
        replaced["reproduce.ROOT"] = Path.cwd()
    with contextlib.ExitStack() as stack:
        for target, value in replaced.items():
            stack.enter_context(mock.patch(target, value))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("COLUMNS", "200")
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        try:
            status = call(module, *arguments, monkeypatch=patch)
        except _Begun:
            status = "begun"
    return status, printed.getvalue()


def check_begins(status, printed):
    """reproduce.py ends with status 1 if a claim of an experiment is a MISS, and says which."""
    assert status in ("begun", 0) or (status == 1 and "MISS: " in printed), (status, printed)
    assert "Traceback" not in printed


def check_refused(status, printed):
    assert status == 2, (status, printed[-300:])
    assert "Traceback" not in printed
    assert 0 < len(printed.strip()) <= 4000


def flat(chosen):
    """Returns the words of {option: its words}; those without an option come first."""
    order = sorted(chosen, key=lambda option: option.startswith("--"))
    values = {o: (v,) if isinstance(v, str) else v for o, v in chosen.items()}
    return [word for option in order for word in (option, *values[option])]


@pytest.mark.parametrize("name", COMMANDS)
@examples(2)
@given(data=st.data())
def test_a_right_command_line_begins_and_a_wrong_one_leaves_no_file(name, data):
    """Wrong numbers, each with the name that the error has, are in the tests of the commands."""
    needed, right, _ = COMMANDS[name]
    chosen = data.draw(st.fixed_dictionaries({}, optional=right))
    with folder_of("run" in needed and name != "train"):
        check_begins(*run(name, [*needed, *flat(chosen)]))
    option = data.draw(st.sampled_from([*right, "--bogus"]))
    value = "nowhere/½" if option == "--out" else "½"
    with folder_of("run" in needed and name != "train") as folder:
        before = files_below(folder)
        check_refused(*run(name, [*needed, *flat(chosen | {option: value})]))
        assert files_below(folder) == before


# --- damaged folders of runs ---

READERS = {
    "evaluate": ["--workdir", "run", "--out", "out.json"],
    "answers": ["--inputs", "abc", "--workdir", "run", "--figure", "a.png"],
    "analyze_gradients": ["--workdir", "run", "--out", "page.html"],
    "train": ["--workdir", "run", "--resume", *OPTIONS],
}


def rewritten(**changes):
    """Changes settings of the model in config.json."""

    def damage(run):
        content = json.loads((run / "config.json").read_text())
        content["model"] |= changes
        (run / "config.json").write_text(json.dumps(content))

    return damage


def flipped(run):
    """Flips a bit of every file of every state."""
    for path in (run / "checkpoints").glob("*/state/**/d/*"):
        data, middle = path.read_bytes(), path.stat().st_size // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])


DAMAGED_SETTINGS = {
    "no settings": lambda run: (run / "config.json").unlink(),
    "half of the settings": lambda run: (run / "config.json").write_text('{"model": {}'),
    "other settings": lambda run: (run / "config.json").write_text("[]"),
    "a text for a number": rewritten(dim="x"),
    "a number for a text": rewritten(positions=3),
    "a setting too many": rewritten(other=1),
}
DAMAGES = DAMAGED_SETTINGS | {
    "no states": lambda run: shutil.rmtree(run / "checkpoints"),
    "damaged states": flipped,
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_folder_is_told_in_a_short_message_and_left_as_it_is(name):
    # Two commands load the states after they begin.
    for kind in DAMAGES if name not in ("train", "analyze_gradients") else DAMAGED_SETTINGS:
        with folder_of(True) as folder:
            DAMAGES[kind](folder / "run")
            before = files_below(folder)
            check_refused(*run(name, READERS[name]))
            assert files_below(folder) == before, kind


@pytest.mark.parametrize("name", READERS)
def test_a_whole_folder_is_read_and_so_is_one_with_a_damaged_newest_state(name):
    with folder_of(True) as folder:
        if name in ("evaluate", "answers"):
            for path in (folder / "run" / "checkpoints").glob("6/state/**/d/*"):
                path.write_bytes(path.read_bytes()[:-9])
        check_begins(*run(name, READERS[name]))
