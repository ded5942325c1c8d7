"""The settings of the gradient analysis of a run, and what each task supplies for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from attention_jax.core.checks import check_integer
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.vocabulary import Vocabulary
from attention_jax.training.loop import AnyTask


@dataclasses.dataclass(frozen=True)
class GradientAnalysis:
    """Settings of the analysis.

    Attributes:
        words: reversal: strings whose weights and gradients are drawn, for the first seed.
        sentences: translation: lines of the validation text, from 1 on, that are drawn; of the
            training text if the run has no validation text.
        strings: random strings, of the training lengths, for the scale sweep and the curvature;
            for translation, the first pairs of that text.
        iterations: Lanczos iterations for the extreme eigenvalues of the Hessian; 0 leaves
            curvature out.
        samples: random vectors for the Hessian's trace.
    """

    words: tuple[str, ...] = ("reverse", "abc")
    sentences: tuple[int, ...] = (1, 2)
    strings: int = 64
    iterations: int = 20
    samples: int = 8

    def __post_init__(self) -> None:
        for name, least in (("strings", 1), ("iterations", 0), ("samples", 2)):
            check_integer(name, getattr(self, name), least)
        for name in ("words", "sentences"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be at least one; got none")
        for word in self.words:
            if not Vocabulary().encode(word):
                raise ValueError("words must have at least one letter each; got an empty one")
        for line in self.sentences:
            check_integer("sentences", line)


class Examples(NamedTuple):
    """The examples of a run that its gradients are taken on."""

    task: AnyTask  # with the batches of training
    batch: Batch  # for the scale sweep and the curvature
    drawn: Batch  # the examples that are drawn
    labels: Mapping[str, tuple[list[str], list[str]]]  # by example: of rows, of columns
