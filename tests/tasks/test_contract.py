"""Every task keeps the contract: those of this library, and one outside of it."""

import dataclasses
import json
import shutil
from unittest import mock

import chex
import jax
import numpy as np
import pytest
from saved_files import assert_bits_equal, without_speed
from score_cases import slow_unless
from stand_in_training import without_training
from toy_task import saved_state
from translation_cases import run_task, write_text

from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks import TASKS, gradients, task_in, task_of
from attention_jax.tasks.gradients import GradientAnalysis, analyze_run, load_analyzed_run
from attention_jax.tasks.pages import answers_view, cross_attention
from attention_jax.tasks.sequences import EOS, FIRST, PAD, SOS, SequenceTask
from attention_jax.training.run import train_run
from attention_jax.training.run_results import evaluated_run, results_of
from attention_jax.training.task import Result, TrainConfig

NAMES = (*TASKS, "user_tasks:Rotate")
SIZES = {
    "recall": {"length": 12, "pairs": 2, "vocabulary_size": 16},
    "noisy_recall": {"length": 12},
    "selective_copy": {"length": 12, "copied": 3},
    "regression": {"points": 4, "features": 2},
}
FEW = {"steps": 5, "log_every": 1, "checkpoint_every": 2, "keep": 9}


pytestmark = pytest.mark.usefixtures("standard_promotion")


def small(name, folder):
    """A task with sizes that compile quickly."""
    cls = task_of(name)
    if name == "translation":
        return run_task(
            write_text(folder / "text"), train={**FEW, "accumulate": 5, "warmup_steps": 1}
        )
    if name == "text":
        (folder / "text").write_text("The quick brown fox jumps over the lazy döner. " * 20)
        sizes = {"dim": 8, "hidden_dim": 7, "num_heads": 2, "decoder_layers": 1}
        positions = {"positions": "learned", "position_limit": 82}  # 18 bytes and 64 of the answer
        model = dataclasses.replace(cls.model, **sizes, **positions)
        train = TrainConfig(seeds=2, batch_size=6, schedule="constant", **FEW)
        return cls(folder / "text", model=model, train=train, length=19)
    model = next(field.default for field in dataclasses.fields(cls) if field.name == "model")
    model = dataclasses.replace(model, dim=8, hidden_dim=7, decoder_layers=1)
    if model.architecture != "decoder":
        model = dataclasses.replace(model, decoder_self_attention=False)
    train = TrainConfig(seeds=2, batch_size=6, schedule="constant", **FEW)
    return cls(model=model, train=train, **SIZES.get(name, {"min_length": 1, "max_length": 4}))


def tasks(*fast):
    """All tasks as parameters, of which the fast tests have a few.

    The others differ from these in what they draw, which is tested below and in test_tokens.
    """
    return slow_unless(fast, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_for_products_alone(name, tmp_path):
    """The parameters that it trains, and the loss, are float32."""
    task = small(name, tmp_path)
    task = dataclasses.replace(task, model=dataclasses.replace(task.model, dtype="bfloat16"))
    feed, rng = task.feed(tmp_path), jax.random.key(0)
    batch = feed.batch(0, 0) if feed else task.batch(rng, size=2)
    params = jax.eval_shape(task.init, rng)
    program = jax.make_jaxpr(lambda params: task.loss(params, batch, rng)[0])(params)
    assert "bf16" in str(program)
    assert {leaf.dtype for leaf in (*jax.tree.leaves(params), *program.out_avals)} == {
        np.dtype(np.float32)
    }


@pytest.fixture(scope="module", params=tasks("translation"))
def trained(request, tmp_path_factory):
    """A task and its run."""
    folder = tmp_path_factory.mktemp("tasks")
    task = small(request.param, folder)
    return task, train_run(task, folder / "run")


@pytest.fixture(scope="module", params=tasks("recall", "text"))
def scaled(request, tmp_path_factory):
    """A task, and a run of it with larger parameters at each step."""
    folder = tmp_path_factory.mktemp("scaled")
    task = small(request.param, folder)
    with without_training():
        return task, train_run(task, folder / "run")


# --- training ---


def test_training_logs_numbers(trained):
    task, run = trained
    assert task_in(run.workdir) == task
    metrics = read_lines(run.workdir / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    for line in metrics:
        assert np.all(np.isfinite([numbers for name, numbers in line.items() if name != "step"]))


class Stop:
    """An `Interruption` that asks to stop after some calls."""

    exit_status = 143

    def __init__(self, calls):
        self.calls = calls

    def agreed(self):
        self.calls -= 1
        return self.calls < 0


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("trained", NAMES, indirect=True)
def test_resumed_is_the_same_bits(trained, tmp_path, calls):
    """Stopped before the first step, or between checkpoints and in the middle of an update.

    training/test_validation.py and test_settings.py resume runs of a toy.
    """
    task, run = trained
    assert train_run(task, tmp_path, interruption=Stop(calls)).step == calls
    assert train_run(task, tmp_path, resume=True).step == 5
    assert_bits_equal(*(saved_state(task, path) for path in (tmp_path, run.workdir)))
    for name in ("config.json", "metrics.jsonl"):
        assert without_speed(tmp_path / name) == without_speed(run.workdir / name)


@pytest.mark.parametrize("scaled", ["text", "translation"], indirect=True)
def test_a_batch_from_the_host_depends_on_seed_and_step_alone(scaled):
    task, run = scaled
    feed, other = (task.feed(run.workdir) for _ in range(2))
    other.batch(1, 2)
    chex.assert_trees_all_equal(feed.batch(1, 4), other.batch(1, 4))
    assert not np.array_equal(feed.batch(0, 4).targets, feed.batch(1, 4).targets)


# --- a trained model ---


def test_results_have_a_number_per_seed_and_are_those_of_the_task_as_it_is(trained, monkeypatch):
    task, run = trained
    lengths = [3] if task.by_length else []
    finished = evaluated_run(run.workdir, lengths)
    assert {"training loss"} < finished.results.keys()
    assert any("length 3" in name for name in finished.results) == task.by_length
    for result in finished.results.values():
        assert len(result.by_seed) == task.train.seeds
        assert all(np.array(result.by_seed) >= result.low)
    new = Result(np.float32([2, 3]), larger_is_better=True)
    monkeypatch.setattr(type(task), "evaluate", lambda *_, **__: {"new": new})
    assert evaluated_run(run.workdir).results.keys() == {"new", "training loss"}
    assert json.dumps(results_of(run)["new"].by_seed) == "[2.0, 3.0]"
    if not task.by_length:
        with pytest.raises(ValueError, match="lengths must be left out"):
            evaluated_run(run.workdir, [3])


def test_results_of_every_seed_are_in_their_range(scaled):
    task, run = scaled
    for result in task.evaluate(run.params, folder=run.workdir).values():
        assert len(result.by_seed) == task.train.seeds
        assert result.low <= min(result.by_seed) <= max(result.by_seed) <= (result.high or np.inf)


@pytest.mark.parametrize("scaled", tasks("text"), indirect=True)
def test_answers_are_labelled(scaled):
    task, run = scaled
    params = run.params_of(1)
    batch, labels = task.examples(run.workdir)
    output = jax.eval_shape(lambda params: task.bind(params)(*batch.inputs), params)
    assert output.shape[:2] == batch.targets.shape
    inputs = ["Ein döner springt."] if task.name == "text" else []
    answers = task.answers(params, inputs, beams=2, folder=run.workdir)
    assert len(answers.texts) == len(answers.labels) == len(inputs or labels) > 0
    assert not inputs or inputs == [text for text, _, _ in answers.texts]
    assert all((right is None) == (task.name == "text") for _, _, right in answers.texts)


# scripts/test_command_lines.py draws answers of a task from sequence to sequence.
@pytest.mark.parametrize("scaled", tasks("recall"), indirect=True)
def test_a_page_shows_every_attention_to_the_answers(scaled):
    task, run = scaled
    params = run.params_of(1)
    answers = task.answers(params, folder=run.workdir)
    assert len(answers.texts) == len(answers.labels) > 1
    for weights, rows, columns in cross_attention(
        task, params, answers.batch, answers.labels
    ).values():
        assert weights.shape == (len(rows), len(columns))
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    captures = answers_view(run, answers, all_steps=True).data["captures"]
    assert {capture["step"] for capture in captures} == {"0", "2", "4", "5"}
    assert {capture["example"] for capture in captures} == set(answers.labels)
    names = [attention["name"] for attention in captures[0]["attentions"]]
    kind = "self" if task.model.architecture == "decoder" else "cross"
    assert f"decoder_0/{kind}_attention" in names


@pytest.mark.parametrize("scaled", tasks("recall"), indirect=True)
def test_ids_of_another_vocabulary_are_not_compared(scaled, tmp_path):
    task, run = scaled
    answers = task.answers(run.params_of(0), folder=run.workdir)
    other = shutil.copytree(run.workdir, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    for name in {"subwords_sha256", *({"vocabulary_size"} & config.keys())}:
        (other / "config.json").write_text(json.dumps({**config, name: 17}))
        found = dataclasses.replace(run, task=task_in(other), workdir=other)
        with (
            mock.patch("attention_jax.tasks.pages.load_run", return_value=found),
            pytest.raises(ValueError, match=r"^compare must .*other has another"),
        ):
            answers_view(run, answers, compare=[other])


# reports/test_gradient_report.py analyses a task from sequence to sequence.
@pytest.mark.parametrize("scaled", tasks("recall"), indirect=True)
def test_gradients_are_analysed_and_every_part_has_one(scaled, monkeypatch):
    _, run = scaled
    monkeypatch.setattr(gradients, "_scale_sweep", lambda *_: None)
    analyzed, analysis = load_analyzed_run(run.workdir), GradientAnalysis(iterations=0)
    numbers = analyze_run(analyzed, analysis, progress=lambda line: None)
    by_step = numbers["by_step"]
    assert by_step["steps"] == [0, 2, 4, 5]
    norms = [rows for name, rows in by_step.items() if name.startswith("gradient_norm/")]
    assert len(norms) > 5
    assert np.all(np.array(norms) > 0)
    assert set(numbers["examples"]) == {"0", "5"}
    for table in numbers["examples"]["5"].values():
        shape = len(table["row_labels"]), len(table["column_labels"])
        assert np.shape(table["weights"]) == np.shape(table["dlogits"]) == shape
    json.dumps(numbers)


# --- tasks from sequence to sequence ---

SEQUENCES = [name for name in NAMES if issubclass(task_of(name), SequenceTask)]


@pytest.mark.parametrize("name", SEQUENCES)
def test_batches_are_padded_pairs_with_their_solutions(tmp_path, name):
    task = small(name, tmp_path)

    @jax.jit
    def draw(rng):
        return [task.batch(rng, size=40, length=length) for length in (None, 2, 7)]

    drawn, others = (jax.tree.map(np.asarray, draw(jax.random.key(seed))) for seed in (3, 4))
    assert [batch.source.shape for batch in drawn] == [(40, 5), (40, 5), (40, 8)]
    for batch, other in zip(drawn, others, strict=True):
        assert {array.dtype for array in batch} == {np.dtype(np.int32)}
        assert len(set(check_rows(task, batch))) > 10
        assert np.any(other.source != batch.source)


def test_lengths_are_uniform_and_a_source_may_begin_with_a_letter(tmp_path):
    task = dataclasses.replace(small("reversal", tmp_path), min_length=2, source_start=False)
    many = jax.jit(task.batch, static_argnames="size")(jax.random.key(3), size=3000)
    lengths, counts = np.unique(many.source_lengths, return_counts=True)
    assert lengths.tolist() == [2, 3, 4]
    assert np.all(np.abs(counts - 1000) < 130)
    assert np.all(np.asarray(many.source)[:, 0] >= FIRST)


def check_rows(task, batch):
    """Checks each pair of a batch; returns the sources as text."""
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
        texts.append(task.vocabulary.decode(source))
        assert task.vocabulary.decode(targets) == task.solution(texts[-1])
    return texts
