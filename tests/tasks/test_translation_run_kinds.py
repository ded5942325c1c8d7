"""Translation runs that stop early, of other kinds than most, or that cannot begin."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from attention_jax.tasks.translation.definition import TRANSLATION
from attention_jax.tasks.translation.subwords import Subwords
from translation_cases import VOCABULARY_SIZE, lines_of, run_config, tiny_config, write_text

from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.translation import definition as translation_definition
from attention_jax.tasks.translation.translate import translator_of
from attention_jax.training.loop import FedTask
from attention_jax.training.run import load_run, train_run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def one_number(config, batches=None):
    """A task in place of the model's: what is measured is planned."""
    del config, batches
    return FedTask(
        init=lambda rng: {"w": jnp.zeros(())},
        feed=lambda seed, step: np.ones(3, np.float32),
        loss=lambda params, batch, rng: (params["w"] * jnp.mean(batch), {}),
    )


def test_it_stops_when_it_no_longer_improves(text, tmp_path, monkeypatch):
    definition = dataclasses.replace(TRANSLATION, task=one_number)
    planned = iter([1.0, 3.0, 2.0, 2.5, 9.0])
    for name, stand_in in {
        "score_translations": lambda *_: SimpleNamespace(bleu=next(planned)),
        "translate": lambda _, sentences: sentences,
        "mean_loss": lambda *_: {"loss": 1.0, "negative_log_likelihood": 1.0},
        "translation_task": one_number,
    }.items():
        monkeypatch.setattr(translation_definition, name, stand_in)
    settings = run_config(
        text,
        loop={"log_every": 1, "checkpoint_every": 2, "steps": 40, "keep": 2, "keep_best": 1},
        validation_metric="bleu",
        patience=2,
    )
    reached = train_run(definition, settings, tmp_path)
    # The best came at step 4; two more were measured, and a fifth never.
    assert (reached.step, reached.exhausted, reached.interrupted) == (8, True, 0)
    assert [line["bleu"] for line in read_lines(tmp_path / "validation.jsonl")] == [
        [1.0], [3.0], [2.0], [2.5],
    ]  # fmt: skip
    assert load_run(definition, tmp_path, "best").step == 4
    assert load_run(definition, tmp_path).step == 8
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = train_run(definition, settings, tmp_path, resume=True)
    assert (again.step, again.exhausted) == (8, True)
    assert {path for path, old in before.items() if path.read_bytes() != old} <= {tmp_path / "lock"}


@pytest.mark.slow
def test_without_validation_text_nothing_is_validated(text, tmp_path):
    settings = tiny_config(text, loop={"steps": 4, "keep_best": 1})
    reached = train_run(TRANSLATION, settings, tmp_path)
    assert reached.step == 4
    assert not (tmp_path / "validation.jsonl").exists()
    assert set(json.loads((tmp_path / "config.json").read_text())["text_sha256"]) == {"training"}
    assert load_run(TRANSLATION, tmp_path, "best").step == 4


@pytest.mark.slow
def test_two_vocabularies_are_two_files(text, tmp_path):
    settings = tiny_config(
        text, vocabulary="separate", model={"tied_embeddings": "output"}, loop={"steps": 2}
    )
    train_run(TRANSLATION, settings, tmp_path)
    translator = translator_of(load_run(TRANSLATION, tmp_path))
    for name, side, of in zip(
        ("source", "target"), translator.vocabularies, ("de", "en"), strict=True
    ):
        sentences = lines_of("train", of)
        assert (tmp_path / f"{name}_subwords.model").read_bytes() == side.model
        assert side.model == Subwords.learned(sentences, VOCABULARY_SIZE).model


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"max_tokens": 1}, {}, r"no pair of sentences is left to learn from: 0 have an empty"),
        ({}, {"log_gradients": 3}, r"must be a positive multiple of log_every 2; got 3"),
        ({}, {"tensorboard": True}, r"needs the package tensorboardX"),
        ({"vocabulary_size": 9999}, {}, r"vocabulary_size must be at most \d+, the number of"),
    ],
)
def test_a_run_that_cannot_begin(text, tmp_path, monkeypatch, settings, options, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        train_run(TRANSLATION, run_config(text, **settings), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
