"""The language model: its text, which must stay as it was, and the room for its answers."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_cases import agree
from mistakes import refused

from attention_jax.tasks.text import FIRST, MODEL, Text, _filled, _rows
from attention_jax.tasks.vocabulary import EOS, SOS
from attention_jax.training.identity import config_of, task_in
from attention_jax.training.run import prepare
from attention_jax.training.settings import task_from
from attention_jax.training.task import TrainConfig

SENTENCE = "The quick brown fox jumps over the lazy döner. "


def test_a_text_that_was_rewritten_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_text(SENTENCE * 20)
    task = Text(path, length=19)
    config = config_of(task, lambda: task.feed(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch, _ = task.examples(tmp_path)
    assert batch.targets.shape == (64, 19)
    path.write_text(SENTENCE.lower() * 20)
    for use in (
        lambda: task.evaluate(None, folder=tmp_path),
        lambda: task.validate(None, tmp_path),
        lambda: task.examples(tmp_path),
        lambda: task.answers(None, folder=tmp_path),
    ):
        with pytest.raises(ValueError, match=r"^workdir .* other data: text_sha256 has"):
            use()
    assert task.examples()[0].targets.shape == (64, 19)


def test_examples_are_asked_with_whole_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(Text, "bind", lambda *_: None)
    zeros = np.zeros((1, 64), np.int32)
    monkeypatch.setattr("attention_jax.tasks.text.best_answers", lambda *_, **__: zeros)
    path = tmp_path / "text"
    path.write_text("ä" * 300)
    answers = Text(path, length=19).answers(None)
    assert [text for text, _, _ in answers.texts] == ["ä" * 9] * 2


def test_the_digest_of_the_text_decides_wherever_its_file_lies(tmp_path, monkeypatch):
    folders = run, here, there = [tmp_path / name for name in ("run", "here", "there")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(here)
    Path("text").write_text(SENTENCE * 20)
    task = Text(Path("text"), length=19, model=dataclasses.replace(MODEL, dim=8, hidden_dim=8))
    (run / "config.json").write_text(json.dumps(config_of(task, lambda: task.feed(run))))
    monkeypatch.chdir(there)
    assert task_in(run).parts(run) == task_in(run).parts()
    (here / "text").rename("moved")
    prepare(dataclasses.replace(task, text=Path("moved")), run, resume=True)
    Path("moved").write_text(SENTENCE * 21)
    with pytest.raises(ValueError, match="text_sha256 was "):
        prepare(dataclasses.replace(task, text=Path("moved")), run, resume=True)


def test_bits_are_per_character_of_all_held_out_windows(tmp_path, monkeypatch):
    """A byte b costs 1 + b % 7 bits; the first byte and a last, shorter window are left out."""

    def loss(self, params, batch, rng):
        assert rng is None
        return params * jnp.mean(1 + (batch.targets - FIRST) % 7) * math.log(2), {}

    monkeypatch.setattr(Text, "loss", loss)
    path = tmp_path / "text"
    path.write_text(SENTENCE * 10 + "döner " * 10)
    found = Text(path, length=19, held_out=0.15).bits_per_character(np.float32([1, 3]))
    characters = path.read_text()
    held_out = characters[len(characters) - int(0.15 * len(characters)) :].encode()
    windows = (len(held_out) - 1) // 19
    text = held_out[: 19 * windows + 1]
    assert windows == 4
    assert len(text.decode()) < len(text)
    bits = sum(1 + byte % 7 for byte in text[1:]) / (len(text.decode()) - 1)
    np.testing.assert_allclose(found, [bits, 3 * bits], rtol=1e-5)


def test_learned_positions_must_hold_the_answers(tmp_path):
    """18 bytes, then 64 of the answer; test_contract.py has a model with just so many."""
    path = tmp_path / "text"
    path.write_text(SENTENCE * 20)
    fewer = dataclasses.replace(MODEL, positions="learned", position_limit=81)
    with pytest.raises(ValueError, match="position_limit must hold 82 tokens"):
        Text(path, model=fewer, length=19)
    Text(path, model=dataclasses.replace(fewer, positions="rotary"), length=19)


def test_batches_are_of_their_seed_and_step_and_read_the_whole_text(tmp_path):
    path, length, alphabet = tmp_path / "text", 9, bytes(range(33, 113)).decode()
    path.write_text(alphabet)  # each letter once
    task = Text(path, length=length, held_out=0.25, train=TrainConfig(batch_size=300))
    feed, starts = task.feed(tmp_path), {}
    for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        batch = feed.batch(seed, step)
        rows = np.concatenate([batch.target_inputs, batch.targets[:, -1:]], axis=1) - FIRST - 33
        np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(length + 1))
        starts[seed, step] = tuple(rows[:, 0])
    assert len({*starts.values()}) == 4
    assert {start for row in starts.values() for start in row} == {*range(60 - length)}

    def loss(params, batch, rng):  # the sum of what is read
        return params * jnp.sum(jnp.asarray(batch.targets - FIRST - 33, jnp.float32)), {}

    held_out = sum(range(61, 79))  # of 20 letters two windows of 9, and the first only as input
    object.__setattr__(task, "loss", loss)
    (found,) = task.bits_per_character(np.ones(1, np.float32))
    np.testing.assert_allclose(found, length * held_out / math.log(2) / 18, rtol=1e-5)


# --- documents ---

DOCUMENTS = ["ab", "a longer one,\n  of two lines", "döner", "x" * 40]
TINY = dataclasses.replace(MODEL, dim=8, hidden_dim=8, num_heads=2, dropout_rate=0.0)


def documents_of(tmp_path, **options):
    path = tmp_path / "text"
    path.write_text("\n" + "\n \n\n".join(DOCUMENTS * 2) + "\n\n\n")
    options = {"length": 24, "held_out": 0.5, "model": TINY} | options
    return Text(path, documents=True, train=TrainConfig(batch_size=9), **options)


def read(batch):
    """The documents of a batch, SOS to EOS, row by row."""
    rows = []
    for tokens, targets, length in zip(*map(np.asarray, batch[2:]), strict=True):
        assert not np.any([tokens[length:], targets[length:]])
        starts = [*np.flatnonzero(tokens == SOS), length]
        assert starts[0] == 0
        rows.append([])
        for start, end in itertools.pairwise(starts):
            assert tokens[start + 1 : end].tolist() == targets[start : end - 1].tolist()
            assert targets[end - 1] == EOS
            rows[-1].append(bytes((targets[start : end - 1] - FIRST).tolist()))
    return rows


def test_rows_are_filled_with_whole_documents(tmp_path):
    task = documents_of(tmp_path)
    train, held_out = map(task._documents, task.parts())
    pieces = [part for text in DOCUMENTS for part in pieces_of(text.encode(), 23)]
    assert train == held_out == pieces  # the text is split between documents
    rows = _filled(train * 3, 24)
    assert sorted(part for row in rows for part in row) == sorted(train * 3)
    for index, row in enumerate(rows):  # each document is in the first row that it fits
        used = sum(len(part) + 1 for part in row)
        assert used <= 24
        assert all(used + len(part) >= 24 for later in rows[index + 1 :] for part in later)

    feed = task.feed(tmp_path)
    batches = [read(feed.batch(seed, step)) for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert batches[0] == batches[1]
    assert batches[0] != batches[2]
    assert batches[0] != batches[3]
    assert [len(batch) for batch in batches] == [9] * 4
    drawn = {tuple(row) for batch in batches for row in batch}
    assert sorted(part for row in drawn for part in row) == sorted(train)  # each has one row
    batch, labels = task.examples()
    assert read(batch)[0] == [b"ab"]
    assert labels["ab"] == (["a", "b", "EOS"], ["SOS", "a", "b"])


def pieces_of(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def test_a_document_costs_what_it_costs_alone(tmp_path):
    """Loss, gradient and bits per character, against each document in a row of its own."""
    task = documents_of(tmp_path, model=dataclasses.replace(TINY, positions="learned"))
    params = jax.jit(task.init)(jax.random.key(0))
    held_out = task._documents(task.parts()[1])
    packed = list(_filled(held_out, 24))
    assert len(packed) < len(held_out)

    @jax.jit
    def cost(params, batch):
        return jax.value_and_grad(lambda params: task.loss(params, batch, None)[0])(params)

    tokens = [len(text) + 1 for text in held_out]
    alone = [cost(params, _rows([[text]], 24)) for text in held_out]
    mean = jax.tree.map(lambda *leaves: np.average(leaves, 0, tokens), *alone)
    agree(cost(params, _rows(packed, 24)), mean, 1e-5)
    bits = task.bits_per_character(jax.tree.map(lambda leaf: leaf[None], params))
    characters = len(b"".join(held_out).decode())
    np.testing.assert_allclose(bits, mean[0] * sum(tokens) / math.log(2) / characters, rtol=1e-5)


def test_the_config_of_a_run_without_documents_is_what_it_was(tmp_path):
    task = documents_of(tmp_path)
    without = dataclasses.replace(task, documents=False)
    assert "documents" not in config_of(without)
    assert task_from(config_of(without)) == without
    assert config_of(task)["documents"] is True
    assert task_from(config_of(task)) == task
    changed = functools.partial(functools.partial, dataclasses.replace, task)
    drawing = dataclasses.replace(TINY, position_draw="subset")
    refused("position_draw must be none", changed(model=drawing))
    refused("length must be at least 2", changed(length=1))
    refused("documents must be a bool", changed(documents="yes"))
    (tmp_path / "config.json").write_text(json.dumps(config_of(without)))
    message = "documents was False, now True"
    refused(message, functools.partial(prepare, task, tmp_path, resume=True))
    task.text.write_text("a\n" * 60 + "\n \n" * 60)  # the held-out half is blank
    refused("has a part of blank lines alone", functools.partial(task.feed, tmp_path))


def test_a_prompt_begins_as_a_document(tmp_path, monkeypatch):
    prompts = []

    def answer(model, source, lengths, *, sos, **options):
        prompts.append([*source[0].tolist(), sos])
        return np.zeros((1, 64), np.int32)

    monkeypatch.setattr("attention_jax.tasks.text.best_answers", answer)
    monkeypatch.setattr(Text, "bind", lambda *_: None)
    documents_of(tmp_path).answers(None, ["ab"])
    assert prompts == [[SOS, FIRST + 97, FIRST + 98]]
