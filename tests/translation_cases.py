"""A tiny text and tiny settings for the tests of translation."""

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.nn.config import ModelConfig
from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.tasks.translation.task import TRAIN, Translation
from attention_jax.tasks.translation.translate import translator_of
from attention_jax.training.run import load_run
from attention_jax.training.step import initial_state

TEXT = Path(__file__).parent / "parallel_text"
VOCABULARY_SIZE = 400  # 256 bytes, 4 special tokens, the letters, and parts of words
LINES = {"train": 29, "validation": 4}
LETTERS = 28  # longest sentence; short sentences need few compiled lengths


def lines_of(name: str, side: str) -> list[str]:
    """Returns short sentences of the tiny text: "train" or "validation", "de" or "en"."""
    sides = [
        (TEXT / f"{name}.{each}").read_text(encoding="utf-8").splitlines() for each in ("de", "en")
    ]
    short = [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= LETTERS]
    return [pair[("de", "en").index(side)] for pair in short[: LINES[name]]]


def write_text(folder: Path) -> Path:
    """Writes these sentences to files that a test may change; returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, side in itertools.product(LINES, ("de", "en")):
        lines = "".join(f"{line}\n" for line in lines_of(name, side))
        (folder / f"{name}.{side}").write_text(lines, encoding="utf-8")
    return folder


def tiny_task(
    folder: Path, *, model: dict | None = None, train: dict | None = None, **settings
) -> Translation:
    """Returns a task on the text of `write_text`; arguments override its settings."""
    tiny_model = {"dim": 8, "hidden_dim": 13, "encoder_layers": 0, "tied_embeddings": "all"}
    tiny_train = {
        "seeds": 1,
        "steps": 12,
        "log_every": 2,
        "checkpoint_every": 4,
        "keep": 3,
        "keep_best": 0,
        "warmup_steps": 2,
    }
    defaults = {
        "source": folder / "train.de",
        "target": folder / "train.en",
        "vocabulary_size": VOCABULARY_SIZE,
        "batch_tokens": 300,
        "buckets": 1,
    }
    return Translation(
        model=ModelConfig(**{**tiny_model, **(model or {})}),
        train=dataclasses.replace(TRAIN, **{**tiny_train, **(train or {})}),
        **{**defaults, **settings},
    )


def run_task(folder: Path, *, train: dict | None = None, **settings) -> Translation:
    """Returns a task with two seeds, dropout, 4 updates of 3 batches, and 3 validations."""
    defaults = {
        "model": {"dropout_rate": 0.1, "decoder_self_attention": False},
        "validation_source": folder / "validation.de",
        "validation_target": folder / "validation.en",
        "validation_metric": "loss",
    }
    updates = {"seeds": 2, "keep_best": 1, "accumulate": 3, "learning_rate": 0.02}
    return tiny_task(folder, train={**updates, **(train or {})}, **{**defaults, **settings})


def repeating(params, token):
    """Parameters of a model that chooses one subword always, and never ends."""
    table = np.array(params["source_embedding"]["embedding"])
    table[..., token, :] = 9
    norm = {name: np.full_like(x, name == "bias") for name, x in params["output_norm"].items()}
    return {**params, "source_embedding": {"embedding": table}, "output_norm": norm}


def say_always(folder, letter):
    """Adds step 6 to a run: a model that repeats one letter."""
    translator = translator_of(load_run(folder))
    state = initial_state(translator.task)
    params = repeating(state.params, translator.subwords.encode([letter])[0][-1])
    state = state._replace(step=state.step + 6, params=jax.tree.map(jnp.asarray, params))
    Checkpoints(folder / "checkpoints", keep=9).save(6, state)
