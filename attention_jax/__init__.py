"""A laboratory for attention score functions.

A score function turns a query and a key into one number, the logit. `attention` computes, with any
score,

    logits_ij = score(query_i, key_j) + bias_ij
    output_i  = sum_j softmax_j(logits_ij where mask_ij) value_j

for query [*B, T, Dq], key [*B, S, Dk] and value [*B, S, Dv], in memory linear in T and S, with
every derivative. README.md is the introduction, docs/guide/ the guide.

- Attention: `attention`, `attention_weights`, `ring_attention` over several devices,
  `masked_softmax`; `IMPLEMENTATIONS`, `BlockSizes`; the results `AttentionStatistics`.
- Scores: `Additive`, `Concat`, `Cosine`, `Dot`, `General`, `Multiplied`,
  `NegativeSquaredDistance`, `ScaledDot`, `SoftCap`; by name, `get_score` and
  `SCORES`; your own, a subclass of `Score`. More are in `attention_jax.scores`.
- Normalisers, which turn logits into weights: `Softmax`, `Sigmoid`, `Entmax`, `LogScaled`; by name,
  `get_normalizer` and `NORMALIZERS`; your own, a subclass of `Normalizer`.
- Masks: `causal_mask`, `local_mask`, `padding_mask`, `segment_mask`, `token_mask`, `window_mask`;
  your own, a `mask_dataclass` that subclasses `Mask`. Packed documents: `packed_documents`,
  `Documents`.
- Biases: `alibi_bias` with `alibi_slopes`, `forgetting_bias`, `gaussian_bias`, `relative_bias`,
  `t5_bias`; your own, a `bias_dataclass` that subclasses `Bias`, with an `array_field` for each
  array.
- Windows around an aligned key: `local_attention`, `local_attention_weights`; the alignment:
  `monotonic_centers`, `predicted_centers`, `reversed_centers`.
- Coverage: `coverage_attention`, `coverage_loss`, `coverage_kernel_size`, `CoverageResult`.
- Attention that only moves forward: `monotonic_attention`, `monotonic_weights`,
  `hard_monotonic_weights`, `hard_monotonic_positions`.
- A trained model, from the folder of a run or from an exported file: `load_model`.
- Decoding: `greedy_search`, `sample_search`, `beam_search`; keys that are projected once:
  `remember`, `Memory`.
- Flax modules: `attention_jax.nn`. Inside jax.nn and Flax, from PyTorch: `attention_jax.interop`.
- What a model attends to, its gradients and its cost: `attention_jax.analysis`.
- Derivatives by hand, with forward mode: `custom_vjp`.

>>> import jax
>>> import jax.numpy as jnp
>>> query, key, value = jnp.zeros((1, 4)), jnp.ones((3, 4)), jnp.array([[1.0], [2.0], [6.0]])
>>> score = Additive(hidden_dim=8)
>>> params = score.init(jax.random.key(0), query_dim=4, key_dim=4)
>>> attention(query, key, value, score=score, params=params).round(4)  # equal keys, equal weights
Array([[3.]], dtype=float32)
"""

from pathlib import Path
from typing import Any, Literal

from attention_jax import analysis, interop, moved, nn
from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.functional.attention import attention, attention_weights
from attention_jax.functional.centers import monotonic_centers, predicted_centers, reversed_centers
from attention_jax.functional.coverage import (
    CoverageResult,
    coverage_attention,
    coverage_kernel_size,
    coverage_loss,
)
from attention_jax.functional.local import local_attention, local_attention_weights
from attention_jax.functional.memory import Memory, remember
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.functional.monotonic_walks import (
    hard_monotonic_positions,
    hard_monotonic_weights,
    monotonic_weights,
)
from attention_jax.functional.ring_attention import ring_attention
from attention_jax.kernels import IMPLEMENTATIONS
from attention_jax.nn.decoding import beam_search, greedy_search, sample_search
from attention_jax.normalizers import (
    NORMALIZERS,
    AttentionStatistics,
    Entmax,
    LogScaled,
    Normalizer,
    Sigmoid,
    Softmax,
    get_normalizer,
)
from attention_jax.positions.biases import (
    alibi_bias,
    alibi_slopes,
    forgetting_bias,
    relative_bias,
    t5_bias,
)
from attention_jax.positions.contract import Bias, Mask
from attention_jax.positions.documents import Documents, packed_documents
from attention_jax.positions.function import array_field
from attention_jax.positions.function import position_dataclass as bias_dataclass
from attention_jax.positions.function import position_dataclass as mask_dataclass
from attention_jax.positions.masks import (
    causal_mask,
    local_mask,
    padding_mask,
    segment_mask,
    token_mask,
)
from attention_jax.positions.window import gaussian_bias, window_mask
from attention_jax.scores import (
    SCORES,
    Additive,
    Concat,
    Cosine,
    Dot,
    General,
    Multiplied,
    NegativeSquaredDistance,
    ScaledDot,
    Score,
    SoftCap,
    get_score,
)
from attention_jax.tiles import BlockSizes
from attention_jax.whole.masked_softmax import masked_softmax

del moved  # pickles of earlier versions need it, users do not

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "NORMALIZERS",
    "SCORES",
    "Additive",
    "AttentionStatistics",
    "Bias",
    "BlockSizes",
    "Concat",
    "Cosine",
    "CoverageResult",
    "Documents",
    "Dot",
    "Entmax",
    "General",
    "LogScaled",
    "Mask",
    "Memory",
    "Multiplied",
    "NegativeSquaredDistance",
    "Normalizer",
    "ScaledDot",
    "Score",
    "Sigmoid",
    "SoftCap",
    "Softmax",
    "alibi_bias",
    "alibi_slopes",
    "analysis",
    "array_field",
    "attention",
    "attention_weights",
    "beam_search",
    "bias_dataclass",
    "causal_mask",
    "coverage_attention",
    "coverage_kernel_size",
    "coverage_loss",
    "custom_vjp",
    "forgetting_bias",
    "gaussian_bias",
    "get_normalizer",
    "get_score",
    "greedy_search",
    "hard_monotonic_positions",
    "hard_monotonic_weights",
    "interop",
    "load_model",
    "local_attention",
    "local_attention_weights",
    "local_mask",
    "mask_dataclass",
    "masked_softmax",
    "monotonic_attention",
    "monotonic_centers",
    "monotonic_weights",
    "nn",
    "packed_documents",
    "padding_mask",
    "predicted_centers",
    "relative_bias",
    "remember",
    "reversed_centers",
    "ring_attention",
    "sample_search",
    "segment_mask",
    "t5_bias",
    "token_mask",
    "window_mask",
]


def load_model(
    path: Path | str,
    seed: int = 0,
    step: int | Literal["newest", "best"] = "newest",
    *,
    score: str | None = None,
) -> Any:
    """A trained model, ready to be called: a Flax module with its parameters.

    Args:
        path: the folder of a run, of any task; or a file of scripts/export.py with its config.json
            beside it.
        seed: which of the run's seeds, counted from 0.
        step: "newest", "best", a step that is kept, or 0, as in `training.run.load_run`.
        score: what the score of the run is called now, as in `load_run`.

    Returns:
        what `Task.bind` of the run's task returns; for tasks of sequences an `nn.Model`, which
        takes `batch.inputs`: int32 [B, S], [B], [B, T].

    Raises:
        ValueError: there is no such run, checkpoint or seed; or the file is damaged, or of another
            model.

    >>> import tempfile
    >>> from attention_jax.tasks import Recall
    >>> from attention_jax.training.run import train_run
    >>> from attention_jax.training.task import TrainConfig
    >>> train = TrainConfig(seeds=1, steps=1, batch_size=2)
    >>> task = Recall(nn.ModelConfig("decoder", dim=4), train)
    >>> folder = tempfile.mkdtemp()
    >>> run = train_run(task, folder)  # doctest: +ELLIPSIS
    scaled...: step 1/1, loss ...
    >>> model = load_model(folder)
    >>> model.logits.kernel.shape
    (4, 64)
    """
    from attention_jax.training.saved import model_of  # Orbax would make every import slower

    return model_of(Path(path), seed, step, score)
