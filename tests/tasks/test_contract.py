"""Every task keeps the contract: those of this library, and one outside of it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_files import assert_bits_equal
from translation_cases import run_task, write_text

from attention_jax.runs.interruption import Interruption
from attention_jax.tasks import TASKS, task_in, task_of
from attention_jax.tasks.gradients import GradientAnalysis, analyze_run
from attention_jax.tasks.pages import answers_view, cross_attention
from attention_jax.tasks.sequences import EOS, FIRST, PAD, SOS, SequenceTask
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.run import load_run, load_states, train_run
from attention_jax.training.run_results import finished_run
from attention_jax.training.task import TrainConfig

NAMES = (*TASKS, "user_tasks:Rotate")
SIZES = {
    "recall": {"length": 12, "pairs": 2, "vocabulary_size": 16},
    "noisy_recall": {"length": 12},
    "selective_copy": {"length": 12, "copied": 3},
    "regression": {"points": 4, "features": 2},
}
FEW = {"steps": 5, "log_every": 1, "checkpoint_every": 2, "keep": 9}


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """Optax's Adam counts in int32 and multiplies floats by it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def small(name, folder):
    """A task with sizes that compile quickly."""
    cls = task_of(name)
    if name == "translation":
        return run_task(write_text(folder / "text"), train=FEW)
    if name == "text":
        (folder / "text").write_text("The quick brown fox jumps over the lazy döner. " * 20)
        model = dataclasses.replace(cls.model, dim=8, hidden_dim=7, num_heads=2, decoder_layers=1)
        train = TrainConfig(seeds=2, batch_size=6, schedule="constant", **FEW)
        return cls(folder / "text", model=model, train=train, length=19)
    model = next(field.default for field in dataclasses.fields(cls) if field.name == "model")
    model = dataclasses.replace(model, dim=8, hidden_dim=7)
    train = TrainConfig(seeds=2, batch_size=6, schedule="constant", **FEW)
    return cls(model=model, train=train, **SIZES.get(name, {"min_length": 1, "max_length": 4}))


# These differ from reversal and recall in what they draw, which is tested below and in test_tokens.
SLOW = ("copy", "sort", "noisy_recall", "selective_copy", "regression")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES],
)
def trained(request, tmp_path_factory):
    """A task, its run, and the folder."""
    folder = tmp_path_factory.mktemp("tasks")
    task = small(request.param, folder)
    return task, train_run(task, folder / "run", log_gradients=2)


@pytest.fixture(scope="module")
def task(trained):
    return trained[0]


@pytest.fixture(scope="module")
def folder(trained):
    return trained[1].workdir


def first_batch(task, folder):
    feed = task.feed(folder)
    if feed is not None:
        return feed.batch(0, 0)
    return jax.jit(task.batch, static_argnames="size")(jax.random.key(0), size=6)


# --- training ---


def test_config_json_holds_the_task(task, folder):
    assert task_in(folder) == task


def test_the_loss_is_a_number_that_every_parameter_and_the_rng_may_change(task, folder):
    batch = first_batch(task, folder)
    params = jax.jit(task.init)(jax.random.key(1))
    grad = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
    (loss, metrics), dparams = grad(params, batch, jax.random.key(2))
    assert np.isfinite(loss)
    assert all(np.isfinite(value) and value.shape == () for value in metrics.values())
    norms = [float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(dparams)]
    assert np.all(np.isfinite(norms))
    assert np.mean([norm > 0 for norm in norms]) > 0.7  # a softmax has no gradient in its shift
    losses = [float(grad(params, batch, jax.random.key(seed))[0][0]) for seed in (2, 3)]
    assert losses[0] == loss
    assert losses[1] != loss or not task.model.dropout_rate


class Stop(Interruption):
    """Asks to stop after some calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def agreed(self):
        self.calls -= 1
        return self.calls < 0


@pytest.mark.parametrize("calls", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_is_the_same_bits(trained, tmp_path, calls):
    """Stopped before the first step, between two checkpoints, and in the middle of an update."""
    task, run = trained
    options = {"resume": True, "log_gradients": 2}
    stopped = train_run(task, tmp_path, interruption=Stop(calls), **options)
    assert stopped.step == calls
    resumed = train_run(task, tmp_path, **options)
    assert resumed.step == 5
    assert_bits_equal(resumed.params, run.params)
    assert_bits_equal(*(load_states(path)[1][5] for path in (tmp_path, run.workdir)))
    for name in ("config.json", "metrics.jsonl", "gradients.jsonl"):
        assert (tmp_path / name).read_bytes() == (run.workdir / name).read_bytes()


def test_checkpoints_load(trained):
    task, run = trained
    assert_bits_equal(load_run(run.workdir).params, run.params)
    loaded, states = load_states(run.workdir)
    assert loaded == task
    assert sorted(states) == [0, 2, 4, 5]
    at_four, at_five = (states[step].params for step in (4, 5))
    mean = load_run(run.workdir, average=2).params
    for leaf, *parts in zip(*map(jax.tree.leaves, (mean, at_four, at_five)), strict=True):
        np.testing.assert_allclose(leaf, np.mean(parts, axis=0), rtol=1e-6, atol=1e-7)


# --- a trained model ---


def test_results_are_kept_and_read_back(task, folder, monkeypatch):
    lengths = [3] if task.by_length else []
    finished = finished_run(folder, lengths)
    assert {"training loss"} < finished.results.keys()
    assert any("length 3" in name for name in finished.results) == task.by_length
    for result in finished.results.values():
        assert len(result.by_seed) == task.train.seeds
        assert all(np.array(result.by_seed) >= result.low)
    monkeypatch.setattr(type(task), "evaluate", None)
    assert finished_run(folder, lengths).results == finished.results
    if not task.by_length:
        with pytest.raises(ValueError, match="lengths must be left out"):
            finished_run(folder, [3])


def test_examples_and_answers_are_labelled(trained):
    task, run = trained
    params = run.params_of(1)
    batch, labels = task.examples(run.workdir)
    assert np.asarray(task.bind(params)(*batch.inputs)).shape[:2] == batch.targets.shape
    answers = task.answers(params, folder=run.workdir)
    assert len(answers.texts) == len(answers.labels) == len(labels) > 0
    given = [text for text, _, _ in answers.texts]
    assert all((right is None) == (task.name == "text") for _, _, right in answers.texts)
    again = task.answers(params, given, beams=2, folder=run.workdir)
    assert [text for text, _, _ in again.texts] == given
    for weights, rows, columns in cross_attention(
        task, params, answers.batch, answers.labels
    ).values():
        assert weights.shape == (len(rows), len(columns))
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    with pytest.raises(ValueError, match="seed_index must be from 0 to 1; got 2"):
        run.params_of(2)


def test_a_page_shows_every_attention(trained):
    task, run = trained
    answers = task.answers(run.params_of(0), folder=run.workdir)
    page = answers_view(run, answers, compare=[run.workdir], all_steps=True)
    captures = page.data["captures"]
    assert {capture["step"] for capture in captures} == {"0", "2", "4", "5"}
    assert {capture["example"] for capture in captures} == set(answers.labels)
    assert len({capture["panel"] for capture in captures}) == 2
    names = [attention["name"] for attention in captures[0]["attentions"]]
    kind = "self" if task.model.architecture == "decoder" else "cross"
    assert f"decoder_0/{kind}_attention" in names


def test_gradients_are_analysed(task, folder):
    numbers = analyze_run(folder, GradientAnalysis(iterations=0), progress=lambda line: None)
    assert numbers["by_step"]["steps"] == [0, 2, 4, 5]
    assert set(numbers["examples"]) == {"0", "5"}
    for table in numbers["examples"]["5"].values():
        shape = len(table["row_labels"]), len(table["column_labels"])
        assert np.shape(table["weights"]) == np.shape(table["dlogits"]) == shape
    json.dumps(numbers)


# --- tasks from sequence to sequence ---

SEQUENCES = [name for name in NAMES if issubclass(task_of(name), SequenceTask)]


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("length", [None, 2, 7])
def test_batches_are_padded_pairs_with_their_solutions(tmp_path, name, length):
    task = small(name, tmp_path)
    draw = jax.jit(task.batch, static_argnames=("size", "length"))
    batch = Batch(*map(np.asarray, draw(jax.random.key(3), size=40, length=length)))
    shorter = draw(jax.random.key(3), size=40, length=1)
    assert (batch.source.shape == shorter.source.shape) == (length != 7)  # one width up to 4
    assert {array.dtype for array in batch} == {np.dtype(np.int32)}
    texts = []
    for source, size, inputs, targets, count in zip(*batch, strict=True):
        assert source[0] == SOS
        assert np.all(source[1:size] >= FIRST)
        assert np.all(source[size:] == PAD)
        letters = targets[: count - 1]
        assert np.all(letters >= FIRST)
        assert targets[count - 1] == EOS
        assert np.all(targets[count:] == PAD)
        assert inputs.tolist() == [SOS, *letters, *[PAD] * (len(inputs) - count)]
        text = task.vocabulary.decode(source)
        texts.append(text)
        assert task.vocabulary.decode(targets) == task.solution(text)
    assert len(set(texts)) > 10
    other = np.asarray(draw(jax.random.key(4), size=40, length=length).source)
    assert np.any(other != batch.source)


@pytest.mark.parametrize("name", SEQUENCES)
def test_lengths_of_training_are_uniform(tmp_path, name):
    task = dataclasses.replace(small(name, tmp_path), min_length=2, source_start=False)
    batch = jax.jit(task.batch, static_argnames="size")(jax.random.key(0), size=3000)
    lengths, counts = np.unique(batch.source_lengths, return_counts=True)
    assert len(lengths) == 3
    assert np.all(np.abs(counts - 1000) < 130)
    assert np.all(np.asarray(batch.source)[:, 0] >= FIRST)
