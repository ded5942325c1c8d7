"""The translation task: settings, subwords and batches; test_translation_loss.py has the rest."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from attention_jax.tasks.translation.parallel_text import ParallelText
from attention_jax.tasks.translation.subwords import Subwords

from attention_jax import Additive
from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.translation.task import (
    TranslationConfig,
    Vocabularies,
    read_text,
    training_batches,
)
from attention_jax.training.loop import LoopConfig

V = 17  # of models that are given ids, not text
MODEL = ModelConfig(num_heads=2, dim=8, hidden_dim=13, tied_embeddings="all")
LOOP = LoopConfig(seeds=1, steps=10, log_every=2, checkpoint_every=4)


def config(*, model=None, loop=None, **settings):
    """Of files that need not be there."""
    defaults = {
        "source": Path("a.de"), "target": Path("a.en"), "vocabulary_size": V, "max_tokens": 11,
    }  # fmt: skip
    return TranslationConfig(
        model=dataclasses.replace(MODEL, **(model or {})),
        loop=dataclasses.replace(LOOP, **(loop or {})),
        **{**defaults, **settings},
    )


# --- settings ---


def test_settings_survive_json():
    made = config(
        model={
            "score": "additive",
            "positions": "rotary",
            "position_anchor": "both",
            "num_heads": 1,
        },
        loop={"seeds": 3, "keep_best": 2},
        validation_source=Path("/elsewhere/b.de.gz"),
        validation_target=Path("b.en"),
        buckets=3,
        batch_tokens=97,
        learning_rate=0.1,
        warmup_steps=0,
        schedule="cosine",
        clip_norm=float("inf"),
        weight_decay=0.5,
        accumulate=7,
        label_smoothing=0.25,
        precision="bfloat16",
        validation_metric="loss",
        patience=4,
    )
    content = json.loads(json.dumps(made.to_json()))
    assert content["task"] == "translation"
    assert content["validation_source"] == "/elsewhere/b.de.gz"
    assert TranslationConfig.from_json(content) == made
    # A run's config.json says more, which is no setting.
    assert TranslationConfig.from_json({**content, "text_sha256": {"training": "0"}}) == made
    plain = config()
    assert TranslationConfig.from_json(json.loads(json.dumps(plain.to_json()))) == plain != made
    assert plain.validation_source is None


def test_two_vocabularies_survive_json():
    made = config(vocabulary="separate", model={"tied_embeddings": "output"})
    assert TranslationConfig.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert made.vocabulary_sizes == (V, V)


VALIDATION = {"validation_source": Path("b.de"), "validation_target": Path("b.en")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"validation_source": Path("b.de")},
            r"validation_source and validation_target must be given together; got b.de and"
            r" None",
        ),
        ({"vocabulary": "jont"}, r"vocabulary must be one of joint, separate; got 'jont'"),
        ({"schedule": "linear"}, r"schedule must be one of inverse-sqrt, cosine; got 'linear'"),
        ({"precision": "float16"}, r"precision must be one of float32, bfloat16; got 'float16'"),
        ({"validation_metric": "chrf"}, r"validation_metric must be one of bleu, loss; got 'chrf'"),
        (
            {"vocabulary": "separate"},
            r"tied_embeddings must be output or none with separate vocabularies; got all",
        ),
        ({"vocabulary_size": 0}, r"vocabulary_size must be at least 1; got 0"),
        ({"max_tokens": 2.5}, r"max_tokens must be an integer; got 2.5"),
        ({"batch_tokens": -3}, r"batch_tokens must be at least 1; got -3"),
        ({"buckets": True}, r"buckets must be an integer; got True"),
        ({"accumulate": 0}, r"accumulate must be at least 1; got 0"),
        ({"warmup_steps": -1}, r"warmup_steps must be at least 0; got -1"),
        ({"learning_rate": 0.0}, r"learning_rate must be greater than 0; got 0.0"),
        ({"learning_rate": float("nan")}, r"learning_rate must be greater than 0; got nan"),
        ({"clip_norm": -1.0}, r"clip_norm must be greater than 0; got -1.0"),
        ({"weight_decay": -0.5}, r"weight_decay must be at least 0; got -0.5"),
        ({"weight_decay": float("nan")}, r"weight_decay must be at least 0; got nan"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be a Python number in \[0, 1\); got 1.0"),
        ({"label_smoothing": float("nan")}, r"label_smoothing must be .* got nan"),
        ({"patience": 0, **VALIDATION}, r"patience must be at least 1; got 0"),
        ({"patience": 3}, r"patience needs validation_source and validation_target; got neither"),
        (
            {"model": {"positions": "learned", "position_limit": 11}},
            r"position_limit must hold 12 tokens, EOS included; 11 holds 11",
        ),
        (
            {"model": {"score": Additive(5)}},
            r"model.score must be a name, for config.json to hold it; got Additive",
        ),
        ({"model": {"self_attention_score": Additive(5)}}, r"model.self_attention_score must be"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("model"),
        lambda content: content.pop("source"),
        lambda content: content.pop("task"),
        lambda content: content.update(task="reversal"),
        lambda content: content.update(model=3),
        lambda content: content["loop"].update(unknown=3),
        lambda content: content["model"].update(heads=3),
        lambda content: content.update(source=5),
    ],
)
def test_foreign_json(damage):
    content = config().to_json()
    damage(content)
    with pytest.raises(ValueError, match=r"^config.json is not that of a translation run"):
        TranslationConfig.from_json(content)


def test_an_unknown_setting_is_named():
    content = {**config().to_json(), "label_smoothin": 0.2}
    with pytest.raises(ValueError, match=r"^config.json is not .* 'label_smoothin'$"):
        TranslationConfig.from_json(content)


def test_foreign_settings():
    content = config().to_json()
    content["model"]["dim"] = "wide"
    with pytest.raises(ValueError, match=r"dim must be an integer; got 'wide'"):
        TranslationConfig.from_json(content)


# --- text and subwords ---

SOURCE = ["der hund bellt laut im garten", "die katze schläft", "ein kind spielt", "", "im haus"]
TARGET = ["the dog barks in the garden", "the cat sleeps", "a child is playing", "oh", "at home"]
SIZE = 300


@pytest.fixture(scope="module")
def text():
    return ParallelText(SOURCE * 3, TARGET * 3)


@pytest.mark.parametrize("vocabulary", ["joint", "separate"])
def test_vocabularies_and_their_files(tmp_path, text, vocabulary):
    settings = config(
        vocabulary=vocabulary, vocabulary_size=SIZE, model={"tied_embeddings": "none"}
    )
    learned = Vocabularies.learned(settings, text)
    assert (learned.source is learned.target) == (vocabulary == "joint")
    assert list(learned.files) == Vocabularies.names(settings)
    assert len(learned.files) == {"joint": 1, "separate": 2}[vocabulary]
    for name, content in learned.files.items():
        (tmp_path / name).write_bytes(content)
    kept = Vocabularies.kept(settings, tmp_path)
    assert (kept.source is kept.target) == (vocabulary == "joint")
    for side, old, new in zip(text, learned, kept, strict=True):
        assert old.size == new.size == SIZE
        assert new.encode(side) == old.encode(side)
        assert new.decode(new.encode(side)) == side
    # What is learned from one side alone knows words of that side.
    long = {side: len(kept.target.encode([side])[0]) for side in (SOURCE[0], TARGET[0])}
    if vocabulary == "separate":
        assert Subwords.learned(text.target, SIZE).encode(TARGET) == kept.target.encode(TARGET)
        assert long[TARGET[0]] < long[SOURCE[0]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"source_subwords.model cannot be read: No such file"),
        (lambda path: path.write_bytes(b"\xff" * 99), r"source_subwords.model is damaged: model"),
        (lambda path: path.write_bytes(b""), r"source_subwords.model is damaged: model"),
        (
            lambda path: path.write_bytes(Subwords.learned(SOURCE, 290).model),
            r"source_subwords.model must have 300 subwords; it has 290",
        ),
    ],
)
def test_damaged_vocabularies(tmp_path, text, damage, message):
    settings = config(
        vocabulary="separate", vocabulary_size=SIZE, model={"tied_embeddings": "output"}
    )
    for name, content in Vocabularies.learned(settings, text).files.items():
        (tmp_path / name).write_bytes(content)
    damage(tmp_path / "source_subwords.model")
    with pytest.raises(ValueError, match=message) as raised:
        Vocabularies.kept(settings, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4000, r"vocabulary_size must be at most \d+, the number of subwords in this text"),
        (260, r"vocabulary_size must be at least \d+, for the letters of this text"),
    ],
)
def test_vocabularies_that_the_text_does_not_give(text, size, message):
    with pytest.raises(ValueError, match=message):
        Vocabularies.learned(config(vocabulary_size=size), text)


def test_text_is_read(tmp_path):
    for name, lines in {"a.de": SOURCE, "a.en": TARGET, "b.de": ["ja"], "b.en": ["yes"]}.items():
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    files = {"source": tmp_path / "a.de", "target": tmp_path / "a.en"}
    assert read_text(config(**files)) == (ParallelText(SOURCE, TARGET), None)
    more = {f"validation_{name}": path.with_stem("b") for name, path in files.items()}
    assert read_text(config(**files, **more))[1] == ParallelText(["ja"], ["yes"])


def test_what_is_said_of_the_batches(text):
    settings = config(vocabulary_size=SIZE, max_tokens=19, batch_tokens=150, buckets=2)
    joint = Vocabularies.learned(settings, text)
    batches, said = training_batches(settings, text, joint)
    lengths = [
        tuple(len(joint.source.encode([one])[0]) for one in pair)
        for pair in zip(*text, strict=True)
    ]
    kept = [pair for pair in lengths if min(pair) and max(pair) <= 19]
    assert 0 < len(kept) < 12  # of 15 pairs, 3 have an empty side
    counted = re.fullmatch(
        r"(\d+) pairs of sentences; 3 skipped, one side empty; (\d+) skipped, longer than"
        r" max_tokens 19; (\d+) batches per epoch, of 2 shapes; (\d+) subwords, (\d+)% of the"
        r" batches is padding",
        said,
    )
    pairs, long, steps, subwords, padding = map(int, counted.groups())
    assert (pairs, long) == (len(kept), 12 - len(kept))
    real = sum(map(sum, kept)) + 2 * len(kept)  # and an EOS on either side
    assert subwords == real
    sizes = [[*batches.batch(0, step)] for step in range(steps)]
    padded = sum(batch[0].size + batch[2].size for batch in sizes)
    assert padding == round(100 * (1 - real / padded))
    _, said = training_batches(settings, ParallelText(["ja"], ["yes"]), joint)
    assert said.startswith("1 pairs of sentences; 1 batches per epoch, of 1 shapes; ")
