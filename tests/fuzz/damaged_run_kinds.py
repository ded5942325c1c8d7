"""Kinds for damaged run folders, and the commands that read them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_line_kinds import (
    ANALYZE,
    EVALUATE,
    REVERSE,
    TRAIN,
    CommandKind,
    Run,
    run,
    trained_run,
)
from hypothesis import strategies as st

Damage = Callable[[Path], None]


# --- config.json ---

NO_JSON = ["", "{", "null", "[]", "3", '"text"', "{}", "NaN", '{"model": {}', "\x00", "true"]
NO_SETTINGS = {  # setting -> invalid values
    "model": [3, [], None, "scaled", True],
    "loop": [3, [], None, "x"],
    "batch_size": [0, -1, 2.5, "3", None, [3], {}],
    "min_length": [0, -1, 2.5, "3", None, 100],
    "max_length": [0, -1, 2.5, "3", None],
    "letters": [0, 27, 2.5, "3", None],
    "learning_rate": [0, -1, "x", None, []],
    "clip_norm": [0, -1, "x", None],
    "coverage_weight": [-1, "x", None],
    "model.score": [3, None, "skaled", [], {}, "nowhere:Mine"],
    "model.block.dim": [0, -1, 2.5, "4", None, [4], 7],
    "model.block.hidden_dim": [0, -1, 2.5, "3", None],
    "model.block.num_heads": [0, -1, 2.5, "1", None],
    "model.encoder_layers": [-1, 2.5, "1", None],
    "model.decoder_layers": [0, -1, 2.5, "1", None],
    "model.block.dropout_rate": [1, -0.5, "x", None],
    "model.block.norm": ["x", 3, None],
    "model.block.activation": ["x", 3, None],
    "model.cross_attention.attention": ["x", 3, None],
    "model.positions": ["rotary", 3, [], None, {"kind": "x"}, {"limit": "x"}, {"other": 1}],
    "model.other": [1],
    "scores": [3, None, [], "scaled", {"score": 3}, {"score": {}}, {"score": {"class": []}}],
    "normalizers": [3, None, [], "softmax", {"normalizer": 3}, {"normalizer": {"class": []}}],
    "normalizers.normalizer": [{"class": "x.Y", "fields": {}}, None, []],
    "scores.score": [{"class": "x.Y", "fields": {}}, {"class": 3, "fields": None}, None, []],
    "scores.score.class": ["x", "", 3, None, []],
    "scores.score.fields": [3, None, [], {"nothing": 1}, "x"],
    "loop.seeds": [0, -1, 2.5, "2", None],
    "loop.steps": [0, -1, 2.5, "2", None],
    "loop.log_every": [0, -1, 2.5, "1", None],
    "loop.checkpoint_every": [0, -1, 2.5, "1", None],
    "loop.first_seed": [-1, 2.5, "0", None, 2**31],
    "loop.other": [1],
    "other": [1],
}
# Valid settings, but not those of the run that wrote these checkpoints.
OF_OTHERS = {
    "model.block.dim": 16,
    "model.block.hidden_dim": 9,
    "model.encoder_layers": 2,
    "loop.seeds": 3,
}


def _written(text: str | bytes) -> Damage:
    def damage(folder: Path) -> None:
        data = text if isinstance(text, bytes) else text.encode()
        (folder / "config.json").write_bytes(data)

    return damage


def _setting(name: str, value: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        *above, last = name.split(".")
        part = config
        for key in above:
            part = part[key]
        part[last] = value
        path.write_text(json.dumps(config))

    return damage


def _without(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        del config[name]
        path.write_text(json.dumps(config))

    return damage


# --- folders and checkpoints ---


def _removed(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()


def _a_file(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.write_text("mine")

    return damage


def _a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def _bytes_of(steps: str, change: Callable[[bytes], bytes]) -> Damage:
    """Returns every file with array data of the given steps."""

    def damage(folder: Path) -> None:
        for path in (folder / "checkpoints").glob(f"{steps}/state/**/d/*"):
            path.write_bytes(change(path.read_bytes()))

    return damage


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


DAMAGES: dict[str, tuple[Damage, bool]] = {  # name -> (damage, whether the command still works)
    **{f"config.json is {text!r}": (_written(text), False) for text in NO_JSON},
    "config.json is not UTF-8": (_written(b"\xff\xfe{}"), False),
    **{
        f"{name} is {value!r}": (_setting(name, value), False)
        for name, values in NO_SETTINGS.items() for value in values
    },
    **{f"without {name}": (_without(name), False) for name in ("model", "loop")},
    **{f"{name} is another": (_setting(name, x), False) for name, x in OF_OTHERS.items()},
    "config.json is missing": (_removed("config.json"), False),
    "config.json is a folder": (_a_folder, False),
    "no checkpoints": (_removed("checkpoints"), False),
    "checkpoints is empty": (_emptied, False),
    "checkpoints is a file": (_a_file("checkpoints"), False),
    "all checkpoints are cut": (_bytes_of("*", _cut), False),
    "all checkpoints are empty": (_bytes_of("*", lambda data: b""), False),
    "a byte of all checkpoints is flipped": (_bytes_of("*", _flipped), False),
    "the newest checkpoint is cut": (_bytes_of("2", _cut), True),
    "a byte of the newest checkpoint is flipped": (_bytes_of("2", _flipped), True),
    "no env.json": (_removed("env.json"), True),
    "nothing": (lambda folder: None, True),
}  # fmt: skip

COMMANDS = {
    "evaluate": (EVALUATE, ["--workdir", "run", "--strings", "3", "--out", "out.json"]),
    "reverse": (REVERSE, ["abc", "--workdir", "run", "--figure", "a.png"]),
    "analyze_gradients": (ANALYZE, ["--workdir", "run", "--out", "page.html"]),
}
# analyze_gradients.py would find these only while loading the states, which it never begins here.
WHILE_LOADING = ("is another", "checkpoints are cut", "checkpoints are empty", "is cut", "flipped")
cases = st.tuples(st.sampled_from(list(COMMANDS)), st.sampled_from(list(DAMAGES))).filter(
    lambda case: case[0] != "analyze_gradients" or not case[1].endswith(WHILE_LOADING)
)


def call(case: tuple[str, str]) -> Run:
    name, what = case
    command, words = COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(trained_run(), copy)
        DAMAGES[what][0](copy)
        return run(name, words, command.replaced, Path(folder))


# --- train.py --resume ---

FOLDERS: dict[str, tuple[Damage, bool]] = {  # content -> (damage, whether training resumes)
    "nothing": (lambda folder: shutil.rmtree(folder), True),
    "an empty folder": (lambda folder: (shutil.rmtree(folder), folder.mkdir())[1], True),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("mine"))[0], False),
    "other files": (_removed("config.json"), False),
    **{name: damage for name, damage in DAMAGES.items() if name.startswith(("config.json", "model",
                                                                             "loop", "without"))},
}  # fmt: skip


def call_train(what: str) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(trained_run(), copy)
        FOLDERS[what][0](copy)
        words = ["--workdir", "run", "--resume", "--score", "dot", "--dim", "4"]
        words += ["--hidden-dim", "3", "--encoder-layers", "0", "--seeds", "2", "--steps", "2"]
        words += ["--log-every", "1", "--checkpoint-every", "1", "--batch-size", "3"]
        words += ["--max-length", "4"]
        return run("train", words, TRAIN.replaced, Path(folder))


KINDS = [
    CommandKind("damaged run folders", cases, call, lambda case: DAMAGES[case[1]][1], None, 100, 5),
    CommandKind("train.py --resume, damaged folders", st.sampled_from(list(FOLDERS)), call_train,
                lambda what: FOLDERS[what][1], None, len(FOLDERS), 20),
]  # fmt: skip
