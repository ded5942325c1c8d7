"""Scores that change the logits of another score."""

import dataclasses

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_real
from attention_jax.core.names import of_field
from attention_jax.scores.contract import Features, Params, Score
from attention_jax.scores.dot import Dot, ScaledDot

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class WrappedScore(Score):
    """The parameters, features and cost of an inner score; a subclass changes its logits.

    A subclass defines `pair`, and may say what its `pair` shares with that of the inner score:

        finite_slopes = WrappedScore.finite_slopes  # infinite only where the inner score's are
        round = WrappedScore.round                  # it reads the features as the inner one does
        tile_params = WrappedScore.tile_params      # it hands its features to the inner one

    Without such a line it has the default of `Score`, which is right for every `pair`. It sets its
    own `tile_cost` if its `pair` costs more than the inner one. It defines `init`, `param_shapes`,
    `project_query` and `project_key` if its parameters differ from those of the inner score.

    Attributes:
        score: the inner `Score`.
    """

    score: Score

    def __post_init__(self) -> None:
        if not isinstance(self.score, Score):
            raise ValueError(f"score must be a Score; got {self.score!r} (see get_score)")

    needs_equal_dims = of_field("score", "needs_equal_dims")
    tile_cost = of_field("score", "tile_cost")
    finite_slopes = of_field("score", "finite_slopes")
    translation_invariant = of_field("score", "translation_invariant")
    init = of_field("score", "init")
    param_shapes = of_field("score", "param_shapes")
    project_query = of_field("score", "project_query")
    project_key = of_field("score", "project_key")
    round = of_field("score", "round")
    tile_params = of_field("score", "tile_params")


class LogitMap(WrappedScore):
    """e(q, k) = map_logits(score(q, k)): a subclass defines the elementwise `map_logits`.

    Its slope must be finite at every finite logit.
    """

    finite_slopes = WrappedScore.finite_slopes
    translation_invariant = WrappedScore.translation_invariant
    round = WrappedScore.round
    tile_params = WrappedScore.tile_params

    def map_logits(self, logits: Array) -> Array:
        """The logits [t, s] of this score, from those of the inner score."""
        raise NotImplementedError(f"{type(self).__name__} must define map_logits(logits)")

    def pair(self, params: Params, q_features: Features, k_features: Features) -> Array:
        return self.map_logits(self.score.pair(params, q_features, k_features))

    def pair_vjp(
        self, params: Params, q_features: Features, k_features: Features, dlogits: Array
    ) -> tuple[Params, Features, Features]:
        inner = self.score.pair(params, q_features, k_features)
        logits, pull_back = jax.vjp(self.map_logits, inner)
        (dinner,) = pull_back(dlogits.astype(logits.dtype))
        return self.score.pair_vjp(params, q_features, k_features, dinner)


@dataclasses.dataclass(frozen=True)
class SoftCap(LogitMap):
    """e(q, k) = cap tanh(score(q, k) / cap): the logits of a score, bounded by cap in size

    Logits much smaller than cap hardly change; the gradient of much larger logits vanishes.

    Params: those of `score`.

    Attributes:
        score: the `Score` whose logits are bounded.
        cap: the bound, a finite float above 0.

    Source: Gemma Team 2024 ("Gemma 2"), section 2, logit soft-capping (their soft_cap is cap, 50
    for attention).

    >>> query, key = jnp.array([[1.0]]), jnp.array([[1.0], [100.0]])
    >>> SoftCap(ScaledDot(1.0), cap=2.0)({}, query, key).round(4)
    Array([[0.9242, 2.    ]], dtype=float32)
    """

    score: Score = ScaledDot()
    cap: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("cap", self.cap, above=0)

    def map_logits(self, logits: Array) -> Array:
        cap = float(self.cap)
        return cap * jnp.tanh(logits / cap)


@dataclasses.dataclass(frozen=True)
class Multiplied(LogitMap):
    """e(q, k) = factor score(q, k): the logits of a score, times a constant

    `analysis.logit_factor` returns the factor with which a model's logits have a wanted deviation.
    A score with a field `scale` needs no wrapper: `ScaledDot(scale=...)` stays a dot product, for
    which there are fused kernels.

    Params: those of `score`.

    Attributes:
        score: the `Score` whose logits are multiplied.
        factor: any finite float; a part of the program, so that no optimiser changes it.

    Source: ours; the inverse of a temperature (Hinton, Vinyals and Dean 2015, equation 1).

    >>> Multiplied(Dot(), 0.5)({}, jnp.array([[2.0]]), jnp.array([[3.0]]))
    Array([[3.]], dtype=float32)
    """

    score: Score = ScaledDot()
    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("factor", self.factor)

    def map_logits(self, logits: Array) -> Array:
        return float(self.factor) * logits


@dataclasses.dataclass(frozen=True)
class Power(LogitMap):
    """e(q, k) = degree log |score(q, k)|: weights proportional to a power of another score

    It is computed as degree / 2 log(score(q, k)^2 + 1e-12), so that logits and gradients are
    finite.

    Params: those of `score`.

    Attributes:
        score: the `Score` inside, by default q . k.
        degree: any finite float.

    Source: Buckman, Gelada and Zhang 2024, "Symmetric Power Transformers", where an even degree
    makes the weights a kernel with finitely many features, and hence a recurrent network.

    >>> Power()({}, jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 1.0]])).round(4)  # log(25)
    Array([[3.2189]], dtype=float32)
    """

    score: Score = Dot()
    degree: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("degree", self.degree)

    def map_logits(self, logits: Array) -> Array:
        return self.degree / 2 * jnp.log(logits * logits + 1e-12)


@dataclasses.dataclass(frozen=True)
class Softplus(LogitMap):
    """e(q, k) = log softplus(score(q, k)): weights that grow linearly instead of exponentially

    Params: those of `score`.

    Attributes:
        score: the `Score` inside, by default q . k / sqrt(Dk).

    Source: Gao and Spratling 2025, "Softplus Attention", arXiv 2501.13428. With a factor that
    depends on the length, and sharpened weights, they report extrapolation to 16 times the length
    of training.

    >>> query, key = jnp.array([[2.0, 0.0, 0.0, 0.0]]), jnp.array([[1.0, 0.0, 0.0, 0.0]])
    >>> f"{Softplus()({}, query, key)[0, 0]:.4f}"  # log(log(1 + e))
    '0.2725'
    """

    score: Score = ScaledDot()

    def map_logits(self, logits: Array) -> Array:
        # log softplus(x) = x to the last digit below -40, where softplus(x) may be 0 in float32.
        small = logits < -40
        return jnp.where(small, logits, jnp.log(jax.nn.softplus(jnp.where(small, 0, logits))))
