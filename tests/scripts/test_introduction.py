"""What train.py prints before the first step, and the speed in its log."""

from types import SimpleNamespace

import jax
import pytest

from attention_jax.commands import introduction
from attention_jax.commands.introduction import PEAKS, introduce
from attention_jax.nn import ModelConfig
from attention_jax.tasks import Recall, Reversal, Text
from attention_jax.training.sharding import MeshShape
from attention_jax.training.step import state_shapes
from attention_jax.training.task import Feed, TrainConfig

B, T, SEEDS, DIM = 3, 16, 2, 128
MODEL = ModelConfig("decoder", dim=DIM, hidden_dim=4 * DIM, decoder_layers=2, score="general")
TRAIN = TrainConfig(seeds=SEEDS, steps=40, batch_size=B)


def started(task, folder, feed, **mesh):
    """What `introduce` needs of a run that goes on from step 7."""
    found = {"task": task, "workdir": folder, "feed": feed, "step": 7}
    return SimpleNamespace(**found, mesh=MeshShape(**mesh), shapes=state_shapes(task))


def test_parameters_by_part_tokens_operations_and_the_peak(tmp_path, monkeypatch, capsys):
    """The oracle is the rule of thumb: 6 operations per token and weight of a product."""
    monkeypatch.setitem(PEAKS, jax.devices()[0].device_kind, 1e9)
    (tmp_path / "text").write_text("abc" * 99)
    recall = Recall(model=MODEL, train=TRAIN, length=T, pairs=2)
    text = Text(text=tmp_path / "text", length=T, model=MODEL, train=TRAIN)
    for task, feed in ((recall, None), (text, text.feed(tmp_path))):
        run = started(task, tmp_path, feed, data=3)
        flops = 3e9 / introduce(run)
        sizes = {
            jax.tree_util.keystr(path): leaf.size // SEEDS
            for path, leaf in jax.tree_util.tree_leaves_with_path(run.shapes.params)
        }
        factors = sum(size for name, size in sizes.items() if "kernel" in name)
        assert flops == pytest.approx(6 * B * T * factors, rel=0.1)
        printed, size = capsys.readouterr().out, sum(sizes.values())
        scores = 2 * DIM * DIM  # of general attention, in two layers
        tokens = f"{B} examples, {B * T} tokens,"
        for words in (
            *(str(tmp_path), f"{size:,}", f"scores {scores:,}", tokens, "7 of 40", "float32"),
        ):
            assert words in printed


def test_the_batches_of_a_feed_and_the_tokens_of_both_sides(tmp_path, monkeypatch, capsys):
    """A feed is shown by the one of its next 20 batches that is nearest to their mean size."""
    count = lambda _f, _params, batch, _rng: SimpleNamespace(flops=1e8 * batch.targets.size)  # noqa: E731
    monkeypatch.setattr(introduction, "operation_count", count)
    train = TrainConfig(seeds=SEEDS, first_seed=5, steps=40, batch_size=B)
    task = Reversal(model=ModelConfig(dim=8, hidden_dim=8, dtype="bfloat16"), train=train)
    asked = []
    drawn = task.batch(jax.random.key(0), size=B)
    both = drawn.source.size + drawn.target_inputs.size
    introduce(started(task, tmp_path, None))
    assert f"{B} examples, {both} tokens, padding included" in capsys.readouterr().out

    def work(length_of):
        def batch(seed, step):
            asked.append((seed, step))
            targets = (ids[:, : length_of(step)] for ids in (drawn.target_inputs, drawn.targets))
            return drawn._replace(**dict(zip(("target_inputs", "targets"), targets, strict=True)))

        introduce(started(task, tmp_path, Feed(batch), data=3, seed=2))
        return capsys.readouterr().out

    printed = work(lambda step: 2 + (step + 2) % 5)  # the first and the last are larger
    assert asked == [(5, step) for step in range(7, 27)]
    assert printed == work(lambda step: 4) != work(lambda step: 5)
    for words in (
        f"of one seed: {B} examples, {drawn.source.size + 4 * B} tokens, padding included,"
        f" {4 * B / 10} GFLOP\n",
        "  seeds       2, from 5 on\n",
        "float32, computed in bfloat16\n",
        f"6 of {jax.device_count()}: {jax.devices()[0].device_kind}, seed=2 data=3\n",
    ):
        assert words in printed
