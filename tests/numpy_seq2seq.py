"""Seq2Seq in float64 NumPy, one example at a time, with every kind of positions."""

import functools
import re

import jax
import numpy as np
from flax import nnx
from numpy_model import (
    feed_forward,
    head_projection,
    linear,
    normed,
    residual,
    rotated,
    scrambled,
    softmax_where,
    weights_of,
)
from score_cases import SCORE_CASES

from attention_jax.nn import ModelConfig, Seq2Seq

B, T, S, V = 3, 5, 7, 11
PAD, SOS, EOS = 0, 1, 2
LENGTHS = [4, 7, 1]
NUMBERS = {"max_length": T, "sos": SOS, "eos": EOS, "pad": PAD}
GAPS = (2, 3, 7, 8, 13, 14, 15)  # increasing position ids, some of them neighbours
BARE = {"encoder_layers": 0, "decoder_self_attention": False}


def settings(kind="sinusoidal", anchor="start", draw="none", **rest):
    usual = {
        "score": "additive", "dim": 8, "hidden_dim": 13, "positions": kind,
        "position_anchor": anchor, "position_draw": draw, "position_limit": 17,
        "max_wavelength": 50.0, "position_scale": 2.0,
    }  # fmt: skip
    return ModelConfig(**{**usual, **rest})


def make(config, noise=0.5, seed=1):
    return scrambled(lambda: Seq2Seq(config, V, rngs=nnx.Rngs(0)), seed=seed, noise=noise)


def sources(seed=4):
    return np.random.default_rng(seed).integers(3, V, size=(B, S)).astype(np.int32)


def targets(seed=5):
    return np.random.default_rng(seed).integers(3, V, size=(B, T)).astype(np.int32)


# --- the model in NumPy, one example at a time ---


def source_ids(anchor, ids, count, real):
    """[[count], ...] of a source with so many real tokens; those of padding do not matter."""
    from_start = [ids[j] for j in range(count)]
    from_end = [ids[max(real - 1 - j, 0)] for j in range(count)]
    return {"start": [from_start], "end": [from_end], "both": [from_start, from_end]}[anchor]


def turned(config, x, at):
    """`rotated` by the position ids `at`, each its share of the features; or x itself."""
    if config.positions != "rotary":
        return x
    parts = np.split(x, len(at), axis=-1)
    wave = config.max_wavelength
    return np.concatenate(
        [rotated(part, own, wave) for part, own in zip(parts, at, strict=True)], -1
    )


def embedded(config, params, name, tokens, at):
    x = params[name]["embedding"][tokens] * np.sqrt(config.dim)
    if config.positions in ("rotary", "none"):
        return x
    size = config.dim // len(at)
    encodings = []
    for own in at:
        exponents = 2 * np.arange(size // 2) / size
        angles = np.array(own)[:, None] / config.max_wavelength**exponents
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        learned = config.positions == "learned"
        encodings.append(params["placement"]["table"][own] if learned else waves)
    return x + config.position_scale * np.concatenate(encodings, axis=1)


def heads_of(config, score, params, x, x_at, y, y_at, allowed):
    """Multi-head attention: output, and weights averaged over heads."""
    query, key = (
        turned(config, head_projection(params[name], tokens), at)
        for name, tokens, at in (("query", x, x_at), ("key", y, y_at))
    )
    value, output, weights = head_projection(params["value"], y), 0.0, []
    for n in range(len(query)):
        own = jax.tree.map(lambda leaf, n=n: leaf[n], params.get("params", {}))
        weights.append(weights_of(score, own, query[n], key[n], allowed))
        output = output + weights[n] @ value[n] @ params["output"]["kernel"][n]
    return output, np.mean(weights, axis=0)


def numpy_seq2seq(config, params, source, length, inputs, ids):
    """Logits [T, V] and the last block's weights [T, S]."""
    self_score = config.self_attention_score or config.score
    allowed = np.arange(len(source))[None, :] < length
    at = source_ids(config.position_anchor, ids, len(source), length)
    to = [[ids[j] for j in range(len(inputs))]] * len(at)
    causal = np.tril(np.ones((len(inputs), len(inputs)), bool))

    x = embedded(config, params, "source_embedding", source, at)
    for layer in range(config.encoder_layers):
        block = params["encoder"][layer]
        own = functools.partial(heads_of, config, self_score, block["self_attention"])
        x = residual(
            config, block["self_residual"], x,
            lambda x, own=own: own(x, at, x, at, allowed)[0],
        )  # fmt: skip
        feed = functools.partial(feed_forward, block["feed_forward"])
        x = residual(config, block["feed_forward_residual"], x, feed)
    memory = normed(params["memory_norm"], x)

    y, weights = embedded(config, params, "target_embedding", inputs, to), None
    for layer in range(config.decoder_layers):
        block = params["decoder"][layer]

        def look(y, block=block):
            nonlocal weights
            cross = block["cross_attention"]
            if config.num_heads > 1:
                found, weights = heads_of(
                    config, config.score, cross["attention"], y, to, memory, at, allowed
                )
                return found
            query, key = turned(config, y, to)[:, None, :], turned(config, memory, at)[None]
            own = cross.get("attention", {}).get("params", {})
            logits = SCORE_CASES[config.score].pair(own, query, key)
            start = re.fullmatch(r"log_scaled\(start=(\d+)\)", config.normalizer)
            if start:
                logits = max(1, np.log(1 + length) / np.log(1 + int(start[1]))) * logits
            weights = softmax_where(logits, allowed)
            return linear(cross["output"], weights @ memory)

        if config.decoder_self_attention:
            own = functools.partial(heads_of, config, self_score, block["self_attention"])
            y = residual(
                config, block["self_residual"], y,
                lambda y, own=own: own(y, to, y, to, causal)[0],
            )  # fmt: skip
        y = residual(config, block["cross_residual"], y, look)
        feed = functools.partial(feed_forward, block["feed_forward"])
        y = residual(config, block["feed_forward_residual"], y, feed)
    return linear(params["logits"], normed(params["output_norm"], y)), weights
