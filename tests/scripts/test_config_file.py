"""--config: a file is the options that it holds; a run's config.json repeats the run."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import toy_task
from command_lines import check_error, load
from saved_files import assert_bits_equal, snapshot, without_speed
from stand_in_training import TASK, run_of_two_seeds
from toy_task import saved_state

from attention_jax.commands.config_file import read_settings
from attention_jax.runs.run_folder import read_json
from attention_jax.training.identity import task_in
from experiments import pages

train, sweep = load("scripts/train.py"), load("scripts/sweep.py")

FLAT = "dim: 32\nlearning-rate: 1e-3\nscore: additive(hidden_dim=8)\nmask_padding: off\n"
OPTIONS = "--dim 32 --learning-rate 0.001 --score additive(hidden_dim=8) --no-mask-padding"
NESTED = "model: {dim: 32}\ntrain:\n  log_every: 5\n  checkpoint_every: 10\nletters: 9"
MANY = "mesh: {data: 4, seed: 2}\nlog_gradients: {every: 50}\nself_attention_score: null"


@pytest.mark.parametrize(
    ("text", "line", "options"),
    [
        (FLAT, "", OPTIONS),
        (FLAT, "--dim 16 --mask-padding", f"{OPTIONS} --dim 16 --mask-padding"),
        (NESTED, "", "--dim 32 --log-every 5 --checkpoint-every 10 --letters 9"),
        ("log_every: 30", "--checkpoint-every 60", "--log-every 30 --checkpoint-every 60"),
        (MANY, "", "--mesh data=4 seed=2 --log-gradients every=50 --self-attention-score None"),
        ("mesh: data=4 seed=2", "--mesh data=2", "--mesh data=2"),
        ("log_gradients: []", "", "--log-gradients"),
        ("optimizer: optax:lion", "--optimizer adam", ""),
        ("task: text\ntext: 2026-01-02", "", "--task text --text 2026-01-02"),
        ("task: recall", "--task sort", "--task sort"),
        ("optimizer: optax:lion", "", "--optimizer optax:lion --weight-decay 0"),
        ("weight_decay: 0.1", "--optimizer=optax:lion", "--optimizer optax:lion"),
        ('{"dim": 32, "learning_rate": 1e-3, "mask_padding": true, "batch_size": 3}', "",
         "--dim 32 --learning-rate 1e-3 --batch-size 3"),
    ],
)  # fmt: skip
def test_a_file_is_its_options(tmp_path, text, line, options):
    (tmp_path / "run.yaml").write_text(text)
    with_file = ["--config", str(tmp_path / "run.yaml"), *shlex.split(line)]
    found, expected = (
        train.arguments_of(["--workdir", "run", *words])
        for words in (with_file, shlex.split(options))
    )
    assert found.task == expected.task
    assert found.options == expected.options
    if "--task" not in options:
        words = ["--workdir", "sweep", "--scores", "dot", "--set", "keep=3,4", *with_file]
        made = [of_train.task for of_train in sweep.arguments_of(words).combinations.values()]
        model = dataclasses.replace(expected.task.model, score="dot")
        trains = [dataclasses.replace(expected.task.train, keep=keep) for keep in (3, 4)]
        assert [(task.model, task.train) for task in made] == [(model, each) for each in trains]


def test_settings_and_pages_are_utf_8_in_any_locale(tmp_path, monkeypatch):
    def read_in_ascii(path, encoding="ascii", errors=None):
        return path.read_bytes().decode(encoding)

    monkeypatch.setattr(Path, "read_text", read_in_ascii)
    path = tmp_path / "grün.yaml"
    path.write_bytes("text: grün.txt".encode())
    assert read_settings(path) == {"text": "grün.txt"}
    path.write_bytes('{"text": "grün.txt"}'.encode())
    assert read_settings(path) == read_json(path) == {"text": "grün.txt"}
    path.write_bytes("±\n<!-- begin index -->\n<!-- end index -->".encode())
    monkeypatch.setattr(pages, "pages", lambda: [path])
    monkeypatch.setattr(pages, "part_of", lambda part, folder: "±")
    pages.write_pages()
    assert path.read_bytes().decode().splitlines()[2] == "±"


def test_the_config_json_of_a_run_repeats_it(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    path = run_of_two_seeds() / "config.json"
    assert train.arguments_of(["--workdir", "new", "--config", str(path)]).task == TASK
    earlier = json.loads(path.read_text())
    del earlier["model"]["fast_variance"], earlier["train"]["warmup_from_0"]
    Path("earlier.json").write_text(json.dumps(earlier))
    repeated = train.arguments_of(["--workdir", "new", "--config", "earlier.json"]).task
    assert repeated.model.fast_variance
    assert repeated.train.warmup_from_0
    saved = "--seeds 2 --steps 4 --log-every 2 --checkpoint-every 2 --batch-size 5 --clip-norm inf"
    words = [*saved.split(), "--task", "toy_task:Toy", "--optimizer", "optax:lion"]
    assert command("train", "--workdir", "old", *words)[0] == 0
    assert command("train", "--workdir", "new", "--config", "old/config.json")[0] == 0
    for name in ("metrics.jsonl", "config.json"):
        assert without_speed(Path("old", name)) == without_speed(Path("new", name))
    task = task_in("new")
    assert_bits_equal(*(saved_state(task, Path(name)) for name in ("old", "new")))
    before = snapshot(tmp_path)
    monkeypatch.setattr(toy_task.Toy, "dim", 4)
    found = command("train", "--workdir", "other", "--config", "old/config.json")
    check_error(found, "old/config.json", "toy_task:Toy")
    assert snapshot(tmp_path) == before


def edited(**changes):
    return lambda content: json.dumps({**content, **changes})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("leters: 12", ["leters", "'letters'"]),
        ("model: {heads: 2}", ["model.heads", "'model.num_heads'"]),
        ("model: {steps: 2}", ["model.steps"]),
        ("workdir: run", ["workdir"]),
        ("dim: wide", ["--dim", "INT", "wide"]),
        ("dim: 1.5", ["--dim", "INT", "1.5"]),
        ("dim: [3, 4]", ["dim", "'3', '4'"]),
        ("dim: {a: 3}", ["dim", "'a'"]),
        ("dim:", ["--dim", "INT"]),
        ("schedule: up", ["--schedule", "cosine", "up"]),
        ("mask_padding: maybe", ["mask_padding", "true", "maybe"]),
        ("dim: 8\nmodel: {dim: 8}", ["dim", "twice"]),
        ("task: recall\nletters: 3", ["letters"]),
        ("- dim", ["option: value"]),
        ("", ["option: value"]),
        ("dim: 3: 4", ["line 1"]),
        ("a: &x [*x]", ["recursive"]),
        ('{"dim": 32', ["cannot be read"]),
        (edited(leters=3), ["'leters'"]),
        (edited(scores={}), ["damaged"]),
        (edited(optimizer_program={"program": "0"}), ["optimizer"]),
        (None, ["No such file"]),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(tmp_path, monkeypatch, command, text, named):
    monkeypatch.chdir(tmp_path)
    if callable(text):
        text = text(json.loads((run_of_two_seeds() / "config.json").read_text()))
    if text is not None:
        Path("run.yaml").write_text(text)
    before = snapshot(tmp_path)
    found = command("train", "--workdir", "run", "--config", "run.yaml")
    check_error(found, "config run.yaml", *named)
    assert snapshot(tmp_path) == before
