"""A model as a function of its parameters, a pure dict of arrays, for training."""

import functools
from typing import Any

import jax
from flax import nnx

from attention_jax.nn.config import ModelConfig
from attention_jax.nn.model import Model

Array = jax.Array


def initial_params(config: ModelConfig, vocabulary_size: int, rng: Array) -> Any:
    """The initial parameters of a model, as a pure dict.

    Args:
        config, vocabulary_size: as in `Model`.
        rng: one PRNG key.

    >>> init = jax.jit(initial_params, static_argnums=(0, 1))
    >>> init(ModelConfig("decoder", dim=4), 11, jax.random.key(0))["logits"]["kernel"].shape
    (4, 11)
    """
    model = Model(config, vocabulary_size, rngs=nnx.Rngs(params=rng))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def bind(config: ModelConfig, params: Any, vocabulary_size: int) -> Model:
    """The model with the parameters `params`, the pure dict of a checkpoint.

    >>> config = ModelConfig("decoder", dim=4)
    >>> params = jax.jit(initial_params, static_argnums=(0, 1))(config, 11, jax.random.key(0))
    >>> bind(config, params, 11).logits.kernel.shape
    (4, 11)
    """
    return nnx.merge(_graphdef(config.known(), vocabulary_size), params)


@functools.lru_cache(maxsize=64)
def _graphdef(config: ModelConfig, vocabulary_size: int) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: Model(config, vocabulary_size, rngs=nnx.Rngs(0))))
