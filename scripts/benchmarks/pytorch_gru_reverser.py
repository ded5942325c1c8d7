"""The peer of the reversal benchmark: a GRU encoder-decoder with attention, in PyTorch.

It follows a textbook's description of its model: same layers, sizes and recipe. As there, decoding
loops over target positions and evaluates the score at each position, and attention also sees
padding. Unlike there, a few tensor operations draw a whole batch instead of string by string, which
favours the peer. `experiments/reversal/gru_model.py` has the same model in JAX.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import EOS, PAD, SOS


class Dot(nn.Module):
    """q . k, times a constant."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Logits [B, S] of queries [B, D] and keys [B, S, D]."""
        return (keys @ query[:, :, None])[:, :, 0] * self.scale


class General(Dot):
    """(W q) . k; W is [D, D]."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(dim, dim))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return super().forward(query @ self.weight, keys)


class Additive(nn.Module):
    """v . tanh(W [q; k]); W is [D, 2 D]."""

    def __init__(self, dim: int):
        super().__init__()
        self.hidden = nn.Linear(2 * dim, dim, bias=False)
        self.v = nn.Linear(dim, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        pairs = torch.cat((query[:, None, :].expand_as(keys), keys), dim=2)
        return self.v(torch.tanh(self.hidden(pairs)))[:, :, 0]


SCORES: dict[str, Callable[[int], nn.Module]] = {
    "additive": Additive,
    "dot": lambda dim: Dot(),
    "general": General,
    "scaled": lambda dim: Dot(1 / math.sqrt(dim)),
}


class Reverser(nn.Module):
    """A GRU encoder, and a GRU decoder that attends to the encoder's outputs.

    Args:
        score: a key of `SCORES`.
        vocabulary_size: V of source and target.
        embedding_dim: size of a token's embedding.
        hidden_dim: size of both GRUs' states, and of queries, keys and values.
    """

    def __init__(self, score: str, vocabulary_size: int, *, embedding_dim: int, hidden_dim: int):
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary_size, embedding_dim, padding_idx=PAD)
        self.encoder = nn.GRU(embedding_dim, hidden_dim, batch_first=True)
        self.score = SCORES[score](hidden_dim)
        self.target_embedding = nn.Embedding(vocabulary_size, embedding_dim, padding_idx=PAD)
        self.decoder = nn.GRUCell(embedding_dim + hidden_dim, hidden_dim)
        self.logits = nn.Linear(2 * hidden_dim, vocabulary_size)

    def forward(self, source: Tensor, target_inputs: Tensor, mask_padding: bool = False) -> Tensor:
        """Teacher forcing: tokens [B, S] and [B, T] -> logits [B, T, V]."""
        padding = (source == PAD) if mask_padding else torch.zeros_like(source, dtype=torch.bool)
        memory, _ = self.encoder(self.source_embedding(source))
        state = torch.zeros_like(memory[:, 0])
        features = []
        for token in self.target_embedding(target_inputs).unbind(dim=1):
            logits = self.score(state, memory).masked_fill(padding, -math.inf)
            weights = torch.softmax(logits, dim=1)
            context = (weights[:, None, :] @ memory)[:, 0]
            state = self.decoder(torch.cat((token, context), dim=1), state)
            features.append(torch.cat((state, context), dim=1))
        return self.logits(torch.stack(features, dim=1))


class Training:
    """The recipe: fresh strings, cross-entropy, clipping, Adam with a cosine schedule to 0.

    Args:
        score: a key of `SCORES`.
        alphabet_size: number of letters, whose ids follow PAD, SOS and EOS.
        batch_size: strings per step.
        min_length: length of the shortest string.
        max_length: length of the longest string.
        learning_rate: Adam's initial learning rate.
        clip_norm: bound of the gradient's norm.
        total_steps: the step at which the learning rate reaches 0.
        embedding_dim: see `Reverser`.
        hidden_dim: see `Reverser`.

    Attributes:
        model: the `Reverser` in training.
        threads: PyTorch's number of threads during a step; `choose_threads` sets it.
    """

    def __init__(
        self,
        score: str,
        *,
        alphabet_size: int,
        batch_size: int,
        min_length: int,
        max_length: int,
        learning_rate: float,
        clip_norm: float,
        total_steps: int,
        embedding_dim: int = 32,
        hidden_dim: int = 96,
    ):
        torch.manual_seed(1)
        self.threads = torch.get_num_threads()
        self._first_letter = max(PAD, SOS, EOS) + 1
        self._size = self._first_letter + alphabet_size
        self._batch_size = batch_size
        self._lengths = (min_length, max_length)
        self._clip_norm = clip_norm
        self.model = Reverser(score, self._size, embedding_dim=embedding_dim, hidden_dim=hidden_dim)
        self._optimizer = torch.optim.Adam(self.model.parameters(), learning_rate)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, total_steps)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random sources [B, S], decoder inputs [B, S + 1] and targets [B, S + 1], padded."""
        shortest, longest = self._lengths
        letters = torch.randint(self._first_letter, self._size, (self._batch_size, longest))
        lengths = torch.randint(shortest, longest + 1, (self._batch_size, 1))
        positions = torch.arange(longest)
        source = torch.where(positions < lengths, letters, PAD)
        backwards = source.gather(1, (lengths - 1 - positions).clamp(min=0))
        backwards = torch.where(positions < lengths, backwards, PAD)
        inputs = nn.functional.pad(backwards, (1, 0), value=SOS)
        targets = nn.functional.pad(backwards, (0, 1), value=PAD).scatter(1, lengths, EOS)
        return source, inputs, targets

    def choose_threads(self, trial_steps: int) -> None:
        """Sets `threads` to PyTorch's default number or to one, whichever is faster."""
        seconds: dict[int, list[float]] = {count: [] for count in (1, torch.get_num_threads())}
        for _ in range(6):
            for self.threads in seconds:
                start = time.perf_counter()
                self.steps(trial_steps)
                seconds[self.threads].append(time.perf_counter() - start)
        # The first trial with each number of threads is its warm-up.
        medians = {count: statistics.median(times[1:]) for count, times in seconds.items()}
        self.threads = min(medians, key=medians.__getitem__)

    def steps(self, count: int) -> list[float]:
        """Takes `count` steps with `threads` threads, and returns their losses."""
        previous_threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return [self.step() for _ in range(count)]
        finally:
            torch.set_num_threads(previous_threads)

    def step(self) -> float:
        """Takes an optimiser step on a fresh batch, and returns its loss in nats per real token."""
        source, inputs, targets = self.batch()
        logits = self.model(source, inputs)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=PAD
        )
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._optimizer.step()
        self._schedule.step()
        return loss.item()


def training_like_ours(score: str, config: Reversal) -> Training:
    """The peer's training on our task, with the applicable part of `config`'s recipe."""
    return Training(
        score,
        alphabet_size=len(Reversal.vocabulary.alphabet),
        batch_size=config.train.batch_size or 1,
        min_length=config.min_length,
        max_length=config.max_length,
        learning_rate=config.train.learning_rate,
        clip_norm=config.train.clip_norm,
        total_steps=config.train.steps,
    )
