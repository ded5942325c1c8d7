"""The model and its parts in float64 NumPy, one example at a time.

Parameters are the pure dicts of the modules. There are no tiles, caches or batches here.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from oracles import softmax
from score_cases import SCORE_CASES

from attention_jax import SCORES


def soft_capped(params, q, k):
    return 50 * np.tanh(SCORE_CASES["scaled"].pair(params, q, k) / 50)


# The formula for one pair of each entry in `attention_jax.SCORES`; leading axes broadcast.
PAIRS = {name: SCORE_CASES[name].pair for name in SCORES} | {"softcap": soft_capped}


def normalizer(text):
    """Softmax, or log_scaled(start=n), as a function of (logits, allowed)."""
    start = re.fullmatch(r"log_scaled\(start=(\d+)\)", text)

    def log_scaled(logits, allowed):
        count = np.broadcast_to(allowed, logits.shape).sum(-1, keepdims=True)
        return softmax(
            np.maximum(1, np.log(1 + count) / np.log(1 + int(start[1]))) * logits, allowed
        )

    return log_scaled if start else softmax


def weights_of(score, params, query, key, allowed=True, bias=0.0, weigh=softmax):
    """Returns weights [..., T, S] of queries [..., T, Dq] and keys [..., S, Dk]."""
    pair = score if callable(score) else PAIRS[score]
    logits = pair(params, query[..., :, None, :], key[..., None, :, :])
    return weigh(logits + bias, allowed)


def normed(params, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params.get("bias", 0.0)


def rotated(x, positions, max_wavelength):
    """Rotates pairs of features as complex numbers."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None] / max_wavelength ** (np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def turned(x, at, wavelength):
    """`rotated` by the position ids `at`, each its share of the features."""
    parts = zip(np.split(x, len(at), axis=-1), at, strict=True)
    return np.concatenate([rotated(part, ids, wavelength) for part, ids in parts], axis=-1)


def linear(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def head_projection(params, x):
    """Projects x [T, D] to [heads, T, head_dim]."""
    heads = np.einsum("td,dnh->tnh", x, params["kernel"]) + params.get("bias", 0.0)
    return heads.transpose(1, 0, 2)


def multi_head(
    score, params, x, y, allowed=True, bias=0.0, wavelength=None, at=None, weigh=softmax,
    values=None, mod=None,
):  # fmt: skip
    """Returns output [T, output_dim] and weights [N, T, S], to which the masks broadcast.

    `at` are the position ids of x and of y, a list of one or two arrays each.
    """
    query, key = head_projection(params["query"], x), head_projection(params["key"], y)
    value = head_projection(params["value"], y if values is None else values)
    if "query_norm" in params:
        query, key = normed(params["query_norm"], query), normed(params["key_norm"], key)
    if wavelength is not None:
        x_at, y_at = at or ([np.arange(len(x))], [np.arange(len(y))])
        query, key = turned(query, x_at, wavelength), turned(key, y_at, wavelength)
    shape = (len(query), len(x), len(y))
    allowed, bias = np.broadcast_to(allowed, shape), np.broadcast_to(bias, shape)
    group = len(query) // len(key)
    weights, output = [], 0.0
    for n in range(len(query)):
        own = jax.tree.map(lambda leaf, n=n: leaf[n], params.get("params_of_score", {}))
        one = weights_of(score, own, query[n], key[n // group], allowed[n], bias[n], weigh)
        seen = np.where(allowed[n].any(0)[:, None], value[n // group], 0)  # NaN in padding
        head = one @ seen
        head = head if mod is None else mod(head, value[n // group])
        if "gate" in params:
            head = head / (1 + np.exp(-head_projection(params["gate"], x)[n]))
        weights.append(one)
        output = output + head @ params["output"]["kernel"][n]
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


def kind_weights(config, params, query, memory, length, allowed):
    """Weights [T, S] of a kind of cross attention with one head."""
    i, j = np.arange(len(query))[:, None], np.arange(len(memory))[None, :]
    own = params["params_of_score"]
    if config.attention == "coverage":  # of additive attention
        covered, rows = np.zeros(len(memory)), []
        for token in query:
            key = memory @ own["key_kernel"] + covered[:, None] * params["coverage_kernel"]
            logits = np.tanh(token @ own["query_kernel"] + key) @ own["v"]
            rows.append(softmax(logits, allowed[0]))
            covered = covered + rows[-1]
        return np.stack(rows)
    if config.attention == "monotonic":
        logits = PAIRS[config.score](own, query[:, None, :], memory[None, :, :])
        p = np.where(allowed, 1 / (1 + np.exp(-(logits + params["offset"]))), 0)
        return numpy_weights(p)
    if config.attention == "global":
        return weights_of(
            config.score, own, query, memory, allowed, weigh=normalizer(config.cross_normalizer)
        )
    center = i if config.alignment == "monotonic" else length - 1 - i
    if config.attention == "local-p":
        hidden = np.tanh(query @ params["position_kernel"]) @ params["position_v"]
        center = length / (1 + np.exp(-hidden))[:, None]
    window = allowed & (np.abs(j - center) <= config.radius)
    weights = weights_of(config.score, own, query, memory, window)
    if config.attention == "local-p":  # the Gaussian comes after the softmax
        weights = weights * np.exp(-((j - center) ** 2) / (2 * (config.radius / 2) ** 2))
    return weights


def block(config, params, x, at, mask, memory=None, memory_at=None, length=None, seen=None):
    """Returns tokens [T, dim] and weights: of the memory [T, S], or of the tokens [N, T, T]."""
    found, wavelength = [], config.rotary_wavelength

    def attend(x):
        output, weights = multi_head(
            config.self_score, params["self_attention"], x, x, mask, wavelength=wavelength,
            at=(at, at), weigh=normalizer(config.self_normalizer),
        )  # fmt: skip
        found.append(weights)
        return output

    def look(x):
        own = params["cross_attention"].get("attention", {})
        if "query" in own:
            weigh = normalizer(config.cross_normalizer)
            options = {"wavelength": wavelength, "at": (at, memory_at), "weigh": weigh}
            output, weights = multi_head(config.score, own, x, memory, seen, **options)
            found.append(weights.mean(0))
            return output
        keys = memory
        if wavelength is not None:
            x, keys = turned(x, at, wavelength), turned(memory, memory_at, wavelength)
        own = {"params_of_score": {}, **own}
        found.append(kind_weights(config, own, x, keys, length, seen))
        return linear(params["cross_attention"]["output"], found[-1] @ memory)

    if "self_attention" in params:
        x = residual(config, params["self_residual"], x, attend)
    if "cross_attention" in params:
        x = residual(config, params["cross_residual"], x, look)
    if "feed_forward" in params:
        x = residual(
            config, params["feed_forward_residual"], x,
            lambda x: feed_forward(params["feed_forward"], x, config.activation),
        )  # fmt: skip
    return x, found[-1]


def embedded(config, params, table, tokens, at):
    x = table["embedding"][tokens] * np.sqrt(config.dim)
    if config.positions in ("rotary", "none"):
        return x
    size, encodings = config.dim // len(at), []
    for ids in at:
        ratio = config.max_wavelength / config.min_wavelength
        rates = ratio ** (-2 * np.arange(size // 2) / size) / config.min_wavelength
        angles = np.asarray(ids)[:, None] * rates
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        is_learned = config.positions == "learned"
        encodings.append(params["placement"]["table"][np.asarray(ids)] if is_learned else waves)
    return x + config.position_scale * np.concatenate(encodings, axis=1)


def model(config, params, source, length, inputs, ids):
    """Logits [T, V] and weights [L, T, S] of one example; `ids` are those of 0, 1, 2, ..."""
    ids, count, size = np.array(ids), len(inputs), len(source)
    visible = length if config.mask_padding else size
    own_table = params.get("target_embedding", params.get("source_embedding"))
    weights = []
    if config.architecture == "decoder":
        tokens = np.concatenate([source[:visible], inputs])  # without padding
        x = embedded(config, params, own_table, tokens, [ids[: len(tokens)]])
        causal = np.tri(len(tokens), dtype=bool)
        for own in params["decoder"].values():
            x, found = block(config, own, x, [ids[: len(tokens)]], causal)
            of_source = np.zeros((count, size))
            of_source[:, :visible] = found.mean(0)[visible:, :visible]
            weights.append(of_source)
        x = x[visible:]
    else:
        start, end = np.arange(size), np.maximum(visible - 1 - np.arange(size), 0)
        at = {"start": [start], "end": [end], "both": [start, end]}[config.position_anchor]
        at = [ids[positions] for positions in at]
        seen = np.arange(size)[None, :] < visible
        memory = embedded(config, params, params["source_embedding"], source, at)
        for own in params.get("encoder", {}).values():
            memory, _ = block(config, own, memory, at, seen)
        memory = normed(params["memory_norm"], memory)
        to = [ids[:count]] * len(at)
        x = embedded(config, params, own_table, inputs, to)
        for own in params["decoder"].values():
            causal = np.tri(count, dtype=bool)
            x, found = block(config, own, x, to, causal, memory, at, visible, seen)
            weights.append(found)
    features = normed(params["output_norm"], x)
    if "logits" in params:
        return linear(params["logits"], features), np.stack(weights)
    return features @ own_table["embedding"].T, np.stack(weights)


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


# --- monotonic attention as loops over keys ---


def numpy_weights(p, initial=None):
    """Returns the weights of one example by the paper's sum of products."""
    p = np.asarray(p, np.float64)
    previous = np.eye(p.shape[1])[0] if initial is None else np.asarray(initial, np.float64)
    weights = np.zeros_like(p)
    for i in range(p.shape[0]):
        for j in range(p.shape[1]):
            weights[i, j] = p[i, j] * sum(
                previous[k] * np.prod(1 - p[i, k:j]) for k in range(j + 1)
            )
        previous = weights[i]
    return weights


def numpy_walk(choices, start=0):
    """Returns positions by algorithm 1, as a loop; S where a query attends to nothing."""
    positions = []
    for row in choices:
        while start < len(row) and not row[start]:
            start += 1
        positions.append(start)
    return positions


def probabilities(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape).astype(np.float32)
