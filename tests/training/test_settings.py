"""config.json: what it knows of a task, what may change, and a user's task known by its program."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from saved_files import assert_bits_equal, snapshot, without_speed
from toy_task import Toy, toy, train_toy

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.metrics_file import add_line, read_lines
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.translation.task import TRAIN, Translation
from attention_jax.training.identity import config_of, task_in
from attention_jax.training.run import load_run, load_states, prepare, train_run
from attention_jax.training.run_results import evaluated_run
from attention_jax.training.task import TrainConfig

pytestmark = pytest.mark.usefixtures("standard_promotion")


TOY = TrainConfig(seeds=2, batch_size=7, steps=2, log_every=1, checkpoint_every=2)

# --- names and settings ---


def test_settings_that_config_json_lacks_have_their_defaults(tmp_path):
    content = config_of(Reversal(letters=5))
    del content["model"]["dim"], content["train"]["steps"], content["max_length"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert task_in(tmp_path) == Reversal(letters=5)
    del content["model"]["fast_variance"]  # which models had before there was this setting
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert task_in(tmp_path).model == dataclasses.replace(Reversal().model, fast_variance=True)
    content = config_of(Translation(Path("a"), Path("b"))) | {"precision": "bfloat16"}
    del content["model"]["dtype"]  # had this name
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert task_in(tmp_path).model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "reversal", "loop": {}}, "must name its task as module:Name"),
        ({"task": "nowhere:Task"}, "nowhere"),
        ({"leters": 5}, "has the setting 'leters', which .* did you mean 'letters'"),
        ({"model": {"heads": 2}}, "has the setting 'heads'"),
        ({"letters": 99}, "letters must be at most 26; got 99"),
        ({"train": 3}, "train must be a TrainConfig; got 3"),
        ({"train": {"steps": [2]}}, "steps must be an integer"),
        ({"model": {"dim": None}}, "dim"),
    ],
)
def test_a_config_json_that_cannot_be_read(tmp_path, changes, message):
    content = {**config_of(Reversal()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"^workdir {tmp_path}: .*{message}"):
        task_in(tmp_path)


@dataclasses.dataclass(frozen=True)
class Varied(Toy):
    """Settings of every kind that config.json holds."""

    sizes: Any = (3, (0.5, "a"), (), None)
    path: Path | None = Path("data/text")
    nothing: Path | None = None
    number: Any = np.float32(0.1)
    count: Any = np.int64(3)
    limit: float = float("inf")
    yes: bool = True


def test_settings_are_what_config_json_gives_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = Varied()
    train_run(dataclasses.replace(task, train=TOY), tmp_path / "run")
    monkeypatch.chdir("/")
    read = load_run(tmp_path / "run").task
    assert read.path == tmp_path / "data" / "text"  # of the folder where the run began
    assert dataclasses.replace(read, path=task.path, train=task.train) == task
    assert type(read.count) is int


# --- resuming with other settings ---


@dataclasses.dataclass(frozen=True)
class Lettered(Toy):
    """A task with a setting of its own."""

    letters: int = 26


def lettered(steps, schedule="constant", letters=26):
    saved = {"log_every": 2, "checkpoint_every": 4, "keep": 9}
    train = TrainConfig(seeds=2, batch_size=5, steps=steps, schedule=schedule, **saved)
    return Lettered(train=train, letters=letters)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extended")
    with mock.patch.object(Checkpoints, "save", None), pytest.raises(TypeError):
        train_run(lettered(6), folder, log_gradients=2)  # it starts over, without a checkpoint
    for steps in (6, 12):
        assert train_run(lettered(steps), folder, resume=True, log_gradients=2).step == steps
        assert task_in(folder).train.steps == steps
        if steps == 6:  # as if it had gone on, and been killed before its next checkpoint
            for name in ("metrics", "gradients"):
                add_line(folder / f"{name}.jsonl", {"step": 8})
    return folder


def test_an_extended_run_is_the_run_of_so_many_steps(tmp_path, extended):
    train_run(lettered(12), tmp_path, log_gradients=2)
    assert_bits_equal(*(load_states(folder)[1][12] for folder in (tmp_path, extended)))
    for name in ("config.json", "metrics.jsonl", "gradients.jsonl"):
        assert without_speed(tmp_path / name) == without_speed(extended / name)
    _, *sessions = read_lines(extended / "timing.jsonl")  # the first one failed
    assert evaluated_run(extended).seconds == sessions[0]["seconds"] + sessions[1]["seconds"]
    assert [(line["from_step"], line["to_step"]) for line in sessions] == [(0, 6), (6, 12)]


@pytest.mark.parametrize("log_every", [1, 4])
def test_settings_that_no_parameter_depends_on_may_change(tmp_path, extended, log_every):
    train_run(lettered(6), tmp_path)
    free = {"log_every": log_every, "checkpoint_every": 12, "keep": 1, "keep_best": 1}
    task = Lettered(train=dataclasses.replace(lettered(12).train, **free))
    train_run(task, tmp_path, resume=True)
    found, expected = (load_states(folder)[1] for folder in (tmp_path, extended))
    assert_bits_equal(found[12], expected[12])
    assert len(found) <= 3  # the state of step 0 is computed
    assert task_in(tmp_path) == task
    steps = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert steps == [2, 4, 6, *(step for step in range(7, 13) if step % log_every == 0)]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lettered(10), "steps was 12, now 10, and the run has reached step 12: resume"),
        (lettered(14, letters=9), r"letters was 26, now 9; train\.steps was 12, now 14\. Resume"),
        (lettered(12, "cosine"), r"train\.schedule was 'constant', now 'cosine'"),
        (Reversal(), "is a run of task test_settings:Lettered; got attention_jax.tasks:Reversal"),
    ],
)
def test_other_settings_are_refused(extended, task, message):
    before = snapshot(extended)
    for function in (train_run, prepare):
        with pytest.raises(ValueError, match=f"^workdir {extended}.*{message}"):
            function(task, extended, resume=True)
    assert snapshot(extended) == before


def test_steps_that_the_rate_depends_on_cannot_change(tmp_path):
    prepare(lettered(4, "cosine"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(lettered(4, "cosine"))))
    for steps in (3, 8):
        with pytest.raises(ValueError, match=f"steps was 4, now {steps}, .* cosine to 0 at step 4"):
            train_run(lettered(steps, "cosine"), tmp_path, resume=True)
    assert TRAIN.rate_depends_on_steps is False


@pytest.mark.parametrize(("version", "before", "lines"), [
    ((0, 11, 9), 99, 1), ((0, 11, 9), None, 0), ((0, 12, 0), 99, 0)
])  # fmt: skip
def test_other_processors_are_one_line_where_bits_depend_on_them(
    extended, tmp_path, monkeypatch, capsys, version, before, lines
):
    shutil.copytree(extended, tmp_path, dirs_exist_ok=True)
    environment = json.loads((tmp_path / "env.json").read_text())
    before = environment["usable_cpus"] if before is None else before
    (tmp_path / "env.json").write_text(json.dumps(environment | {"usable_cpus": before}))
    monkeypatch.setattr(jax, "__version_info__", version)
    train_run(lettered(12), tmp_path, resume=True)
    assert capsys.readouterr().err.count("began on 99 usable processors and goes on with") == lines


# --- a user's task ---


@dataclasses.dataclass(frozen=True)
class Mine(Toy):
    """A task whose formula can change between training and evaluation."""

    factor: ClassVar[float] = 1.0

    def loss(self, params, batch, rng):
        loss, metrics = super().loss(params, batch, rng)
        return self.factor * loss, metrics


def mine(**train):
    return toy(Mine, steps=4, log_every=2, checkpoint_every=2, **train)


def test_an_edited_task_is_refused_with_both_digests(tmp_path, monkeypatch):
    train_toy(mine(), tmp_path)
    before = snapshot(tmp_path)
    monkeypatch.setattr(Mine, "factor", 2.0)
    message = (
        "task test_settings:Mine was program [0-9a-f]{12} .*, and is [0-9a-f]{12} now,"
        " which gives other numbers; restore"
    )
    for use in (
        lambda: load_run(tmp_path),
        lambda: load_states(tmp_path),
        lambda: train_run(mine(), tmp_path, resume=True),
        lambda: prepare(mine(), tmp_path, resume=True),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert snapshot(tmp_path) == before
    monkeypatch.setattr(Mine, "factor", 1.0)
    with pytest.raises(ValueError, match=r"train\.batch_size was 7, now 9"):
        train_run(mine(batch_size=9), tmp_path, resume=True)
    assert load_run(tmp_path).step == 4


def stored_as(folder, **changes):
    """Changes what config.json holds; None leaves an entry out."""
    content = json.loads((folder / "config.json").read_text()) | changes
    content = {name: value for name, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))


@dataclasses.dataclass(frozen=True)
class Shown(Mine):
    """A task whose parts can change one by one."""

    shift: ClassVar[dict[str, float]] = {}

    def init(self, rng):
        return {"w": super().init(rng)["w"] + self.shift.get("init", 0.0)}

    def batch(self, rng, *, size, length=None):
        batch = super().batch(rng, size=size)
        return batch | {"y": batch["y"] + self.shift.get("batch", 0.0)}

    def loss(self, params, batch, rng):
        still = jax.lax.stop_gradient(params["w"])
        loss, metrics = super().loss(params, batch, rng)
        added = self.shift.get("loss", 0.0), self.shift.get("gradient", 0.0)
        return loss + added[0] + added[1] * jnp.sum(params["w"] - still), metrics

    def optimizer(self):
        later = optax.piecewise_constant_schedule(0.05, {100: 1 + self.shift.get("rate", 0.0)})
        return optax.sgd(later)


@pytest.mark.parametrize("jax_version", [jax.__version__, "0.9"])
def test_a_rewritten_task_is_the_same_if_its_numbers_are(tmp_path, monkeypatch, jax_version):
    task = toy(Shown, steps=2, log_every=2, checkpoint_every=2, schedule="constant")
    train_toy(task, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored_as(tmp_path, program="0", jax=jax_version)
    with pytest.warns(UserWarning, match=r"program 0 when .*, which gives the same numbers$"):
        assert load_run(tmp_path).step == 2
    other = r"Shown was program 0 .* now, which gives other numbers; restore .* in another folder$"
    for part in ("init", "batch", "loss", "gradient", "rate"):
        monkeypatch.setattr(Shown, "shift", {part: 2e-3})
        for use in (load_run, lambda folder: train_run(task, folder, resume=True)):
            with pytest.raises(ValueError, match=other):
                use(tmp_path)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="the same numbers"):
        train_run(task, tmp_path, resume=True)
    assert json.loads((tmp_path / "config.json").read_text()) == stored


class Narrow(Mine):
    """A task that computes in bfloat16."""

    def loss(self, params, batch, rng):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), params)
        return super().loss(params, batch, rng)


@pytest.mark.parametrize(("cls", "shift"), [(Mine, 1e-3), (Narrow, 0.1)])
def test_numbers_are_equal_up_to_the_rounding_of_their_floats(tmp_path, cls, shift):
    task = toy(cls, steps=2, log_every=2, checkpoint_every=2)
    train_toy(task, tmp_path)
    numbers = json.loads((tmp_path / "config.json").read_text())["program_numbers"]
    for factor, use in (
        (0.1, pytest.warns(UserWarning, match="the same numbers")),
        (1.0, pytest.raises(ValueError, match="other numbers")),
    ):
        moved = [numbers[0], *(number + factor * shift for number in numbers[1:])]
        stored_as(tmp_path, program="0", program_numbers=moved)
        with use:
            load_run(tmp_path)


@dataclasses.dataclass(frozen=True)
class Whole(Toy):
    """Each batch is all of the data."""

    def batch(self, rng, *, size, length=None):
        return super().batch(jax.random.key(0), size=size)


def test_one_batch_for_every_key_is_warned_of_once(tmp_path):
    with pytest.warns(UserWarning, match=r"Whole: batch\(rng, size=7\) gives the same batch"):
        train_toy(toy(Whole, steps=1, log_every=1, checkpoint_every=1), tmp_path)
    train_toy(toy(Whole, steps=1, log_every=1, checkpoint_every=1), tmp_path)


def test_without_numbers_the_digest_stays_until_the_same_program_is_seen(tmp_path):
    train_toy(mine(), tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    then = {"program": "0", "jax": "0.9", "program_numbers": None}  # as earlier versions wrote it
    stored_as(tmp_path, **then)
    for use in (load_run, lambda folder: train_run(mine(), folder, resume=True)):
        with pytest.warns(UserWarning, match="may be because jax was 0.9 then") as warned:
            use(tmp_path)
        assert len({str(each.message) for each in warned}) == 1
    now = json.loads((tmp_path / "config.json").read_text())
    assert now == {name: value for name, value in (stored | then).items() if value is not None}
    stored_as(tmp_path, program=stored["program"], jax=jax.__version__)
    train_run(mine(), tmp_path, resume=True)
    assert json.loads((tmp_path / "config.json").read_text()) == stored


@dataclasses.dataclass(frozen=True)
class OwnRate(Toy):
    """A task whose optimiser can change, and may depend on the number of steps."""

    rate_of: ClassVar = None

    def optimizer(self):
        return optax.sgd(self.rate_of(self.train.steps), momentum=0.9)


def test_an_optimizer_is_a_part_of_the_program(tmp_path, monkeypatch):
    def task(steps, rate_of):
        monkeypatch.setattr(OwnRate, "rate_of", staticmethod(rate_of))
        return toy(OwnRate, steps=steps, log_every=2, checkpoint_every=2, schedule="constant")

    constant, falling = (lambda steps: 0.5), (lambda steps: 2 / steps)
    prepare(task(4, falling), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(task(4, constant))))
    prepare(task(8, constant), tmp_path, resume=True)
    prepare(task(4, falling), tmp_path, resume=True)  # the same numbers
    with pytest.raises(ValueError, match=r"OwnRate was program .*, and is .* now; restore"):
        prepare(task(4, lambda steps: 0.25), tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"steps was 4, now 8, and the program of .* depends on"):
        prepare(task(8, falling), tmp_path, resume=True)
