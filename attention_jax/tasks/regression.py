"""Linear regression in context: from x_1, y_1, ..., x_n to y_n, where y = w · x.

Source: Garg et al. 2022, "What can transformers learn in-context?", sections 2 and 3.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.checks import check_integer
from attention_jax.nn import ModelConfig
from attention_jax.tasks.evaluation import SHOWN, DrawnTask, compiled
from attention_jax.tasks.tokens import MODEL, TRAIN, CausalTask, without_source
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.task import (
    Answers,
    Labels,
    Metrics,
    Params,
    Result,
    TrainConfig,
    Validation,
)

Array = jax.Array
_TESTED = 2048


@dataclasses.dataclass(frozen=True)
class Regression(DrawnTask, CausalTask):
    """Predict y = w · x at each x, from the pairs before it.

    Each sequence draws w and all x from N(0, I). It is x_1, y_1, x_2, ..., x_n, where the vector of
    a y is (y, 0, ..., 0). A linear layer takes the place of the embedding, and the first output is
    the prediction. The loss is the mean of (prediction - y)^2 / D over all points: 1 for a model
    that always predicts 0.

    Published: D = 20 and 41 points, 12 layers of 256 features and 8 heads: as small an error as
    least squares.

    Attributes:
        model: the model, a "decoder".
        train: steps, seeds, optimiser, checkpoints.
        features: D.
        points: n.
    """

    name: ClassVar[str] = "regression"
    first_result: ClassVar[Validation] = Validation("squared error", larger_is_better=False)

    model: ModelConfig = MODEL
    train: TrainConfig = dataclasses.replace(TRAIN, steps=1000, batch_size=64)
    features: int = 2
    points: int = 7

    def __post_init__(self) -> None:
        check_integer("features", self.features)
        check_integer("points", self.points)
        super().__post_init__()

    @property
    def length(self) -> int:
        return 2 * self.points - 1

    @property
    def vocabulary_size(self) -> int:
        return self.features

    # --- training ---

    def batch(self, rng: Array, *, size: int, length: int | None = None) -> Batch:
        """The inputs [B, 2 n - 1, D], and y at each x; a length is a number of points, n."""
        x_rng, w_rng = jax.random.split(rng)
        x = jax.random.normal(x_rng, (size, length or self.points, self.features))
        y = jnp.einsum("bnd,bd->bn", x, jax.random.normal(w_rng, (size, self.features)))
        return _interleaved(x, y)

    def loss(self, params: Params, batch: Batch, rng: Array | None) -> tuple[Array, Metrics]:
        return jnp.mean(self._errors(params, batch, rng)), {}

    def _errors(self, params: Params, batch: Batch, rng: Array | None = None) -> Array:
        """(prediction - y)^2 / D at each x: [B, n]."""
        predictions = self.bind(params)(*batch.inputs, rng=rng)[..., 0]
        return (predictions - batch.targets)[:, ::2] ** 2 / self.features

    # --- a trained model ---

    def _by_point(self, params: Params, rng: Array, *, size: int, **run: Any) -> np.ndarray:
        """The mean error of each seed at each x, on fresh sequences: [seeds, n]."""
        batch = self.batch(rng, size=size)
        return np.asarray(compiled(_errors_by_point, self, **run)(params, batch), np.float64)

    def _measured(self, params: Params, rng: Array, **examples: Any) -> list[float]:
        by_seed: list[float] = self._by_point(params, rng, **examples).mean(axis=1).tolist()
        return by_seed

    def evaluate(
        self, params: Params, lengths: Sequence[int] = (), *, folder: Path | None = None
    ) -> dict[str, Result]:
        """The mean error of all points, and that of the last point, on 2,048 fresh sequences."""
        by_point = self._by_point(params, jax.random.key(0), size=_TESTED)
        return {
            self.first_result.metric: Result(by_point.mean(axis=1).tolist(), False),
            "squared error, last point": Result(by_point[:, -1].tolist(), False),
        }

    def answers(
        self,
        params: Params,
        inputs: Sequence[str] = (),
        *,
        beams: int = 1,
        folder: Path | None = None,
    ) -> Answers:
        """The prediction of the last y, and that of least squares from the points before it.

        An input is the numbers x_1, y_1, ..., x_n: with D = 2, "0.1 0.2 0.3 0.4 -0.5".

        Raises:
            ValueError: an input is no such text, or has more points than position ids.
        """
        if not inputs:
            batch, _ = self.examples(folder)
            x, y = batch.target_inputs[:SHOWN, ::2], batch.targets[:SHOWN, ::2]
            rows = np.concatenate([x, y[..., None]], axis=-1).reshape(SHOWN, -1)[:, :-1]
            inputs = [" ".join(f"{number:.2f}" for number in row) for row in rows.tolist()]
        points = [self._points(text) for text in inputs]
        most = max(map(len, points))
        padded = np.stack([np.pad(each, ((0, most - len(each)), (0, 0))) for each in points])
        batch = _interleaved(padded[..., :-1], padded[..., -1])
        predict = jax.jit(lambda params: self.bind(params)(*batch.inputs)[..., 0])
        predictions = np.asarray(predict(params))
        texts: Any = [
            (text, f"{row[2 * len(each) - 2]:.2f}", f"{_least_squares(each):.2f}")
            for text, each, row in zip(inputs, points, predictions, strict=True)
        ]
        batch = without_source(batch.target_inputs, predictions)
        return Answers(texts, batch, self._labels(batch, len(texts)))

    def _labels(self, batch: Batch, count: int) -> Labels:
        columns = [f"{'xy'[index % 2]}{index // 2 + 1}" for index in range(batch.targets.shape[1])]
        rows = [f"y{name[1:]}" if name[0] == "x" else "." for name in columns]
        return {f"sequence {index + 1}": (rows, columns) for index in range(count)}

    def _points(self, text: str) -> np.ndarray:
        """The rows (x, y) of a text, float32 [n, D + 1]; the last y is 0."""
        size = self.features + 1
        try:
            rows = np.array([*text.split(), 0], np.float32).reshape(-1, size)
        except ValueError as error:
            raise ValueError(
                f"inputs must be numbers, {size} for each point and {self.features} for the last;"
                f" got {text!r}"
            ) from error
        self.model.check_length(2 * len(rows) - 1)
        return rows


def _errors_by_point(task: Regression, params: Params, batch: Batch) -> Array:
    """The mean error of each seed at each x: [seeds, n]."""
    return jax.vmap(lambda params: jnp.mean(task._errors(params, batch), axis=0))(params)


def _interleaved(x: Any, y: Any) -> Batch:
    """The batch of points x [B, n, D] and y [B, n]; a target is 0 where nothing is predicted."""
    count, points, features = x.shape
    vectors = jnp.zeros_like(x).at[..., 0].set(y)
    inputs = jnp.stack([x, vectors], axis=2).reshape(count, 2 * points, features)
    targets = jnp.stack([y, jnp.zeros_like(y)], axis=2).reshape(count, 2 * points)
    return without_source(inputs[:, :-1], targets[:, :-1])


def _least_squares(points: np.ndarray) -> float:
    """The last y, predicted by least squares from the other points; of many w, by the smallest."""
    x, y = points[:, :-1], points[:, -1]
    return float(x[-1] @ np.linalg.lstsq(x[:-1], y[:-1])[0])
