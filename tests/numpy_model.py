"""Multi-head attention, blocks and their parts in float64 NumPy, one example at a time.

Parameters are the pure dicts of the modules. There are no tiles, caches or batches here.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from score_cases import SCORE_CASES


def soft_capped(params, q, k):
    return 50 * np.tanh(SCORE_CASES["scaled"].pair(params, q, k) / 50)


# The formula for one pair of each entry in `attention_jax.SCORES`; leading axes broadcast.
PAIRS = {
    name: SCORE_CASES[name].pair
    for name in ("additive", "concat", "cosine", "distance", "dot", "general", "scaled")
} | {"softcap": soft_capped}


def softmax_where(logits, allowed=True):
    """Softmax over the last axis; 0 for rows without keys. Ignores NaN outside `allowed`."""
    logits = np.where(allowed, logits, -np.inf)
    largest = logits.max(-1, keepdims=True)
    exps = np.exp(logits - np.where(np.isfinite(largest), largest, 0))
    return exps / np.maximum(exps.sum(-1, keepdims=True), 1e-300)


def weights_of(score, params, query, key, allowed=True, bias=0.0):
    """Returns weights [T, S] of queries [T, Dq] and keys [S, Dk]."""
    pair = score if callable(score) else PAIRS[score]
    logits = pair(params, query[:, None, :], key[None, :, :])
    return softmax_where(logits + bias, allowed)


def normed(params, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params.get("bias", 0.0)


def rotated(x, positions, max_wavelength):
    """Rotates pairs of features as complex numbers."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None] / max_wavelength ** (np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def linear(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def head_projection(params, x):
    """Projects x [T, D] to [heads, T, head_dim]."""
    heads = np.einsum("td,dnh->tnh", x, params["kernel"]) + params.get("bias", 0.0)
    return heads.transpose(1, 0, 2)


def multi_head(score, params, x, y, allowed=True, bias=0.0, wavelength=None):
    """Returns output [T, output_dim] and weights [N, T, S], to which the masks broadcast."""
    query = head_projection(params["query"], x)
    key, value = head_projection(params["key"], y), head_projection(params["value"], y)
    if "query_norm" in params:
        query, key = normed(params["query_norm"], query), normed(params["key_norm"], key)
    if wavelength is not None:
        query = rotated(query, np.arange(len(x)), wavelength)
        key = rotated(key, np.arange(len(y)), wavelength)
    shape = (len(query), len(x), len(y))
    allowed, bias = np.broadcast_to(allowed, shape), np.broadcast_to(bias, shape)
    group = len(query) // len(key)
    weights, output = [], 0.0
    for n in range(len(query)):
        own = jax.tree.map(lambda leaf, n=n: leaf[n], params.get("params", {}))
        weights.append(weights_of(score, own, query[n], key[n // group], allowed[n], bias[n]))
        seen = np.where(allowed[n].any(0)[:, None], value[n // group], 0)  # NaN in padding
        output = output + weights[n] @ seen @ params["output"]["kernel"][n]
    return output + params["output"].get("bias", 0.0), np.stack(weights)


def feed_forward(params, x, activation="relu"):
    hidden = linear(params["hidden"], x)
    if activation == "swiglu":
        hidden = hidden / (1 + np.exp(-hidden)) * linear(params["gate"], x)
    elif activation == "gelu":
        hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
    else:
        hidden = np.maximum(hidden, 0)
    return linear(params["output"], hidden)


def residual(config, params, x, layer):
    if config.norm == "pre":
        return x + layer(normed(params["norm"], x))
    return normed(params["norm"], x + layer(x))


def encoder_block(score, config, params, x, allowed=True, *, wavelength=None):
    """Returns tokens [S, dim] and the self attention's weights [N, S, S]."""
    found = []

    def attend(x):
        output, weights = multi_head(
            score, params["self_attention"], x, x, allowed, wavelength=wavelength
        )
        found.append(weights)
        return output

    def feed(x):
        return feed_forward(params["feed_forward"], x, config.activation)

    x = residual(config, params["self_residual"], x, attend)
    return residual(config, params["feed_forward_residual"], x, feed), found[0]


def decoder_block(self_score, score, config, params, x, memory, allowed=True, *, wavelength=None):
    """Returns tokens [T, dim] and cross attention's weights [T, S], averaged over heads."""
    found, causal = [], np.tril(np.ones((len(x), len(x)), bool))

    def attend(x):
        own = params["self_attention"]
        return multi_head(self_score, own, x, x, causal, wavelength=wavelength)[0]

    def look(x):
        own = params["cross_attention"].get("attention", {})
        if "query" in own:
            output, weights = multi_head(score, own, x, memory, allowed, wavelength=wavelength)
            found.append(weights.mean(0))
            return output
        found.append(weights_of(score, own.get("params", {}), x, memory, allowed))
        return linear(params["cross_attention"]["output"], found[-1] @ memory)

    def feed(x):
        return feed_forward(params["feed_forward"], x, config.activation)

    x = residual(config, params["self_residual"], x, attend)
    x = residual(config, params["cross_residual"], x, look)
    return residual(config, params["feed_forward_residual"], x, feed), found[0]


def scrambled(make, seed=1, noise=0.2):
    """Returns the module that `make()` makes, with random parameters, and these in float64.

    NumPy draws the parameters, because JAX compiles a few programs for each new shape.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        fan_in = math.prod(leaf.shape[:-1]) if leaf.ndim > 1 else math.inf
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return (mean + (noise + fan_in**-0.5) * rng.normal(size=leaf.shape)).astype(leaf.dtype)

    params = jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    return nnx.merge(graph, jax.tree.map(jnp.asarray, params)), wide


def run_jit(function, *arguments):
    """Returns the NumPy arrays of a compiled call.

    Each operation on JAX arrays outside of `jit`, an index too, is a program of its own.
    """
    return jax.tree.map(np.asarray, jax.jit(function)(*arguments))


def normal(*shape, seed=2):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
