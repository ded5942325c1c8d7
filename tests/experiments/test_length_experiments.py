"""length_evaluation.py against loops, and both length experiments with tiny settings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.nn.block_config import BlockConfig
from attention_jax.nn.position_config import PositionConfig
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.tasks.reversal.task import ReversalConfig, ReversalRun, bind, reversal_task
from attention_jax.tasks.vocabulary import EOS, PAD, SOS
from attention_jax.training.loop import LoopConfig
from experiments.reversal import length_ablations, length_evaluation, length_generalization
from experiments.reversal.length_evaluation import (
    FIRST_LETTER,
    free_running,
    teacher_forced,
    weights_on,
)


@functools.lru_cache
def untrained(draw="none"):
    """Two seeds whose output layers prefer letters, so that some answers are right."""
    positions = PositionConfig(anchor="end", draw=draw, limit=97)
    model = Seq2SeqConfig(
        block=BlockConfig(dim=8, hidden_dim=5),
        encoder_layers=0,
        decoder_self_attention=False,
        positions=positions,
    )
    config = ReversalConfig(model=model, loop=LoopConfig(seeds=2), letters=2)
    params = jax.jit(jax.vmap(reversal_task(config).init))(jax.random.split(jax.random.key(0), 2))
    bias = params["logits"]["bias"]
    params["logits"]["bias"] = bias.at[:, FIRST_LETTER : FIRST_LETTER + 2].add(9.0)
    return ReversalRun(config, params, 0)


def naive(trained, batch, tokens_of):
    """Returns the shares of letters and of strings right by seed, computed in loops."""

    @jax.jit
    def tokens_of_seed(params):
        return tokens_of(bind(trained.config.model, params), batch)

    shares, params = [], jax.device_get(trained.params)
    for seed in range(2):
        params_of_seed = jax.tree.map(lambda leaf, seed=seed: leaf[seed], params)
        tokens = np.asarray(tokens_of_seed(params_of_seed))
        letters, strings = [], []
        for row, length in enumerate(np.asarray(batch.source_lengths)):
            source = np.asarray(batch.source)[row, :length]
            letters.append(
                np.mean([tokens[row, i] == source[length - 1 - i] for i in range(length)])
            )
            strings.append(letters[-1] == 1 and tokens[row, length] == EOS)
        shares.append((np.mean(letters), np.mean(strings)))
    return np.array(shares).T


def batch_of(length, width, count):
    return length_evaluation._strings(2, length, width, count, 0)


def test_strings_are_of_the_first_letters_and_padded():
    batch = batch_of(5, 8, 64)
    source = np.asarray(batch.source)
    assert set(source[:, :5].ravel()) == {FIRST_LETTER, FIRST_LETTER + 1}
    assert np.all(source[:, 5:] == PAD)
    np.testing.assert_array_equal(batch.targets[:, :5], source[:, 4::-1])
    assert np.all(np.asarray(batch.targets)[:, 5] == EOS)


def test_teacher_forced_accuracy_by_loops(monkeypatch):
    trained = untrained()
    monkeypatch.setattr(length_evaluation, "LETTERS_PER_CALL", 2 * 63)  # two strings a call
    tokens, exact = teacher_forced(trained, [5], strings=5)[5]

    def answer(model, batch):
        return jnp.argmax(model(*batch[:3]), axis=-1)

    np.testing.assert_allclose(
        (tokens, exact), naive(trained, batch_of(5, 63, 5), answer), atol=1e-6
    )
    assert 0.2 < tokens.min() < tokens.max() < 0.9


def test_free_running_accuracy_by_loops():
    trained = untrained()
    found = free_running(trained, [5, 7], strings={5: 3, 7: 11})

    def answer(model, batch):
        ends = {"max_length": 8, "sos": SOS, "eos": EOS, "pad": PAD}
        return model.greedy_decode(*batch[:2], **ends).tokens

    np.testing.assert_allclose(found[7], naive(trained, batch_of(7, 7, 11), answer), atol=1e-6)
    assert list(found) == [5, 7]


def test_models_trained_on_subsets_get_a_subset():
    plain, subset = (weights_on(untrained(draw), 7) for draw in ("none", "subset"))
    assert plain.shape == subset.shape == (8, 7)
    np.testing.assert_allclose(subset.sum(-1), 1, atol=1e-6)
    assert np.max(np.abs(plain - subset)) > 1e-3


# --- the experiments ---


def untrained_arm(config, folder):
    """Stands for `trained_arm`: checks that the arm has a loss, and returns the small model."""
    task, rng = reversal_task(config), jax.random.key(0)
    loss = jax.eval_shape(lambda rng: task.loss(task.init(rng), task.batch(rng), rng), rng)
    assert all(leaf.shape == () for leaf in jax.tree.leaves(loss))
    return untrained(), {"seconds": 1.0, "loss": [[3.0, 2.0]]}


def test_the_question_with_tiny_settings(tmp_path, monkeypatch):
    # Lengths of one width, and of a length that the tests above have, share their programs.
    monkeypatch.setattr(length_generalization, "trained_arm", untrained_arm)
    monkeypatch.setattr(length_generalization, "PROTOCOL", range(41, 63))
    monkeypatch.setattr(length_generalization, "DRAWN_LENGTH", 7)
    config = dataclasses.replace(
        length_generalization.QUICK, far=(5,), far_strings=(3,), every=20,
        workdir=tmp_path / "runs",
    )  # fmt: skip
    numbers = {"config": dataclasses.asdict(config), **length_generalization.run(config)}
    arm = numbers["arms"]["26"]["scaled"]
    assert list(arm["teacher_forced"]["tokens"]) == ["41", "61"]
    assert list(arm["free_running"]["exact"]) == ["5"]
    assert np.shape(arm["weights"]) == (8, 7)
    assert arm["loss"] == [3.0, 2.0]
    assert list(arm["memory_mib"]) == ["5"]
    by_hand = np.mean([arm["teacher_forced"]["tokens"][n] for n in ("41", "61")], axis=0)
    np.testing.assert_allclose(arm["mean_tokens"], by_hand, atol=2e-6)
    assert set(length_generalization.plot(numbers)) == set(length_generalization.CAPTIONS)
    assert not all(found.met for found in length_generalization.expectations(numbers))
    assert "| scaled |" in length_generalization.report(numbers)


@pytest.mark.slow
def test_parts_of_the_recipe_with_tiny_settings(tmp_path):
    part = "size of logits, scaled dot"
    config = length_ablations.Config(
        parts=(part,), seeds=2, steps=2, lengths=(3, 5), strings=2, workdir=tmp_path / "runs",
    )  # fmt: skip
    numbers = {"config": dataclasses.asdict(config), **length_ablations.run(config)}
    arms = numbers["parts"][part]
    assert list(arms) == list(length_ablations.PARTS[part])
    assert np.shape(arms["learned factor"]["tokens"]["5"]) == (2,)
    assert set(length_ablations.plot(numbers)) == set(length_ablations.CAPTIONS)
    assert "| learned factor |" in length_ablations.report(numbers)


def test_every_arm_is_a_model():
    config = length_ablations.Config()
    trainings = [
        config.training(arm) for arms in length_ablations.PARTS.values() for arm in arms.values()
    ]
    assert len(set(trainings)) == len(trainings) - (len(length_ablations.PARTS) - 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"far": (5,), "far_strings": (1, 2)}, "far_strings must be one for each of far"),
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"every": 0}, "every must be at least 1; got 0"),
        ({"alphabets": (27,)}, "letters must be from 1 to 26; got 27"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        length_generalization.Config(**settings)


def test_an_unknown_part():
    with pytest.raises(ValueError, match="parts must be of 'where the source is counted from'"):
        length_ablations.Config(parts=("noise",))
