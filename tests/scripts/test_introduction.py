"""What train.py prints before the first step, and the speed in its log."""

import jax
import pytest

from attention_jax.commands.introduction import PEAKS, introduce
from attention_jax.nn import ModelConfig
from attention_jax.tasks import Recall, Text
from attention_jax.training.loop import state_shapes
from attention_jax.training.run import TrainedRun
from attention_jax.training.sharding import MeshShape
from attention_jax.training.task import TrainConfig

B, T, SEEDS, DIM = 3, 16, 2, 128
MODEL = ModelConfig("decoder", dim=DIM, hidden_dim=4 * DIM, decoder_layers=2, score="general")
TRAIN = TrainConfig(seeds=SEEDS, steps=40, batch_size=B)


def test_parameters_by_part_tokens_operations_and_the_peak(tmp_path, monkeypatch, capsys):
    """The oracle is the rule of thumb: 6 operations per token and weight of a product."""
    monkeypatch.setitem(PEAKS, jax.devices()[0].device_kind, 1e9)
    (tmp_path / "text").write_text("abc" * 99)
    recall = Recall(model=MODEL, train=TRAIN, length=T, pairs=2)
    text = Text(text=tmp_path / "text", length=T, model=MODEL, train=TRAIN)
    for task, feed in ((recall, None), (text, text.feed(tmp_path))):
        params = state_shapes(task).params
        run = TrainedRun(task, params, 7, tmp_path)
        work = introduce(run, feed, mesh=MeshShape(data=3))
        assert (work.tokens, work.peak) == (B * T, 3e9)
        sizes = {
            jax.tree_util.keystr(path): leaf.size // SEEDS
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        factors = sum(size for name, size in sizes.items() if "kernel" in name)
        assert work.flops == pytest.approx(6 * B * T * factors, rel=0.1)
        printed, size = capsys.readouterr().out, sum(sizes.values())
        scores = 2 * DIM * DIM  # of general attention, in two layers
        for words in (str(tmp_path), f"{size:,}", f"scores {scores:,}", "7 of 40", "float32"):
            assert words in printed
