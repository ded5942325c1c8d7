"""The doors into other people's models, and the Flax modules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import (
    NO_FLOATS,
    NO_INTEGERS,
    NO_SIZES,
    assert_kind,
    assert_near,
    filled,
    plain_or_not,
    seeds,
    tolerance,
)
from attention_side import Arguments, arguments, attend
from flax import nnx
from hypothesis import strategies as st
from outcomes import Kind, mistakes
from score_cases import SCORE_CASES

import attention_jax as aj
from attention_jax import interop, nn

F4 = np.float32


# --- interop ---


@st.composite
def interop_cases(draw):
    """[B, T, N, D]: of each head, arguments as attention_side.py has them."""
    batch, length, keys, heads, key_heads, dim = draw(st.sampled_from([
        (2, 2, 3, 2, 1, 2), (1, 3, 2, 2, 2, 3), (2, 2, 3, 4, 2, 1), (0, 2, 3, 1, 1, 2),
        (2, 0, 3, 1, 1, 2), (2, 2, 0, 1, 1, 2), (1, 1, 1, 1, 1, 1),
    ]))  # fmt: skip
    rng = np.random.default_rng(draw(seeds))
    arrays = {
        "query": filled(rng, (batch, length, heads, dim), draw(plain_or_not)),
        "key": filled(rng, (batch, keys, key_heads, dim), draw(plain_or_not)),
        "value": filled(rng, (batch, keys, key_heads, 2), draw(plain_or_not)),
    }
    options = {
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(st.sampled_from([None, None, 1, (0, 2), (3, 0)])),
        "query_seq_lengths": draw(st.sampled_from([None, rng.integers(0, length + 1, batch)])),
        "key_value_seq_lengths": draw(st.sampled_from([None, rng.integers(0, keys + 1, batch)])),
        "mask": draw(st.sampled_from([None, rng.random((batch, heads, length, keys)) < 0.7,
                                      rng.random((1, 1, length, keys)) < 0.7])),
    }  # fmt: skip
    score = draw(st.sampled_from(["scaled", "scaled", "additive"]))
    unbatched = batch == 1 and draw(st.booleans())
    implementation = draw(st.sampled_from([None, "reference", "tiled"]))
    return arrays, options, score, unbatched, implementation, draw(st.booleans())


def _params(score: str, dim: int) -> Any:
    return SCORE_CASES[score].score.init(jax.random.key(1), dim, dim)


def call_interop(case: Any) -> Any:
    arrays, options, score, unbatched, implementation, residual = case
    with np.errstate(all="ignore"):
        arrays = {name: x.astype(F4)[0 if unbatched else slice(None)] for name, x in arrays.items()}
    if unbatched and options["mask"] is not None:
        options = {**options, "mask": options["mask"][0]}
    return interop.dot_product_attention(
        **arrays, **options, score=SCORE_CASES[score].score,
        params=_params(score, arrays["query"].shape[-1]), implementation=implementation,
        return_residual=residual,
    )  # fmt: skip


def expect_interop(case: Any) -> Any:
    arrays, options, score, _, _, _ = case
    batch, length, heads, dim = arrays["query"].shape
    keys, key_heads = arrays["key"].shape[1:3]
    i, j = np.arange(length)[:, None], np.arange(keys)
    may = np.ones((batch, heads, length, keys), bool)
    if options["is_causal"]:
        may &= j <= i
    if options["local_window_size"] is not None:
        size = options["local_window_size"]
        left, right = size if isinstance(size, tuple) else (size, size)
        may &= (i - left <= j) & (j <= i + right)
    for name, places in (("query_seq_lengths", i), ("key_value_seq_lengths", j)):
        if options[name] is not None:
            may &= places < options[name][:, None, None, None]
    if options["mask"] is not None:
        may &= options["mask"]
    shared = np.arange(heads) // (heads // key_heads)
    per_head = {
        "query": np.moveaxis(arrays["query"], 1, 2),
        **{name: np.moveaxis(arrays[name], 1, 2)[:, shared] for name in ("key", "value")},
    }
    params = jax.tree.map(lambda leaf: np.asarray(leaf, float), _params(score, dim))
    size = ((batch, heads), length, keys, dim, dim, 2)
    return attend(Arguments(size, F4, False, score, per_head, "jax", None, None, params), may)


def compare_interop(case: Any, got: Any, expected: Any) -> None:
    *_, unbatched, _, with_residual = case
    output, residual = got if with_residual else (got, None)
    bound = tolerance(F4, False, expected.size)
    for name, array, right, sure in (
        ("output", output, expected.output, expected.sure_output[..., None]),
        ("residual", residual, expected.logsumexp, expected.sure),
    ):
        if array is None:
            continue
        right, sure = (np.moveaxis(x, 1, 2)[0 if unbatched else slice(None)] for x in (right, sure))
        assert_kind(name, array, right.shape, F4)
        scale = max(1.0, 1 / max(np.abs(right[np.isfinite(right)]).max(initial=0), 1e-9))
        assert_near(name, array, right, bound * (scale if name == "residual" else 1), where=sure)


MISTAKEN_INTEROP = [
    *(({name: bad}, name) for name in ("query", "key", "value") for bad in (
        *NO_FLOATS.values(), np.ones((2, 2), "f4"), np.ones((1, 1, 1, 1, 1), "f4"))),
    *(({"key": np.ones(shape, "f4")}, "key")
      for shape in ((2, 3, 3, 2), (3, 3, 2, 2), (3, 2, 2), (2, 3, 2, 5), (2, 3, 0, 2))),
    *(({"value": np.ones(shape, "f4")}, "value")
      for shape in ((2, 3, 1, 2), (2, 4, 2, 2), (1, 3, 2, 2), (3, 2, 2))),
    *(({"mask": bad}, "mask") for bad in (
        "causal", 1, np.ones((2, 3)), np.ones((7, 3), bool), np.ones((3, 1, 2, 3), bool), {})),
    *(({"bias": bad}, "bias") for bad in (
        *(v for k, v in NO_FLOATS.items() if k != "function"), np.ones((7, 3), "f4"))),
    *(({"scale": bad}, "scale") for bad in ("text", [1.0], np.ones(2), {}, np.nan, np.inf)),
    ({"scale": 0.5, "score": "dot"}, "scale"),
    *(({name: bad}, name) for name in ("query_seq_lengths", "key_value_seq_lengths") for bad in (
        *NO_INTEGERS.values(), 3, np.ones(3, int), np.ones((2, 1), int))),
    *(({"local_window_size": bad}, "local_window_size") for bad in (
        -1, 1.5, "1", (1,), (1, 2, 3), (-1, 0), (None, 1), {}, [[1], 2])),
    *(({"implementation": bad}, "implementation") for bad in ("xla", "cudnn", "flash", 3, ["xla"])),
    *(({"score": bad}, "score") for bad in ("skaled", None, 3)),
    *(({"params": bad}, "params") for bad in ({"v": np.ones(2)}, 3, "text")),
]  # fmt: skip


def call_interop_mistaken(case: Any) -> Any:
    good = {name: np.ones((2, n, 2, 2), "f4") for name, n in
            (("query", 2), ("key", 3), ("value", 3))}  # fmt: skip
    return interop.dot_product_attention(**{**good, **case[0]})


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
    *((nn.CrossAttentionConfig, {}, {"sharpen_from": bad}, "sharpen_from")
      for bad in (0, -1, 2.5, "a")),
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
    model = _seq2seq(tuple(sorted(config.items())))
    other = np.where(np.arange(source.shape[1]) < ends[:, None], source, (source + 3) % 7)

    def run(source: np.ndarray) -> Any:
        i4 = [jnp.asarray(x, jnp.int32) for x in (source, ends, target)]
        return _run(model.config, nnx.to_pure_dict(nnx.state(model)), *i4)

    return run(source), run(other)


@functools.partial(jax.jit, static_argnums=0)
def _run(config: Any, state: Any, *arrays: Any) -> Any:
    model = _seq2seq(tuple(sorted(
        (name, getattr(config, name)) for name in ("attention", "dim", "encoder_layers",
                                                   "hidden_dim", "score")
    )))  # fmt: skip
    return nnx.merge(nnx.graphdef(model), state)(*arrays, return_weights=True)


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
    Kind("interop.dot_product_attention", interop_cases(), call_interop, expect_interop,
         compare_interop, 100, 4),
    mistakes("interop, a mistake", MISTAKEN_INTEROP, call_interop_mistaken),
    Kind("nn.Attention", arguments(dtypes=[(F4, False)]), call_module, attend,
         compare_module, 60, 3),
    Kind("nn.MultiHeadAttention", head_cases(), call_heads, expect_heads, compare_heads, 60, 3),
    mistakes("modules, a mistake in making them", MISTAKEN_MODULES, call_module_mistaken),
    mistakes("modules, a mistake in calling them", MISTAKEN_CALLS, call_called_mistaken),
    Kind("nn.Seq2Seq", seq2seq_cases(), call_seq2seq, lambda case: None, compare_seq2seq, 30, 2),
]  # fmt: skip
