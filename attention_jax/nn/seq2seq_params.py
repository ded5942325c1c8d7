"""A sequence-to-sequence model as a function of its parameters, a pure dict of arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from attention_jax.nn.config import ModelConfig
from attention_jax.nn.seq2seq import Seq2Seq

Array = jax.Array


def bind(
    config: ModelConfig,
    params: Any,
    vocabulary_size: int,
    source_vocabulary_size: int | None = None,
) -> Seq2Seq:
    """The model with the parameters `params`, the pure dict of a checkpoint.

    It has dropout only in calls with a `dropout_rng`. It keeps no stream: its state is its
    parameters.
    """
    return nnx.merge(_graphdef(config.known(), vocabulary_size, source_vocabulary_size), params)


@functools.lru_cache(maxsize=64)
def _graphdef(
    config: ModelConfig, vocabulary_size: int, source_vocabulary_size: int | None
) -> nnx.GraphDef:
    def make() -> Seq2Seq:
        return Seq2Seq(
            config,
            vocabulary_size,
            source_vocabulary_size=source_vocabulary_size,
            deterministic=True,
            rngs=nnx.Rngs(0),
            keep_rngs=False,
        )

    return nnx.graphdef(nnx.eval_shape(make))


def output_layer(model: Seq2Seq) -> tuple[Array, Array | None]:
    """Kernel [dim, V] and bias [V] of the output layer; with tied embeddings the bias is None.

    For a loss that computes the logits in pieces.
    """
    if model.logits is None:
        return model.target_embedding.embedding[...].T, None
    bias = model.logits.bias
    return model.logits.kernel[...], None if bias is None else bias[...]


def initial_params(
    config: ModelConfig,
    vocabulary_size: int,
    rng: Array,
    source_vocabulary_size: int | None = None,
) -> Any:
    """The initial parameters of a model, as a pure dict."""
    model = Seq2Seq(
        config,
        vocabulary_size,
        source_vocabulary_size=source_vocabulary_size,
        rngs=nnx.Rngs(params=rng),
        keep_rngs=False,
    )
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))
