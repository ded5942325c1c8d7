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

import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import call, load
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from attention_jax.tasks.evaluation import Accuracies


class _Begun(BaseException):
    """Raised where the work would begin, after all checks."""


def _begin(*_, **__):
    raise _Begun


def _only_saved(_task, _feed, _layout, state, records, _interruption):
    """Replaces training: saves two checkpoints and learns nothing."""
    for step in (1, 2):
        state = state._replace(step=jnp.full_like(state.step, step))
        records.checkpoints.save(step, state)
    return state


def _accuracies(task, params, lengths):
    return {length: Accuracies(*(np.array([0.5, 0.25]) for _ in range(3))) for length in lengths}


def _best_answers(model, source, lengths, *, max_length, beams):
    return jnp.zeros((len(source), max_length), jnp.int32)


def _panels(task, params, batch, labels):
    return {
        name: (np.ones((len(rows), len(columns))), rows, columns)
        for name, (rows, columns) in labels.items()
    }


SMALL = (  # the settings of `trained_run`
    "--score dot --dim 4 --hidden-dim 3 --encoder-layers 0 --seeds 2 --steps 2 --log-every 1"
    " --checkpoint-every 1 --batch-size 3 --max-length 4"
)

# --- command lines ---

no_number = st.sampled_from(["", "x", "1.5.2", "0x", "--", "1e", "None", "½", "[1]"])
no_count = no_number | st.sampled_from(["0", "1.5", "1e3", "nan"]) | st.integers(-9, -1).map(str)
no_rate = no_number | st.sampled_from(["nan", "-0.1"])
no_word = st.sampled_from(["", "Pre", "skaled", "3"])
count = st.integers(1, 9).map(str)
unknown = {"--bogus": st.sampled_from([(), ("3",)])}


def counts(names, values=no_count):
    return dict.fromkeys((f"--{name}" for name in names.split()), values)


def words(*values):
    """Draws one of the values: one word, or a tuple of words."""
    return st.sampled_from(values)


# {command: (words that it needs, {option: right words}, {option: wrong words}, its slow work)}
SEQUENCES = "attention_jax.tasks.sequences"
COMMANDS = {
    "train": (
        ("--workdir", "run"),
        {
            "--score": words("additive", "dot", "general", "scaled", "cosine"),
            **counts("seeds batch-size hidden-dim encoder-layers decoder-layers", count),
            "--steps": words("50", "100"), "--dim": words("8", "16"), "--letters": words("1", "26"),
            "--max-length": words("9", "8"), "--learning-rate": words("0.1", "1e-3"),
            "--clip-norm": words("2", "inf"), "--dropout-rate": words("0", "0.5"),
            "--norm": words("pre", "post"), "--activation": words("relu", "swiglu"),
            "--positions": words("learned", "none"), "--position-anchor": words("start", "both"),
            "--log-gradients": words((), "every=25"), "--normalize-qk": words(()),
            "--resume": words(()), "--no-mask-padding": words(()),
        },
        {
            **counts("seeds steps batch-size dim hidden-dim letters decoder-layers num-heads"),
            **counts("log-every min-length max-length checkpoint-every"),
            **counts("learning-rate clip-norm", no_rate | words("0")),
            **counts("weight-decay coverage-weight dropout-rate", no_rate),
            **counts("score norm activation attention", no_word),
            "--normalizer": words("", "softmx", "log_scaled(start=0)", "softmax("),
            "--first-seed": words("-1", "2147483648", "1.5"), "--num-key-heads": words("0", "3"),
            "--encoder-layers": words("-1", "1.5"), "--log-gradients": words("every=0", "every=7"),
            "--positions": words((), "polar"), "--position-scale": words("nan", "0"),
            "--position-limit": words("0", "1.5"), "--position-anchor": words("top"),
            "--num-heads": words("3"), "word": words(()), "--resume": words("yes"),
        },
        {"attention_jax.training.run.Checkpoints": _begin},
    ),
    "evaluate": (
        ("--workdir", "run"),
        {"--lengths": words("3", ("1", "2")), "--average": words("1", "2"),
         "--out": words("out.json")},
        {**counts("average"), "--lengths": words("0", ("3", "-1"), "x", "3.5"),
         "--out": words(".", "nowhere/out.json", ())},
        {f"{SEQUENCES}.accuracies": _accuracies},
    ),
    "answers": (
        ("--workdir", "run"),
        {"--inputs": words("abc", ("a", "word")), "--seed-index": words("0", "1"), "--beams": count,
         "--figure": words("a.png", "new/a.png")},
        {**counts("beams"), "--seed-index": words("2", "-1", "x", "0.5"),
         "--inputs": words("Hello", "a1"), "--figure": words("a.jpg", ".png/", "run", ())},
        {f"{SEQUENCES}.best_answers": _best_answers, "answers.cross_attention": _panels},
    ),
    "analyze_gradients": (
        ("--workdir", "run"),
        {"--compare": words("run"), "--iterations": words("0", "3"),
         "--samples": words("2"), "--out": words("page.html")},
        {"--compare": words("nowhere"), "--iterations": words("-1", "x"),
         "--samples": words("1", "0"),
         "--out": words("page.txt", "nowhere/page.html", ".")},
        {"analyze_gradients.analyze_run": _begin},
    ),
    "benchmark": (
        (),
        {"--benchmarks": words("local", ("attention", "decoding")), "--shrink": words("64"),
         "--scores": words("dot", ("dot", "additive")), "--out": words("out.json")},
        {**counts("shrink repeats"), "--benchmarks": words("x", ("local", "x"), ""),
         "--scores": words("x", ("dot", "skaled"), ()), "--out": words("nowhere/out.json", ".")},
        {},
    ),
    "reproduce": (
        (),
        {"worked_example": words(()), "--quick": words(()), "--force": words(())},
        {"x": words(()), "": words(()), "--quick": words("yes"), "--names": words("x")},
        {"experiments.lab.conduct": _begin},
    ),
}  # fmt: skip


@functools.cache
def trained_run() -> dict[str, bytes]:
    """Returns the files of a run with two steps and two seeds, made once."""
    with folder_of(False) as folder:
        words = ["--workdir", "run", *SMALL.split()]
        status, _ = run("train", words, {"attention_jax.training.run.train": _only_saved})
        assert status == 0
        return files_below(folder)


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


def run(name, arguments, work=None):
    """Runs a command in the current folder; returns its status, or "begun", and what it printed.

    `work` replaces its slow work, that of COMMANDS by default.
    """
    module, printed = load(f"scripts/{name}.py"), io.StringIO()
    replaced = dict(COMMANDS[name][3] if work is None else work)
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
@examples(3)
@given(data=st.data())
def test_a_right_command_line_begins_and_a_wrong_one_leaves_no_file(name, data):
    needed, right, wrong, _ = COMMANDS[name]
    chosen = data.draw(st.fixed_dictionaries({}, optional=right))
    with folder_of("run" in needed and name != "train"):
        check_begins(*run(name, [*needed, *flat(chosen)]))
    option = data.draw(st.sampled_from([*wrong, *unknown]))
    value = data.draw((wrong | unknown)[option])
    with folder_of("run" in needed and name != "train") as folder:
        before = files_below(folder)
        check_refused(
            *run(name, [*flat({option: value}), *needed, *flat(chosen | {option: value})])
        )
        assert files_below(folder) == before


# --- damaged folders of runs ---

READERS = {
    "evaluate": ["--workdir", "run", "--out", "out.json"],
    "answers": ["--inputs", "abc", "--workdir", "run", "--figure", "a.png"],
    "analyze_gradients": ["--workdir", "run", "--out", "page.html"],
    "train": ["--workdir", "run", "--resume", *SMALL.split()],
}
no_json = st.sampled_from(["", "{", "null", "[]", "3", "NaN", '{"model": {}', "\0"]).map(str.encode)


def settings_of(config, above=()):
    """Yields the path and the value of each setting: ("loop", "steps"), 2."""
    for name, value in config.items():
        yield (*above, name), value
        if isinstance(value, dict):
            yield from settings_of(value, (*above, name))


@st.composite
def wrong_configs(draw) -> bytes:
    """Draws a config.json with one setting of a wrong type or size, or with one too many."""
    config = json.loads(trained_run()["run/config.json"])
    path, value = draw(st.sampled_from(list(settings_of(config))))
    wrong = [[], [3]]
    if isinstance(value, dict):
        wrong += [3, "x", {**value, "other": 1}]
    elif isinstance(value, str):
        wrong += [3, "x", ""]
    elif isinstance(value, bool):
        wrong += [2, "x"]
    elif isinstance(value, int | float):
        wrong += ["3", "x", {}, -1] + [2.5] * isinstance(value, int)
    part = config
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = draw(st.sampled_from(wrong))
    return json.dumps(config).encode()


@st.composite
def damages(draw):
    """Draws a function of a run's folder that leaves nothing to read."""
    kind = draw(st.sampled_from(["config", "config", "config", "gone", "file", "cut", "flip"]))
    content = draw(no_json | wrong_configs())
    name = draw(st.sampled_from(["config.json", "checkpoints"]))
    at = draw(st.floats(0, 0.99))

    def damage(folder):
        if kind == "config":
            (folder / "config.json").write_bytes(content)
        elif kind in ("gone", "file"):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if kind == "file":
                path.write_text("mine")
        else:
            for path in (folder / "checkpoints").glob("*/state/**/d/*"):
                data, middle = path.read_bytes(), int(at * path.stat().st_size)
                rest = bytes([data[middle] ^ 255]) + data[middle + 1 :] if kind == "flip" else b""
                path.write_bytes(data[:middle] + rest)

    damage.__name__ = f"{kind}: {content if kind == 'config' else name if name else at}"
    damage.of_states = kind in ("cut", "flip")
    return damage


@pytest.mark.parametrize("name", READERS)
@examples(5)
@given(damage=damages())
def test_a_damaged_folder_is_told_in_a_short_message_and_left_as_it_is(name, damage):
    if damage.of_states and name in ("train", "analyze_gradients"):
        return  # they load the states after they begin
    with folder_of(True) as folder:
        damage(folder / "run")
        before = files_below(folder)
        check_refused(*run(name, READERS[name]))
        assert files_below(folder) == before


@pytest.mark.parametrize("name", READERS)
def test_a_whole_folder_is_read_and_so_is_one_with_a_damaged_newest_state(name):
    with folder_of(True) as folder:
        if name in ("evaluate", "answers"):
            for path in (folder / "run" / "checkpoints").glob("2/state/**/d/*"):
                path.write_bytes(path.read_bytes()[:-9])
        check_begins(*run(name, READERS[name]))
