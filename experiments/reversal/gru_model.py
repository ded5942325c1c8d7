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
import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.scores import get_score
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import PAD
from attention_jax.training.losses import real_tokens
from attention_jax.whole.masked_softmax import masked_softmax

Array = jax.Array
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class GRUReversal(Reversal):
    """String reversal with this model; of `model`, only `score` and `mask_padding` count.

    Attributes:
        embedding_dim: E, size of a token's embedding.
        hidden_dim: H, size of both GRUs' states, and so of queries, keys and values.
    """

    embedding_dim: int = 32
    hidden_dim: int = 96

    def init(self, rng: Array) -> Params:
        size, width, hidden = self.vocabulary.size, self.embedding_dim, self.hidden_dim
        source, target, encoder, decoder, score, logits = jax.random.split(rng, 6)
        initial_score = _INITIAL_SCORES.get(self.model.score, get_score(self.model.score).init)
        kernel_rng, bias_rng = jax.random.split(logits)
        return {
            "source_embedding": jax.random.normal(source, (size, width)),
            "target_embedding": jax.random.normal(target, (size, width)),
            "encoder": initial_gru(encoder, width, hidden),
            "decoder": initial_gru(decoder, width + hidden, hidden),
            "score": initial_score(score, hidden, hidden),
            "logits": {
                "kernel": _uniform(kernel_rng, (2 * hidden, size), 2 * hidden),
                "bias": _uniform(bias_rng, (size,), 2 * hidden),
            },
        }

    def bind(self, params: Params) -> Any:
        return functools.partial(self.logits, params)

    def logits(
        self, params: Params, source: Array, lengths: Array, target_inputs: Array, **_: Any
    ) -> Array:
        """The logits of all target tokens, given the right ones before them.

        Args:
            params: from `init`.
            source: int [B, S].
            lengths: int [B], of the sources; the rest is padding.
            target_inputs: int [B, T], from SOS on.

        Returns:
            float [B, T, V]
        """
        score, score_params = get_score(self.model.score), params["score"]
        decoder = params["decoder"]
        mask = real_tokens(lengths, source.shape[1]) | (not self.model.mask_padding)
        memory = gru(params["encoder"], _embed(params["source_embedding"], source))
        k_features = jax.vmap(lambda key: score.project_key(score_params, key))(memory)

        def attend(query: Array, k_features: Array) -> Array:
            q_features = score.project_query(score_params, query[None])
            return score.pair(score_params, q_features, k_features)[0]

        # The product with [token; context] is a sum of two; that of the tokens needs no loop.
        token_kernel, context_kernel = jnp.split(decoder["input_kernel"], [self.embedding_dim])

        def decode(state: Array, inputs: Array) -> tuple[Array, Array]:
            weights = masked_softmax(jax.vmap(attend)(state, k_features), mask)
            context = jnp.einsum("bs,bsh->bh", weights, memory)
            state = _gru(decoder, inputs + context @ context_kernel, state)
            return state, jnp.concatenate([state, context], axis=-1)

        tokens = _embed(params["target_embedding"], target_inputs)
        inputs = _affine(tokens, {**decoder, "input_kernel": token_kernel}, "input")
        features = _scan(decode, jnp.zeros_like(memory[:, 0]), inputs)
        return features @ params["logits"]["kernel"] + params["logits"]["bias"][None, None]


def initial_gru(rng: Array, input_dim: int, hidden_dim: int) -> Params:
    """The initial parameters of a GRU with states of size `hidden_dim`."""
    rngs, gates = jax.random.split(rng, 4), 3 * hidden_dim
    return {
        "input_kernel": _uniform(rngs[0], (input_dim, gates), hidden_dim),
        "state_kernel": _uniform(rngs[1], (hidden_dim, gates), hidden_dim),
        "input_bias": _uniform(rngs[2], (gates,), hidden_dim),
        "state_bias": _uniform(rngs[3], (gates,), hidden_dim),
    }


def gru(params: Params, tokens: Array) -> Array:
    """The states [B, S, H] of a GRU after each of the tokens [B, S, E], from a state of 0 on."""

    def step(state: Array, inputs: Array) -> tuple[Array, Array]:
        state = _gru(params, inputs, state)
        return state, state

    start = jnp.zeros((len(tokens), params["state_kernel"].shape[0]))
    return _scan(step, start, _affine(tokens, params, "input"))


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


def _scan(step: Any, state: Array, inputs: Array) -> Array:
    """The outputs of a loop over the second axis of inputs and outputs, [B, T, ...]."""
    return jnp.moveaxis(jax.lax.scan(step, state, jnp.moveaxis(inputs, 1, 0))[1], 0, 1)


def _gru(params: Params, inputs: Array, state: Array) -> Array:
    """One step; `inputs` [B, 3 H] are the products with the input, for reset, update and new."""
    reset, update, new = jnp.split(inputs, 3, axis=-1)
    reset_state, update_state, new_state = jnp.split(_affine(state, params, "state"), 3, axis=-1)
    update = jax.nn.sigmoid(update + update_state)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_state) * new_state)
    return (1 - update) * new + update * state


def _affine(x: Array, params: Params, of: str) -> Array:
    bias = params[f"{of}_bias"]
    return x @ params[f"{of}_kernel"] + jnp.expand_dims(bias, range(x.ndim - 1))


def _embed(table: Array, tokens: Array) -> Array:
    """The embeddings of tokens; that of PAD is 0, and no gradient changes it."""
    return jnp.where((tokens == PAD)[..., None], 0, table[tokens])
