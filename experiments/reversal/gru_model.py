"""The model of a published comparison: a GRU encoder, and a GRU decoder that attends to it.

    m_j = GRU(embedding of source token j, m_(j-1))            memory, j = 1 ... S
    a_i = softmax over j of e(h_(i-1), m_j)                    e is the score under study
    h_i = GRU([embedding of target token i; sum_j a_ij m_j], h_(i-1))
    logits_i = W [h_i; sum_j a_ij m_j] + b

Layers, sizes and the distributions of initial parameters are those of the chapter's PyTorch model;
a score that the chapter does not have starts with its own initial parameters. The embedding of
padding is 0 and is not learned, and the encoder reads padding like any other token.

Source: chapter 38 ("Attention Variants"), §38.6. GRU: Cho et al. 2014, in PyTorch's form, in which
the reset gate multiplies the recurrent product.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_integer
from attention_jax.implementations.softmax import masked_softmax
from attention_jax.scores import get_score
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import PAD, Batch
from attention_jax.training.losses import cross_entropy, real_tokens
from attention_jax.training.metrics import token_accuracy
from attention_jax.training.task import Task
from experiments.reversal.strings import VOCABULARY

Array = jax.Array
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class GRUConfig:
    """Settings of the model.

    Attributes:
        score: the score under study, a name or "module:Name".
        embedding_dim: E, size of a token's embedding.
        hidden_dim: H, size of both GRUs' states, and so of queries, keys and values.
    """

    score: str = "scaled"
    embedding_dim: int = 32
    hidden_dim: int = 96

    def __post_init__(self) -> None:
        get_score(self.score)
        for name in ("embedding_dim", "hidden_dim"):
            check_integer(name, getattr(self, name))


def init(config: GRUConfig, rng: Array) -> Params:
    """Returns initial parameters, distributed as those of the chapter's model."""
    size, width, hidden = VOCABULARY.size, config.embedding_dim, config.hidden_dim
    rngs = dict(zip(_PARTS, jax.random.split(rng, len(_PARTS)), strict=True))

    def gru(rng: Array, input_dim: int) -> Params:
        shapes = {
            "input_kernel": (input_dim, 3 * hidden),
            "state_kernel": (hidden, 3 * hidden),
            "input_bias": (3 * hidden,),
            "state_bias": (3 * hidden,),
        }
        keys = jax.random.split(rng, len(shapes))
        return {
            name: _uniform(key, shape, hidden)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    kernel_rng, bias_rng = jax.random.split(rngs["logits"])
    return {
        "source_embedding": jax.random.normal(rngs["source_embedding"], (size, width)),
        "target_embedding": jax.random.normal(rngs["target_embedding"], (size, width)),
        "encoder": gru(rngs["encoder"], width),
        "decoder": gru(rngs["decoder"], width + hidden),
        "score": _INITIAL_SCORES.get(config.score, get_score(config.score).init)(
            rngs["score"], hidden, hidden
        ),
        "logits": {
            "kernel": _uniform(kernel_rng, (2 * hidden, size), 2 * hidden),
            "bias": _uniform(bias_rng, (size,), 2 * hidden),
        },
    }


def _uniform(rng: Array, shape: tuple[int, ...], fan_in: int) -> Array:
    """Uniform up to 1 / sqrt(fan_in), PyTorch's default for linear layers and GRUs."""
    return jax.random.uniform(rng, shape, minval=-1, maxval=1) * fan_in**-0.5


def _initial_additive(rng: Array, query_dim: int, key_dim: int) -> Params:
    """As two linear layers without bias, the first of which reads [q; k]."""
    query_rng, key_rng, v_rng = jax.random.split(rng, 3)
    return {
        "query_kernel": _uniform(query_rng, (query_dim, key_dim), query_dim + key_dim),
        "key_kernel": _uniform(key_rng, (key_dim, key_dim), query_dim + key_dim),
        "v": _uniform(v_rng, (key_dim,), key_dim),
    }


def _initial_general(rng: Array, query_dim: int, key_dim: int) -> Params:
    return {"kernel": 0.1 * jax.random.normal(rng, (query_dim, key_dim))}


_INITIAL_SCORES = {"additive": _initial_additive, "general": _initial_general}
_PARTS = ("source_embedding", "target_embedding", "encoder", "decoder", "score", "logits")


def logits(
    config: GRUConfig, params: Params, source: Array, target_inputs: Array, mask: Array
) -> Array:
    """Returns the logits of all target tokens, given the right ones before them.

    Args:
        config: the model.
        params: its parameters.
        source: int [B, S].
        target_inputs: int [B, T], from SOS on.
        mask: bool [B, S], True = the decoder may attend to the token.

    Returns:
        float [B, T, V]
    """
    score = get_score(config.score)
    encoder, decoder = params["encoder"], params["decoder"]
    start = jnp.zeros((len(source), config.hidden_dim))

    def encode(state: Array, inputs: Array) -> tuple[Array, Array]:
        state = _gru(encoder, inputs, state)
        return state, state

    tokens = _embed(params["source_embedding"], source)
    inputs = _affine(tokens, encoder["input_kernel"], encoder["input_bias"])
    memory = jnp.moveaxis(jax.lax.scan(encode, start, jnp.moveaxis(inputs, 1, 0))[1], 0, 1)
    k_features = jax.vmap(lambda key: score.project_key(params["score"], key))(memory)

    def attend(query: Array, k_features: Array) -> Array:
        q_features = score.project_query(params["score"], query[None])
        return score.pair(params["score"], q_features, k_features)[0]

    # The product with [token; context] is a sum of two; that of the tokens needs no loop.
    token_kernel, context_kernel = jnp.split(decoder["input_kernel"], [config.embedding_dim])

    def decode(state: Array, inputs: Array) -> tuple[Array, Array]:
        weights = masked_softmax(jax.vmap(attend)(state, k_features), mask)
        context = jnp.einsum("bs,bsh->bh", weights, memory)
        state = _gru(decoder, inputs + context @ context_kernel, state)
        return state, jnp.concatenate([state, context], axis=-1)

    tokens = _embed(params["target_embedding"], target_inputs)
    inputs = _affine(tokens, token_kernel, decoder["input_bias"])
    features = jax.lax.scan(decode, start, jnp.moveaxis(inputs, 1, 0))[1]
    return _affine(jnp.moveaxis(features, 0, 1), **params["logits"])


def _gru(params: Params, inputs: Array, state: Array) -> Array:
    """One step; `inputs` [B, 3 H] are the products with the input, for reset, update and new."""
    of_state = _affine(state, params["state_kernel"], params["state_bias"])
    reset, update, new = jnp.split(inputs, 3, axis=-1)
    reset_state, update_state, new_state = jnp.split(of_state, 3, axis=-1)
    update = jax.nn.sigmoid(update + update_state)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_state) * new_state)
    return (1 - update) * new + update * state


def _affine(x: Array, kernel: Array, bias: Array) -> Array:
    return x @ kernel + jnp.expand_dims(bias, range(x.ndim - 1))


def _embed(table: Array, tokens: Array) -> Array:
    """The embeddings of tokens; that of PAD is 0, and no gradient changes it."""
    return jnp.where((tokens == PAD)[..., None], 0, table[tokens])


class GRUTask(Task):
    """The task of reversing strings with this model.

    Args:
        model: the model.
        config: batches and training.
        mask_padding: whether the decoder does not see padding; may be traced.
    """

    def __init__(self, model: GRUConfig, config: Reversal, mask_padding: Array | bool):
        self.gru, self.config, self.mask_padding = model, config, mask_padding
        self.train = config.train

    def init(self, rng: Array) -> Params:
        return init(self.gru, rng)

    def batch(self, rng: Array, *, size: int, length: int | None = None) -> Batch:
        return self.config.batch(rng, size=size, length=length)

    def loss(
        self, params: Params, batch: Batch, rng: Array | None
    ) -> tuple[Array, dict[str, Array]]:
        predicted = _logits_of(self.gru, params, batch, self.mask_padding)
        return cross_entropy(predicted, batch.targets, batch.target_lengths), {}


def letters_right(
    model: GRUConfig, params: Params, batch: Batch, mask_padding: Array | bool
) -> Array:
    """Returns the share of letters that are predicted from the right letters before them, []."""
    predicted = jnp.argmax(_logits_of(model, params, batch, mask_padding), axis=-1)
    return token_accuracy(predicted, batch.targets, batch.source_lengths)


def _logits_of(model: GRUConfig, params: Params, batch: Batch, mask_padding: Array | bool) -> Array:
    real = real_tokens(batch.source_lengths, batch.source.shape[1])
    mask = real | ~jnp.asarray(mask_padding)
    return logits(model, params, batch.source, batch.target_inputs, mask)
