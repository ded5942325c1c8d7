"""A language model: the next character of a text, by a decoder alone.

The model reads the bytes of the text in UTF-8, so that it can be loaded and used without the text.
The results are in bits per character. Its examples are windows of the text, or rows of whole
documents, which begin with SOS, end with EOS, and do not see each other.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.checks import check_integer, checked_fraction
from attention_jax.nn import ModelConfig
from attention_jax.tasks.evaluation import EXAMPLES, SHOWN, best_answers
from attention_jax.tasks.files import check_data, data_digest, read_text
from attention_jax.tasks.tokens import CausalTask, without_source
from attention_jax.tasks.vocabulary import EOS, FIRST, PAD, SOS, Batch, labels_of, padded_rows
from attention_jax.training.losses import cross_entropy
from attention_jax.training.metrics import token_accuracy
from attention_jax.training.settings import LEFT_OUT
from attention_jax.training.task import (
    Answers,
    Feed,
    Labels,
    Metrics,
    Params,
    Result,
    TrainConfig,
    Validation,
    check_instances,
)

Array = jax.Array

MODEL = ModelConfig(
    "decoder",
    dim=128,
    hidden_dim=512,
    num_heads=4,
    decoder_layers=2,
    dropout_rate=0.1,
    positions="rotary",
)
TRAIN = TrainConfig(seeds=1, steps=2000, batch_size=32, warmup_steps=100, weight_decay=0.1)
_GAP = re.compile(r"\n(?:[ \t\r]*\n)+")  # blank lines
_ANSWER, _EXAMPLE = 64, 32  # bytes of an answer, and of an example


@dataclasses.dataclass(frozen=True)
class Text(CausalTask):
    """Predict the next character of a text.

    Attributes:
        text: the file, UTF-8.
        model: the model, a "decoder".
        train: steps, seeds, optimiser, checkpoints.
        length: bytes of an example.
        held_out: the share of the text, at its end, that is for validation.
        documents: whether examples are rows of documents, the parts of the text between blank
            lines, each read alone. All documents are packed into rows once, and rows are drawn. A
            document that is too long for a row is cut into several.
    """

    name: ClassVar[str] = "text"

    text: Path
    model: ModelConfig = MODEL
    train: TrainConfig = TRAIN
    length: int = 128
    held_out: float = 0.1
    documents: bool = dataclasses.field(default=False, metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        check_instances(self, text=Path, documents=bool)
        super().__post_init__()
        checked_fraction("held_out", self.held_out)
        if self.documents:
            check_integer("length", self.length, 2)  # SOS and a byte
            if self.model.position_draw != "none":
                raise ValueError(
                    f"position_draw must be none with documents; got {self.model.position_draw}"
                )
        if self.model.positions == "learned":  # the others have no limit in an answer
            self.model.check_length(min(self.length, _EXAMPLE) - 1 + _ANSWER)

    @property
    def vocabulary_size(self) -> int:
        return FIRST + 256

    # --- data ---

    def parts(self, folder: Path | None = None) -> tuple[bytes, bytes]:
        """The text for training, and the held-out text, which begins with a whole character.

        With `documents` it begins with a whole document, if there is a blank line before it.

        Args:
            folder: of a run, which must have learned from this text; None for any text.

        Raises:
            ValueError: the file cannot be read, is not UTF-8, or has changed since the run began;
                or a part is too short.
        """
        characters = read_text(self.text)
        if folder is not None:
            check_data(folder, "text_sha256", data_digest(characters.encode()))
        end = len(characters) - int(self.held_out * len(characters))
        if self.documents:
            end = max((gap.end() for gap in _GAP.finditer(characters, 0, end)), default=end)
        parts = characters[:end].encode(), characters[end:].encode()
        if min(map(len, parts)) <= self.length:
            raise ValueError(
                f"text {self.text} must have more than {self.length} bytes, the length, both for"
                f" training and held out; got {len(parts[0])} and {len(parts[1])}"
            )
        return parts

    def _documents(self, part: bytes) -> list[bytes]:
        """The documents of a part of the text, each short enough for an example."""
        size = self.length - 1  # SOS comes first
        texts = (text.strip("\n") for text in _GAP.split(part.decode()))
        documents = [text.encode() for text in texts if text.strip()]
        if not documents:
            raise ValueError(f"text {self.text} has a part of blank lines alone: no documents")
        cuts = ((text, range(0, len(text), size)) for text in documents)
        return [text[start : start + size] for text, starts in cuts for start in starts]

    def feed(self, folder: Path, *, multiple_of: int = 1) -> Feed:
        """Random windows of the text, or random rows of its documents."""
        train, held_out = self.parts()
        size = self.train.batch_size
        rows: list[list[bytes]] = []
        if self.documents:
            self._documents(held_out)  # which may be refused
            documents = self._documents(train)
            order = np.random.default_rng(0).permutation(len(documents))
            rows = _filled((documents[index] for index in order), self.length)

        def batch(seed: int, step: int) -> Batch:
            rng = np.random.default_rng([seed, step])
            if rows:
                drawn = rng.integers(len(rows), size=size)
                return _rows([rows[index] for index in drawn], self.length)
            return _windows(train, rng.integers(0, len(train) - self.length, size), self.length)

        digests = {"text_sha256": data_digest(train + held_out)}
        return Feed(batch, digests=digests, note=f"{len(train) + len(held_out):,} bytes of text")

    # --- loss ---

    def loss(self, params: Params, batch: Batch, rng: Array | None) -> tuple[Array, Metrics]:
        inputs: Any = batch.inputs
        tokens, segments = batch.target_inputs, None
        if self.documents:
            inputs = None, None, tokens
            segments = jnp.where(tokens == PAD, -1, jnp.cumsum(tokens == SOS, 1, jnp.int32))
        logits = self.bind(params)(*inputs, segments=segments, rng=rng)
        accuracy = token_accuracy(jnp.argmax(logits, -1), batch.targets, batch.target_lengths)
        return cross_entropy(logits, batch.targets, batch.target_lengths), {"accuracy": accuracy}

    # --- a trained model ---

    def bits_per_character(self, params: Params, folder: Path | None = None) -> list[float]:
        """The cost of the held-out text for each seed, read in windows of `length` bytes.

        A last, shorter window is left out. With `documents` it is the cost of each of them alone,
        its end included. The arguments and errors are those of `parts`.
        """
        held_out = self.parts(folder)[1]
        batches: Iterable[Batch]
        if self.documents:
            documents = self._documents(held_out)
            batches = (_rows([row], self.length) for row in _filled(documents, self.length))
            characters = len(b"".join(documents).decode(errors="ignore"))
        else:
            starts = np.arange(0, len(held_out) - self.length, self.length)
            text = held_out[: len(starts) * self.length + 1]
            batches = (_windows(text, [start], self.length) for start in starts)
            characters = len(text.decode(errors="ignore")) - 1

        @jax.jit
        def nats_of(params: Params, batch: Batch) -> Array:
            return jax.vmap(lambda params: self.loss(params, batch, None)[0])(params)

        nats = sum(
            np.asarray(nats_of(params, batch), np.float64)
            * (int(batch.target_lengths.sum()) / self.length)
            for batch in batches
        )
        return (self.length * np.asarray(nats) / math.log(2) / characters).tolist()

    @property
    def validation(self) -> Validation:
        rule = Validation("bits_per_character", larger_is_better=False)
        return super().validation or rule  # `Task` refuses validate_on

    def validate(self, params: Params, folder: Path) -> dict[str, list[float]]:
        return {"bits_per_character": self.bits_per_character(params, folder)}

    def evaluate(
        self, params: Params, lengths: Sequence[int] = (), *, folder: Path | None = None
    ) -> dict[str, Result]:
        """Bits per character of the held-out text."""
        return {"bits per character": Result(self.bits_per_character(params, folder), False)}

    def examples(self, folder: Path | None = None) -> tuple[Batch, Labels]:
        """Short windows of the held-out text, or the beginnings of its documents."""
        text, size = self.parts(folder)[1], min(self.length, _EXAMPLE)
        if self.documents:
            documents = self._documents(text)
            chosen = np.linspace(0, len(documents) - 1, EXAMPLES).astype(int)
            batch = _rows([[documents[index][: size - 1]] for index in chosen], size)
        else:
            starts = np.linspace(0, len(text) - size - 1, EXAMPLES).astype(int)
            batch = _windows(text, starts, size)
        return batch, _labels(batch, SHOWN)

    def answers(
        self,
        params: Params,
        inputs: Sequence[str] = (),
        *,
        beams: int = 1,
        folder: Path | None = None,
    ) -> Answers:
        """The likeliest continuation of each input, byte by byte or by a beam search.

        Raises:
            ValueError: an input is empty.
        """
        if not inputs:
            batch, _ = self.examples(folder)
            # A window may begin or end within a character.
            rows = np.asarray(batch.target_inputs)[:SHOWN]
            shown = (_as_text(row).strip("\ufffd") for row in rows)
            inputs = [text for text in shown if text]
        if not all(inputs):
            raise ValueError(f"inputs must be one or more, none of them empty; got {list(inputs)}")
        model = self.bind(params)
        texts: list[tuple[str, str, str | None]] = []
        sequences = []
        for text in inputs:
            prompt = np.array([SOS] * self.documents + _ids(text.encode()), np.int32)
            source = jnp.asarray(prompt[None, :-1]), jnp.array([len(prompt) - 1], jnp.int32)
            options: Any = {"max_length": _ANSWER, "sos": int(prompt[-1]), "beams": beams}
            (answer,) = np.asarray(best_answers(model, *source, **options))
            texts.append((text, _as_text(answer), None))
            sequences.append(np.concatenate([prompt, answer]))
        size = min(map(len, sequences)) - 1
        batch = _pairs(np.stack([sequence[: size + 1] for sequence in sequences]))
        return Answers(texts, batch, _labels(batch, len(texts)))


def _windows(text: bytes, starts: Any, length: int) -> Batch:
    """Windows of `length` bytes, and the byte after each of them."""
    letters = np.frombuffer(text, np.uint8)
    windows = np.stack([letters[start : start + length + 1] for start in starts])
    return _pairs(FIRST + windows.astype(np.int32))


def _filled(documents: Iterable[bytes], length: int) -> list[list[bytes]]:
    """Rows of documents, whole and with SOS at most `length` tokens.

    Each is in the first of the last 64 rows that has room for it, or begins another row.
    """
    rows: list[list[bytes]] = []
    room: list[int] = []
    for document in documents:
        recent = range(max(0, len(rows) - 64), len(rows))
        index = next((i for i in recent if len(document) < room[i]), len(rows))
        if index == len(rows):
            rows.append([])
            room.append(length)
        rows[index].append(document)
        room[index] -= len(document) + 1
    return rows


def _rows(rows: Iterable[list[bytes]], length: int) -> Batch:
    """A batch of rows of documents: each is SOS and its bytes, whose targets end with EOS."""
    ids = [[_ids(document) for document in row] for row in rows]
    inputs = [[token for each in row for token in [SOS, *each]] for row in ids]
    targets = [[token for each in row for token in [*each, EOS]] for row in ids]
    tokens, lengths = padded_rows(inputs, len(ids), length)
    batch = without_source(tokens, padded_rows(targets, len(ids), length)[0])
    return batch._replace(target_lengths=lengths)  # type: ignore[arg-type]


def _ids(text: bytes) -> list[int]:
    return [FIRST + byte for byte in text]


def _pairs(ids: np.ndarray) -> Batch:
    """A batch in which each token of [B, T + 1] is the target of the one before it."""
    return without_source(ids[:, :-1], ids[:, 1:])


def _as_text(ids: Iterable[int]) -> str:
    return bytes(int(token) - FIRST for token in ids if token >= FIRST).decode(errors="replace")


def _labels(batch: Batch, count: int) -> Labels:
    return labels_of(batch, count, lambda ids: _as_text(ids)[:40], _label, mask_padding=True)


def _label(token: int) -> str:
    """A visible character; two hexadecimal digits for any other byte."""
    if token < FIRST:
        return ("PAD", "SOS", "EOS")[int(token)]
    letter = chr(int(token) - FIRST)
    if letter == " ":
        return "␣"
    return letter if letter.isascii() and letter.isprintable() else f"{ord(letter):02x}"
