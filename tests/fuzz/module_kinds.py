"""Kinds for the Flax modules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import (
    NO_FLOATS,
    NO_SIZES,
    assert_kind,
    assert_near,
    filled,
    seeds,
    tolerance,
)
from attention_side import Arguments, arguments, attend
from flax import nnx
from hypothesis import strategies as st
from outcomes import Kind, mistakes
from score_cases import SCORE_CASES

import attention_jax as aj
from attention_jax import nn

F4 = np.float32


# --- nn.Attention and nn.MultiHeadAttention ---


def call_module(case: Arguments) -> Any:
    *_, query_dim, key_dim, _ = case.size
    module = nn.Attention(SCORE_CASES[case.score].score, query_dim, key_dim, rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda leaf: nnx.Param(jnp.asarray(leaf, F4)), case.params)
    module.params = nnx.data(params)
    keywords = {k: v for k, v in case.keywords().items() if k not in ("score", "params")}
    return module(**keywords, return_weights=True)


def compare_module(case: Arguments, got: Any, expected: Any) -> None:
    bound = tolerance(F4, False, expected.size)
    for name, array, right, sure in (
        ("output", got[0], expected.output, expected.sure_output),
        ("weights", got[1], expected.weights, expected.sure),
    ):
        assert_kind(name, array, right.shape, F4)
        assert_near(name, array, right, bound, where=sure[..., None])


@st.composite
def head_cases(draw):
    heads, key_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    batch, length = draw(st.sampled_from([((2,), 3), ((), 2), ((0,), 2), ((2,), 0), ((2,), 1)]))
    rng = np.random.default_rng(draw(seeds))
    tokens = filled(rng, (*batch, length, 4), draw(st.sampled_from(["plain", "zeros", "nan"])))
    ends = draw(st.sampled_from([None, rng.integers(0, length + 1, batch)]))
    return heads, key_heads, tokens, ends, draw(st.sampled_from(["scaled", "additive"]))


@functools.cache
def _heads(heads: int, key_heads: int, score: str) -> nn.MultiHeadAttention:
    score_ = SCORE_CASES[score].score
    return nn.MultiHeadAttention(
        score_, 4, num_heads=heads, num_key_heads=key_heads, rngs=nnx.Rngs(0)
    )


def call_heads(case: Any) -> Any:
    heads, key_heads, tokens, ends, score = case
    mask = aj.causal_mask() if ends is None else aj.padding_mask(ends)
    return _heads(heads, key_heads, score)(jnp.asarray(tokens, F4), mask=mask, return_weights=True)


def expect_heads(case: Any) -> Any:
    heads, key_heads, tokens, ends, score = case
    module = _heads(heads, key_heads, score)
    kernel = {
        name: np.asarray(getattr(module, name).kernel[...], float)
        for name in ("query", "key", "value", "output")
    }
    *batch, length, _ = tokens.shape
    project = {name: np.einsum("...td,dnh->...nth", tokens, kernel[name])
               for name in ("query", "key", "value")}  # fmt: skip
    shared = np.arange(heads) // (heads // key_heads)
    project |= {name: project[name][..., shared, :, :] for name in ("key", "value")}
    i, j = np.arange(length)[:, None], np.arange(length)
    may = j <= i if ends is None else (j < ends[..., None, None, None])
    dim = 4 // heads
    params = jax.tree.map(lambda p: np.asarray(p[...], float), module.params,
                          is_leaf=lambda leaf: isinstance(leaf, nnx.Param))  # fmt: skip
    found = []
    for head in range(heads):
        own = {name: x[..., head, :, :] for name, x in project.items()}
        of_head = jax.tree.map(lambda leaf, head=head: leaf[head], params)
        size = (tuple(batch), length, length, dim, dim, dim)
        case_ = Arguments(size, np.float64, True, score, own, "jax", None, None, of_head)
        one = may if ends is None else may[..., 0, :, :]
        found.append(attend(case_, np.broadcast_to(one, (*batch, length, length))))
    merged = [np.einsum("...th,ho->...to", found[n].output, kernel["output"][n])
              for n in range(heads)]  # fmt: skip
    return sum(merged), np.stack([one.weights for one in found], -3), found


def compare_heads(case: Any, got: Any, expected: Any) -> None:
    output, weights, found = expected
    bound = 8 * tolerance(F4, False, max(one.size for one in found))
    assert_kind("output", got[0], output.shape, F4)
    sure = np.all([one.sure_output for one in found], 0)
    assert_near("output", got[0], output, bound, where=sure[..., None])
    sure = np.stack([one.sure for one in found], -2)
    assert_near("weights", got[1], weights, bound, where=sure[..., None])


ATTENTION: dict[str, Any] = {"score": "scaled", "query_dim": 4, "key_dim": 4}
DROPPING: dict[str, Any] = {"dropout_rate": 0.5, "deterministic": True}
HEADS: dict[str, Any] = {"score": "scaled", "query_dim": 4, "num_heads": 2}
CONFIG: dict[str, Any] = {"dim": 8, "hidden_dim": 8}
MISTAKEN_MODULES = [
    *((nn.Attention, ATTENTION, {name: bad}, name)
      for name in ("query_dim", "key_dim") for bad in (*NO_SIZES.values(), None)),
    (nn.Attention, ATTENTION, {"key_dim": 3}, "key_dim"),
    *((function, good, {"score": bad}, "score")
      for function, good in ((nn.Attention, ATTENTION), (nn.MultiHeadAttention, HEADS))
      for bad in ("skaled", None, 3, [], "os:path")),
    *((function, good, {"dropout_rate": bad}, "dropout_rate")
      for function, good in ((nn.Attention, ATTENTION), (nn.MultiHeadAttention, HEADS))
      for bad in (1.0, -1, np.nan, "a", None, 1j)),
    *((function, good, {"implementation": bad}, "implementation")
      for function, good in ((nn.Attention, ATTENTION), (nn.MultiHeadAttention, HEADS))
      for bad in ("flash", 3, [])),
    *((nn.MultiHeadAttention, HEADS, {name: bad}, name)
      for name in ("query_dim", "key_dim", "qkv_dim", "output_dim", "num_heads", "num_key_heads")
      for bad in NO_SIZES.values()),
    *((nn.MultiHeadAttention, HEADS, {"rotary_wavelength": bad}, "rotary_wavelength")
      for bad in (0, -1.0, np.nan, np.inf, "a", [1.0])),
    (nn.MultiHeadAttention, HEADS, {"num_heads": 3}, ("qkv_dim", "num_heads")),
    (nn.MultiHeadAttention, HEADS, {"num_key_heads": 3}, "num_key_heads"),
    *((nn.BlockConfig, {}, {name: bad}, name)
      for name in ("dim", "hidden_dim", "num_heads", "num_key_heads")
      for bad in (-1, 2.5, "2", [2])),
    *((nn.BlockConfig, {}, {name: bad}, name)
      for name in ("activation", "norm") for bad in ("x", None, 3, [])),
    *((nn.BlockConfig, {}, {"dropout_rate": bad}, "dropout_rate")
      for bad in (1.0, -0.1, np.nan, "a", None)),
    *((nn.CrossAttentionConfig, {}, {"radius": bad}, "radius") for bad in (-1, 2.5, "2", [2])),
    *((nn.CrossAttentionConfig, {}, {name: bad}, name)
      for name in ("attention", "alignment") for bad in ("x", None, 3, [])),
    *((nn.CrossAttentionConfig, {}, {"normalizer": bad}, "normalizer")
      for bad in ("softmx", None, 3, [])),
    *((nn.Seq2SeqConfig, {}, {"decoder_layers": bad}, "decoder_layers")
      for bad in (-1, 2.5, "2", [2])),
    *((nn.Seq2SeqConfig, {}, {"encoder_layers": bad}, "encoder_layers")
      for bad in (-1, 2.5, "2", None)),
    *((nn.Seq2SeqConfig, {}, {name: bad}, name)
      for name in ("block", "cross_attention", "positions") for bad in ("rotary", None, 3)),
    *((nn.Seq2SeqConfig, {}, {"score": bad}, "score") for bad in ("skaled", None, 3, [])),
    *((nn.PositionConfig, {}, {"kind": bad}, "kind") for bad in ("x", None, 3)),
    *((nn.PositionConfig, {}, {"limit": bad}, "limit") for bad in (0, -1, 2.5, "2", None, True)),
    *((nn.PositionConfig, {}, {name: bad}, name)
      for name in ("max_wavelength", "min_wavelength", "scale")
      for bad in (0, -1.0, np.nan, np.inf, "a", None)),
]  # fmt: skip


def call_module_mistaken(case: Any) -> Any:
    function, good, bad, _ = case
    rngs = {"rngs": nnx.Rngs(0)} if issubclass(function, nnx.Module) else {}
    return function(**{**good, **bad}, **rngs)


MISTAKEN_CALLS = [
    *((kind, {name: bad}, name) for kind in ("one", "heads") for name in ("query", "key", "value")
      for bad in (*NO_FLOATS.values(), np.ones(4, "f4"), np.ones((2, 3, 7), "f4"), 1.0)
      if not (name == "value" and isinstance(bad, np.ndarray) and bad.shape == (2, 3, 7)
              and kind == "one")),
    *((kind, {"mask": bad}, "mask") for kind in ("one", "heads")
      for bad in ("causal", 1, np.ones((7, 7), bool), np.ones((3, 3)), {})),
    *((kind, {"bias": bad}, "bias") for kind in ("one", "heads")
      for bad in ("alibi", 1, np.ones((7, 7), "f4"), np.ones((3, 3), bool), {})),
    *((kind, {"dropout_rng": bad}, "dropout_rng") for kind in ("one", "heads")
      for bad in (7, "key", np.zeros(3, np.uint32), jax.random.split(jax.random.key(0)))),
]  # fmt: skip


@functools.cache
def _module(kind: str) -> Any:
    if kind == "one":
        return nn.Attention("scaled", 4, 4, **DROPPING, rngs=nnx.Rngs(0))
    return nn.MultiHeadAttention("scaled", 4, num_heads=2, **DROPPING, rngs=nnx.Rngs(0))


def call_called_mistaken(case: Any) -> Any:
    kind, bad, _ = case
    good = {name: np.ones((2, 3, 4), "f4") for name in ("query", "key", "value")}
    return _module(kind)(**{**good, **bad})


# --- nn.Seq2Seq ---


@st.composite
def seq2seq_cases(draw):
    config = {
        **CONFIG,
        "score": draw(st.sampled_from(["scaled", "additive"])),
        "attention": draw(st.sampled_from(["global", "local-m", "coverage", "monotonic"])),
        "encoder_layers": draw(st.sampled_from([0, 1])),
    }
    batch, length, target = draw(st.sampled_from([(2, 3, 2), (1, 1, 1), (0, 2, 3)]))
    rng = np.random.default_rng(draw(seeds))
    source = rng.integers(0, 7, (batch, length))
    return config, source, rng.integers(0, length + 1, batch), rng.integers(0, 7, (batch, target))


@functools.cache
def _seq2seq(items: tuple) -> nn.Seq2Seq:
    return nn.Seq2Seq(nn.Seq2SeqConfig().with_settings(**dict(items)), 7, rngs=nnx.Rngs(0))


def call_seq2seq(case: Any) -> Any:
    """Twice: the second time with other letters where there is padding."""
    config, source, ends, target = case
    settings = tuple(sorted(config.items()))
    state = nnx.to_pure_dict(nnx.state(_seq2seq(settings)))
    other = np.where(np.arange(source.shape[1]) < ends[:, None], source, (source + 3) % 7)

    def run(source: np.ndarray) -> Any:
        i4 = [jnp.asarray(x, jnp.int32) for x in (source, ends, target)]
        return _run(settings, state, *i4)

    return run(source), run(other)


@functools.partial(jax.jit, static_argnums=0)
def _run(settings: Any, state: Any, *arrays: Any) -> Any:
    return nnx.merge(nnx.graphdef(_seq2seq(settings)), state)(*arrays, return_weights=True)


def compare_seq2seq(case: Any, got: Any, expected: Any) -> None:
    config, source, ends, target = case
    (logits, weights), (other_logits, _) = got
    batch, length = source.shape
    assert_kind("logits", logits, (batch, target.shape[1], 7), F4)
    assert_kind("weights", weights, (1, batch, target.shape[1], length), F4)
    assert np.isfinite(logits).all(), "logits are not finite"
    assert np.array_equal(logits, other_logits), "padding is seen"
    sums, weights = np.asarray(weights.sum(-1)), np.asarray(weights)
    padding = np.broadcast_to(np.arange(length) >= ends[:, None, None], weights.shape)
    assert not weights[padding].any(), "padding has weights"
    assert (sums <= 1 + 1e-5).all()
    if config["attention"] in ("global", "coverage"):
        assert np.allclose(sums, np.broadcast_to((ends > 0)[:, None], sums.shape), atol=1e-5)


KINDS = [
    Kind("nn.Attention", arguments(dtypes=[(F4, False)]), call_module, attend,
         compare_module, 60, 3),
    Kind("nn.MultiHeadAttention", head_cases(), call_heads, expect_heads, compare_heads, 60, 3),
    mistakes("modules, a mistake in making them", MISTAKEN_MODULES, call_module_mistaken),
    mistakes("modules, a mistake in calling them", MISTAKEN_CALLS, call_called_mistaken),
    Kind("nn.Seq2Seq", seq2seq_cases(), call_seq2seq, lambda case: None, compare_seq2seq, 30, 2),
]  # fmt: skip
