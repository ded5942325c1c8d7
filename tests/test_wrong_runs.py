"""A wrong task, setting, run folder or command line ends in one line that names what is wrong.

Nothing is trained before, and no file is made or changed.
"""

import dataclasses
import importlib
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
from command_lines import check_error
from mistakes import refused
from saved_files import snapshot
from stand_in_training import run_of_two_seeds
from toy_task import Toy, toy

from attention_jax.nn import ModelConfig
from attention_jax.scores import Additive
from attention_jax.tasks import Recall, Regression, Reversal, Text, task_of
from attention_jax.tasks.evaluation import accuracies
from attention_jax.tasks.translation.translate import Search
from attention_jax.training.run import TrainedRun, load_run, train_run
from attention_jax.training.run_results import evaluated_run, results_of
from attention_jax.training.sharding import MeshShape
from attention_jax.training.task import Task, TrainConfig
from experiments.translation import translation_comparison


@pytest.fixture(autouse=True)
def _nothing_trains(monkeypatch):
    monkeypatch.setattr("attention_jax.training.step.Compiled.advance", None)


# --- tasks of a user: (class, words of the error) ---

HEAD = """
import dataclasses, enum, math
from typing import Any, ClassVar
import jax, jax.numpy as jnp, numpy as np; draw = jax.random.randint
from attention_jax.nn import ModelConfig
from attention_jax.tasks.sequences import SequenceTask
from attention_jax.tasks.tokens import TokenTask
from attention_jax.training.task import Feed, Result, Task, TrainConfig, Validation
from toy_task import Toy
frozen = dataclasses.dataclass(frozen=True)
class Color(enum.Enum):
    RED = 1
"""


MODEL = "model: ModelConfig = ModelConfig('decoder', dim=4, hidden_dim=0)"


def sequences(*lines, above="@frozen"):
    pair = "def pair(self, rng, length, *, longest): return 2 * ((jnp.full(longest, 3), length),)"
    return _class("SequenceTask", above, "name: ClassVar[str] = 'mine'", MODEL, pair, *lines)


def toys(*lines, above="@frozen", base="Toy"):
    return _class(base, above, *lines)


def tokens(*lines):
    drawn = "def tokens(self, rng): return jnp.ones(self.length, int)"
    asked = "def targets(self, tokens): return tokens"
    words = ("name = 'mine'", MODEL, "vocabulary_size: int = 5", drawn, asked)
    return _class("TokenTask", "@frozen", *words, *lines)


def _class(base, above, *lines):
    return f"{above}\nclass Mine({base}):\n" + "".join(f"    {line}\n" for line in lines)


FIELDS = ("name = 'mine'", "model: Any = None", "train: TrainConfig = TrainConfig(batch_size=5)")
INIT = "def init(self, rng): return {'w': jnp.ones(())}"
LOSS = "def loss(self, params, batch, rng): return params['w'] * jnp.mean(batch), {}"
DRAWN = "def batch(self, rng, *, size, length=None): return "
FED = "def feed(self, folder, *, multiple_of=1): return "
METRICS = "def loss(self, params, batch, rng): return super().loss(params, batch, rng)[0], "
PAIR = "def pair(self, rng, length, *, longest): return 2 * ((draw({}, (longest,), 3, 9), length),)"
TASKS = [
    # what it must define
    (toys(*FIELDS, base="Task"), "evaluate(params"),
    (toys(*FIELDS, INIT, DRAWN + "jnp.ones(size)", LOSS, base="Task"), "evaluate(params"),
    *((toys(f"{name} = Task.{name}"), f"{name}(") for name in ("init", "batch", "loss")),
    (toys("validation = Validation('loss', False)"), "validate(params"),
    (sequences("pair = SequenceTask.pair"), "pair(rng"),
    *((tokens(f"{name} = TokenTask.{name}"), f"{name}(") for name in ("tokens", "targets")),
    # arguments and results of its methods
    (sequences("def pair(self, rng, length): return 1"), "longest"),
    *((toys(f"def {name}(self): return 1"), f"{name} must take") for name in ("init", "evaluate")),
    *((toys(f"def loss(self, params, batch, rng): return {loss}"), "loss(")
      for loss in ("1.0", "jnp.ones(2), {}", "jnp.ones((), int), {}")),
    (toys(DRAWN + "jnp.ones(3) @ jnp.ones(4)"), "batch("),
    (toys(DRAWN + "{'x': np.random.rand(size, 3), 'y': np.random.rand(size)}"), "draw with rng"),
    *((toys(METRICS + f"{{{name}: jnp.ones(())}}"), f"got {name}")
      for name in ("'step'", "'loss'", "'gradient_norm'", "3")),
    (toys("def init(self, rng): return {'a.b': jnp.ones(()), 'a': {'b': jnp.ones(())}}"), "'a.b'"),
    *((toys(FED + fed), "feed(") for fed in ("3", "1 / 0", "Feed(lambda seed, step: 1 / 0)")),
    (toys(FED + "Feed(lambda seed, step: {}, {'w': 3})"), "'w'"),
    (toys("train: TrainConfig = TrainConfig(batch_size=None)"), "batch_size"),
    *((tokens(f"def tokens(self, rng): return {drawn}"), "tokens must")
      for drawn in ("jnp.full(self.length, 5)", "-jnp.ones(self.length, int)", "jnp.ones(3, int)")),
    (tokens("def targets(self, tokens): return tokens + 4"), "targets must"),
    *((make(line), line.split()[0].rstrip(":"))
      for make, line in (
        (toys, "train: Any = 3"), (toys, "validation = 'loss'"), (tokens, "most_asked = 3"),
        (tokens, "vocabulary_size: float = 5.5"), (tokens, "model: Any = None"),
        (sequences, "model: Any = None"), (sequences, "vocabulary = 'abc'"))),
    *((sequences(f"def pair(self, rng, length, *, longest): return {pair}"), named)
      for pair, named in {
        "(jnp.full(longest, 3), length)": "int32 [8] and int32 []",
        "2 * ((jnp.full((1, longest), 3), length),)": "int32 [1, 8]",
        "2 * ((jnp.full(longest, 3.0), length),)": "float32 [8]",
        "jnp.full(int(length), 3)": "broken_task.py, line",
        "((jnp.full(longest, 3), length), (jnp.full(longest, 0), length))": "target_length",
        "((jnp.full(longest, 29), length), (jnp.full(longest, 3), length))": "source_length",
        "2 * ((jnp.full(longest, 3), 2 * length),)": "source_length"}.items()),
    # examples that teach nothing, and answers that pair does not teach
    (sequences(), "pair must draw with its rng"),
    (sequences("key = jax.random.key(0)", PAIR.format("self.key")), "pair must draw with its rng"),
    (tokens(), "tokens must draw with its rng"),
    (sequences(PAIR.format("rng"), "def solution(self, text): return text[:7]"), "solution must"),
    (sequences(PAIR.format("rng"), "def solution(self, text): return text[7]"), "solution("),
    # its class
    (toys("letters: int = 3", above=""), "letters"),
    (toys("letters: int = 3", above="", base="Task"), "frozen dataclass"),
    (toys(*FIELDS, base="Task", above="@dataclasses.dataclass"), "frozen dataclass"),
    (sequences("max_length = 20"), "max_length"),
    (toys("other: 'Nothing' = 3"), "Nothing"),
    (toys(FIELDS[1], FIELDS[0], INIT, base="Task"), "train"),
    (toys(*FIELDS[1:], base="Task"), "name"),
    # names that are taken
    *((toys(f"{name}: int = 3"), f" {name}")
      for name in ("task", "workdir", "resume", "no_resume", "mesh", "help", "steps", "program",
                   "seconds")),
    (sequences("dim: int = 3"), "dim"),
    # settings that config.json does not give back
    *((toys(f"mine: Any = {value}"), "mine")
      for value in ("math.nan", "Color.RED", "b'a'", "len", "((1, math.nan),)",
                    "dataclasses.field(default_factory=dict)",
                    "dataclasses.field(default_factory=lambda: [1])")),
    (toys("mine: str = 'a'", "def __post_init__(self): object.__setattr__(self, 'mine', "
          "self.mine + 'a')"), "mine"),
    (toys("mine: int = dataclasses.field(default=3, init=False)"), "mine"),
]  # fmt: skip


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Writes a module with a task into the current folder; returns the task's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source):
        sys.modules.pop("broken_task", None)
        importlib.invalidate_caches()
        Path("broken_task.py").write_text(HEAD + source)
        return "broken_task:Mine"

    return write


@pytest.mark.parametrize(("source", "named"), TASKS, ids=map(str, range(len(TASKS))))
def test_a_task(broken, command, source, named):
    name = broken(source)
    refused(re.escape(named), lambda: train_run(task_of(name)(), Path("run")))
    check_error(command("train", "--workdir", "run", "--task", name), named)
    assert not Path("run").exists()


# --- calls: (call with a folder, words of the error) ---


@dataclasses.dataclass(frozen=True)
class NoStatistics(Toy):
    statistics = Task.statistics


@dataclasses.dataclass(frozen=True)
class Listing(Toy):
    def evaluate(self, params, lengths=(), *, folder=None):
        return [1.0]


def local():
    """A class that no other process can import, and one that only this process can."""

    @dataclasses.dataclass(frozen=True)
    class Mine(Toy):
        pass

    return Mine


def renamed(**names):
    """A task whose class has other names."""
    return type("Mine", (Toy,), names)()


CALLS = [
    *((lambda folder, task=task: train_run(task, folder), "task")
      for task in ("reversal", Reversal, None, Toy.loss)),
    (lambda folder: train_run(local()(), folder), "<locals>"),
    (lambda folder: train_run(renamed(__module__="__main__"), folder), "__main__:Mine"),
    (lambda folder: train_run(renamed(__qualname__="Toy", __module__="toy_task"), folder),
     "toy_task:Toy"),
    *((lambda folder, name=name, value=value: train_run(toy(), folder, **{name: value}), name)
      for name, values in {
        "log_gradients": (3, 0, -25), "on_metrics": ("wandb", [print, None]), "profile": (0, "3"),
        "mesh": ("4", MeshShape(4096), MeshShape(3), MeshShape(data=2))}.items()
      for value in values),
    (lambda folder: train_run(toy(NoStatistics), folder, log_gradients=25), "statistics"),
    (lambda folder: train_run(toy(), Path(__file__)), "workdir"),
    (lambda folder: train_run(toy(steps=23, accumulate=4), folder), "accumulate"),
    (lambda folder: train_run(Text("text"), folder), "text"),
    *((lambda folder, name=name, value=value: TrainConfig(**{name: value}), name)
      for name, values in {
        "steps": (0, 2.5, "3", None), "seeds": (0,), "batch_size": (0, "3"), "keep": (0,),
        "first_seed": (2**31, -1), "checkpoint_every": (30,), "schedule": ("linear", 3),
        "learning_rate": (0.0, math.nan, "0.1", None), "clip_norm": (-1.0,), "epsilon": (0, 1j),
        "weight_decay": (-0.1,), "beta2": (1.0, "0.9"), "accumulate": (0,), "optimizer": (3, None),
      }.items() for value in values),
    *((lambda folder, text=text: task_of(text), named)
      for text, named in {
        "reversl": "'reversal'", "toy_task:Tox": "'Toy'", "attention_jax.training.task:Task":
        "subclass of Task", "attention_jax.tasks:TASKS": "subclass of Task", "nowhere:A": "nowhere",
        "attention_jax.tasks.tokens:TokenTask": "name"}.items()),
    *((lambda folder, cls=cls, settings=settings: cls(**settings), next(iter(settings)))
      for cls, settings in (
        (Reversal, {"letters": 27}), (Reversal, {"letters": 2.5}), (Reversal, {"model": "dot"}),
        (Reversal, {"train": {}}), (Reversal, {"min_length": 0}), (Reversal, {"max_length": 2}),
        (Reversal, {"coverage_weight": math.nan}), (Reversal, {"coverage_weight": "1"}),
        (Recall, {"length": "3"}), (Recall, {"model": None}), (Recall, {"pairs": 1.5}),
        (Recall, {"pairs": 9}), (Recall, {"vocabulary_size": 9}),
        (task_of("noisy_recall"), {"keys": "8"}),
        (task_of("noisy_recall"), {"length": 15}), (task_of("noisy_recall"), {"noise": 1.5}),
        (task_of("selective_copy"), {"copied": 16}), (task_of("selective_copy"), {"copied": 2.5}),
        (Regression, {"features": 0}), (Regression, {"points": 0}), (Text, {"text": "a"}),
        (task_of("translation"), {"source": "a", "target": Path("b")}), (Search, {"beams": 0}),
        (Text, {"held_out": 1.0, "text": Path("a")}), (translation_comparison.Config, {"seeds": 1}),
        (translation_comparison.Config, {"scores": ("scaled",)}),
        (Search, {"length_penalty": -0.5}), (Search, {"length_penalty": math.nan}))),
    *((lambda folder, call=call: call(Reversal(), None), named)
      for call, named in (
        (lambda task, params: accuracies(task, params, []), "lengths"),
        (lambda task, params: accuracies(task, params, [3, 0]), "lengths"),
        (lambda task, params: accuracies(task, params, [3], strings=0), "strings"),
        (lambda task, params: task.answers(params, ["abc", ""]), "inputs"),
        (lambda task, params: task.answers(params, ["Abc"]), "'A' in 'Abc'"))),
    *((lambda folder, task=task, text=text: task.answers(None, [text]), "inputs")
      for task, text in ((Regression(), "1 2 3 4"), *((Recall(), text)
                         for text in ("2 8 64", "2 a", "")))),
    *((lambda folder, settings=settings: Reversal(**settings), named)
      for settings, named in (
        ({"train": TrainConfig(batch_size=None)}, "batch_size"),
        ({"model": ModelConfig(positions="learned", position_limit=8)}, "position_limit"))),
    (lambda folder: Regression(ModelConfig()), "architecture"),
    (lambda folder: Recall(length=129), "position_limit"),
    (lambda folder: train_run(Reversal(ModelConfig(score=Additive(5))), folder), "score"),
    (lambda folder: load_run(folder), "workdir"),
    (lambda folder: load_run(run_of_two_seeds(), 3), "step"),
    (lambda folder: load_run(run_of_two_seeds(), "last"), "step"),
    (lambda folder: load_run(run_of_two_seeds()).params_of(2), "seed_index"),
    (lambda folder: (run := load_run(run_of_two_seeds())).task.answers(
        run.params_of(0), ["abc"], beams=0), "beams"),
    (lambda folder: evaluated_run(run_of_two_seeds(), [0]), "lengths"),
    (lambda folder: results_of(TrainedRun(toy(), {}, 3), [3]), "lengths"),
    (lambda folder: results_of(TrainedRun(toy(Listing), {}, 3)), "evaluate("),
]  # fmt: skip


@pytest.mark.parametrize(("call", "named"), CALLS, ids=map(str, range(len(CALLS))))
def test_a_call(tmp_path, call, named):
    refused(re.escape(named), lambda: call(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


# --- command lines: (command, its words, words of the error); RUN is the folder of a run ---

SWEEP = ("sweep", "--workdir", "sweep", "--scores", "dot")
WORDS = [
    *((("train", "--workdir", "run", *words.split()), named)
      for words, named in {
        "--score nowhere:Mine": "nowhere", "--dim 7": "dim", "--positions polar": "--positions",
        "--accumulate 3": "accumulate",
        "--optimizer optax:lion --weight-decay 0.3": "weight_decay",
        **{f"--mesh {wrong}": "mesh" for wrong in ("data=4096", "", "model=2", "data=", "data=-2",
                                                   "data=2 data=4", "data=0", "4")},
        "--log-gradients every=often": "log_gradients", "--log-to tensorbord": "'tensorboard'",
        "--log-to nowhere:L": "nowhere:L", "--task user_tasks:Rotate --letters 3": "--letters",
        "--log-to math:pi": "log_to", "--distributed here": "distributed",
        "--distributed a:1 --processes two": "processes", "--process 1": "processes",
        "--init-from nowhere": "init_from",
        "--task text --text nowhere": "nowhere"}.items()),
    *((("evaluate", *words.split()), named)
      for words, named in {
        "--workdir nowhere": "nowhere", "--workdir RUN --step 2": "step",
        "--workdir RUN --out no/x": "out", "--workdir RUN --out RUN": "out",
        "--workdir RUN --lengths 0": "lengths"}.items()),
    *((("answers", "--workdir", "RUN", *words.split()), named)
      for words, named in {
        "--figure a.jpg": "a.jpg", "--html a.htm": "a.htm", "--html no/a.html": "no",
        "--all-steps": "html", "--html a.html --compare nowhere": "nowhere",
        "--inputs a\udcff": "inputs"}.items()),
    *(((*SWEEP, *words.split()), named)
      for words, named in {
        "--set dim=8,7": "combination dot, 7: dim",
        "--set dim=8,wide": "combination dot, wide: --dim must be INT",
        "--scores dot adit": "'additive'", "--set learning_rat=1": "--learning-rate",
        "--set workdir=a,b": "set", "--set resume=true": "set", "--set score=dot": "score",
        "--set dim": "set", "--set dim=8,,4": "set", "--set dim=8 model.dim=4": "dim",
        "--set mask_padding=maybe": "maybe", "--set learning_rate=1e-3,0.001": "set",
        "--set self_attention_score=f(a=1,b=(2,3)),dot": "f(a=1,b=(2,3))",
        "--set dim=8 --dim 4": "dim", "--score dot": "score", "--bogus 3": "--bogus",
        "--set keep=1,2 --mesh seed=4096": "mesh", '--set positions="learned': "positions",
        "--task translation --lengths 3": "lengths", "--task reversl": "task",
        "--part 0/8": "part", "--part 9/8": "part", "--part x": "part", "--figure a.jpg": "a.jpg",
        "--distributed": "distributed", "--choose-on 5": "choose_on", "--choose-on -1": "choose_on",
        "--set attention=local-p --normalizer entmax": "normalizer"}.items()),
    (("train", "--workdir", "RUN"), "--resume"),
    (("train", "--workdir", "RUN", "--resume", "--letters", "3"), "letters"),
    *((("benchmark", *words.split()), named)
      for words, named in {
        "--scores dott": "'dot'", "--repeats 0": "repeats", "--shrink 0": "shrink",
        "--works scaled adittive": "'adittive'", "--out nowhere/results.json": "nowhere",
        "--benchmarks reversals": "'reversal'", "--benchmarks ring local": "ring"}.items()),
    *((("check_device", *words.split()), named)
      for words, named in {
        "--out a --minutes 0": "minutes", "--out a --minutes nan": "minutes",
        "--out a --parts rihgt": "'right'", "--out /dev/null": "out",
        "--out /proc/no": "out"}.items()),
    *((("bench", *words.split()), named)
      for words, named in {
        "--score dto": "dto", "--score dot --part 3/2": "part",
        "--score dot --tasks recal": "'recall'", "": "--score",
        "--scores dot": "did you mean '--score'?"}.items()),
    (("train", "--wokdir", "run"), "did you mean '--workdir'?"),
    *(((name, "--workdir", "RUN", "--score", "dot"), "score 'dot'")
      for name in ("evaluate", "answers", "analyze_gradients", "translate")),
    (("sweep", "--scores", "dot"), "workdir"), (("sweep", "--workdir", "RUN"), "workdir"),
    (("sweep", "--table", "runs", "--steps", "3"), "table"),
    (("sweep", "--table", "runs", "--part", "1/2"), "table"),
    (("sweep", "--table", "nowhere"), "table"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "named"), WORDS, ids=map(str, range(len(WORDS))))
def test_a_command_line(tmp_path, monkeypatch, command, words, named):
    monkeypatch.chdir(tmp_path)
    run = run_of_two_seeds()
    before = snapshot(run)
    found = command(*(run if word == "RUN" else word for word in words))
    *warnings, line = found[2].splitlines(keepends=True)
    assert all(each.startswith("warning: left out of the table: ") for each in warnings)
    check_error((*found[:2], line), named)
    assert list(tmp_path.iterdir()) == []
    assert snapshot(run) == before


# --- damaged folders of runs ---


def flipped(run):
    """Flips a bit of every file of every state."""
    for path in (run / "checkpoints").glob("*/state/**/d/*"):
        data, middle = path.read_bytes(), path.stat().st_size // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])


DAMAGED_SETTINGS = {
    "unset": lambda run: (run / "config.json").unlink(),
    "halved": lambda run: (run / "config.json").write_text('{"model": {}'),
    "strange": lambda run: (run / "config.json").write_text('{"model": {"other": 1}}'),
}
DAMAGED_STATES = {"stateless": lambda run: shutil.rmtree(run / "checkpoints"), "flipped": flipped}
BY_COMMAND = {  # the words of a command, and the damages that it meets before its work
    "train": ("--resume", DAMAGED_SETTINGS),
    "analyze_gradients": ("--out page.html", DAMAGED_SETTINGS),
    "evaluate": ("--out out.json", DAMAGED_SETTINGS | DAMAGED_STATES),
    "answers": ("--inputs abc --figure a.png", DAMAGED_SETTINGS | DAMAGED_STATES),
}


@pytest.mark.parametrize("name", BY_COMMAND)
def test_a_damaged_run(tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    words, damages = BY_COMMAND[name]
    for kind, damage in damages.items():
        damage(shutil.copytree(run_of_two_seeds(), Path(kind)))
        before = snapshot(tmp_path)
        check_error(command(name, "--workdir", kind, *words.split()), kind)
        assert snapshot(tmp_path) == before
