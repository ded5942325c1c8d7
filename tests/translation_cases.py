"""A tiny text and tiny settings, for the tests of translation; no tests of their own."""

import itertools
from pathlib import Path

import jax
import numpy as np

from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.tasks.translation.task import TranslationConfig
from attention_jax.training.loop import LoopConfig

TEXT = Path(__file__).parent / "parallel_text"
VOCABULARY_SIZE = 400  # the 256 bytes, 4 special ones, the letters, and pieces of words
LINES = {"train": 29, "validation": 4}
LETTERS = 28  # of a sentence at most: short ones compile for few lengths


def lines_of(name: str, side: str) -> list[str]:
    """The first short sentences of the tiny text: of "train" or "validation", "de" or "en"."""
    sides = [
        (TEXT / f"{name}.{each}").read_text(encoding="utf-8").splitlines() for each in ("de", "en")
    ]
    short = [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= LETTERS]
    return [pair[("de", "en").index(side)] for pair in short[: LINES[name]]]


def write_text(folder: Path) -> Path:
    """Those sentences in files that a test may change; returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, side in itertools.product(LINES, ("de", "en")):
        lines = "".join(f"{line}\n" for line in lines_of(name, side))
        (folder / f"{name}.{side}").write_text(lines, encoding="utf-8")
    return folder


def tiny_config(
    folder: Path, *, model: dict | None = None, loop: dict | None = None, **settings
) -> TranslationConfig:
    """Settings of a run on the text that `write_text` wrote; others may be given."""
    tiny_model = {"dim": 8, "hidden_dim": 13, "encoder_layers": 0, "tied_embeddings": "all"}
    tiny_loop = {"seeds": 1, "steps": 12, "log_every": 2, "checkpoint_every": 4, "keep": 3}
    defaults = {
        "source": folder / "train.de",
        "target": folder / "train.en",
        "vocabulary_size": VOCABULARY_SIZE,
        "batch_tokens": 300,
        "buckets": 1,
        "warmup_steps": 3,
    }
    return TranslationConfig(
        model=Seq2SeqConfig().with_settings(**{**tiny_model, **(model or {})}),
        loop=LoopConfig(**{**tiny_loop, **(loop or {})}),
        **{**defaults, **settings},
    )


def run_config(folder: Path, **settings) -> TranslationConfig:
    """Two seeds, dropout, an update every 3 batches, 4 updates; validated at 4, 8 and 12."""
    defaults = {
        "model": {"dropout_rate": 0.1},
        "loop": {"seeds": 2, "keep_best": 1},
        "accumulate": 3,
        "learning_rate": 0.02,
        "validation_source": folder / "validation.de",
        "validation_target": folder / "validation.en",
        "validation_metric": "loss",
    }
    return tiny_config(folder, **{**defaults, **settings})


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
