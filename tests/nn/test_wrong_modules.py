"""Wrong arguments of modules, of the model and of its decoding: see `mistakes`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import no
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st
from mistakes import refuses, using
from no import one_of, ones

import attention_jax as aj
from attention_jax import nn


@functools.cache
def heads():
    dropout = {"dropout_rate": 0.5, "deterministic": True}
    return nn.MultiHeadAttention("scaled", 4, num_heads=2, **dropout, rngs=nnx.Rngs(0))


@functools.cache
def attention():
    return nn.Attention("scaled", 4, 4, dropout_rate=0.5, deterministic=True, rngs=nnx.Rngs(0))


@functools.cache
def block():
    return nn.Block(nn.ModelConfig(dim=4), is_cross=True, rngs=nnx.Rngs(0))


@functools.cache
def decoder(architecture="decoder"):
    return nn.Model(nn.ModelConfig(architecture, dim=4, hidden_dim=0), 11, rngs=nnx.Rngs(0))


encoder_decoder = functools.partial(decoder, "encoder-decoder")


def calling(module, method="__call__", **also):
    """Returns a function that calls a method of the module that `module` makes."""

    def call(**arguments):
        return getattr(module(), method)(**also, **arguments)

    call.__name__ = f"{getattr(module, '__name__', 'encoder_decoder')}.{method}"
    return call


def decode_step(tokens):
    return decoder().decode_step(decoder().start_decoding(IDS, max_length=2), tokens)


IDS = [[3, 4, 5], [6, 7, 8]]
MODEL = {"source": IDS, "source_lengths": [3, 2], "target_inputs": [[1, 3], [1, 4]]}
no_ids = no.arrays | one_of(None, 1, [1, 2], ones(2, 3), ones(2, 3, dtype=bool))
no_ids |= one_of([[-1, 3, 4]] * 2, [[3, 4, 11]] * 2, [IDS], np.full((2, 100), 11), 2**40)
no_lengths = no.integers | one_of(2, [3], IDS, [3, 4], [-1, 2])  # swapped with tokens, for instance
wrong_model = {
    "source": no_ids | st.just(ones(2, 3, 11)), "source_lengths": no_lengths,
    "target_inputs": no_ids | one_of([[1, 3]], [2, 3], ones(2, 2, 7)),
    "position_ids": no.arrays | one_of(1, [0, 1], [[0, 1, 2]] * 2), "rng": no.rng,
}  # fmt: skip
MODEL_SOURCE = {"source": IDS, "source_lengths": [3, 2]}
ENDS = {"max_length": 2, "sos": 1, "eos": 2, "pad": 0}
no_token = one_of(1.0, "1", None, [1], True, ones(2))
wrong_ends = {
    "source": no_ids, "source_lengths": no_lengths, "eos": no_token | one_of(-1, 11),
    "sos": no_token | one_of(-1, 11, [1, 2, 3], [1, 11], [[1], [2]]),
    "pad": no_token | st.just(2**31), "max_length": no.size_or_none | st.just([2, 2]),
}  # fmt: skip

module_options = {"score": no.score, "dropout_rate": no.rate, "implementation": no.word}
CALLED = {name: ones(2, 3, 4) for name in ("query", "key", "value")}
wrong_called = dict.fromkeys(CALLED, no.floats | one_of(1.0, ones(4)))
wrong_called |= {
    "mask": no.mask,
    "bias": no.bias,
    "dropout_rng": no.rng,
    "key": wrong_called["key"] | st.just(ones(3, 3, 4)),
}
wrong_called |= {"value": wrong_called["value"] | st.just(ones(2, 2, 4))}


def extended(x, cache):
    return heads().extend(x, heads().empty_cache(*cache))


def modified(key):
    options = {"output_mod": lambda output, value: output + value, "rngs": nnx.Rngs(0)}
    return nn.MultiHeadAttention("scaled", 4, num_heads=2, **options)(ones(2, 3, 4), key)


def remembered(value):
    return heads()(ones(2, 3, 4), heads().remember(ones(2, 3, 4)), value)


def made(module, **also):
    """Returns a function that makes a Flax module."""
    return using(module, **also, rngs=nnx.Rngs(0))


WRONG = [
    (made(nn.Attention), {"score": "scaled", "query_dim": 4, "key_dim": 4},
     module_options | {"query_dim": no.size_or_none, "key_dim": no.size_or_none | st.just(3)}),
    (made(nn.MultiHeadAttention), {"score": "scaled", "query_dim": 4, "num_heads": 2}, {
        **module_options, **dict.fromkeys(("query_dim", "key_dim", "qkv_dim"), no.size),
        "output_dim": no.size, "num_heads": no.size, "num_key_heads": no.size | st.just(3),
        "rotary_wavelength": no.positive | st.just(np.inf),
        "output_mod": one_of(1, lambda output: output, lambda output, value: output[0])}),
    (modified, {"key": None}, {"key": st.just(ones(2, 3, 4))}),
    (extended, {"x": ones(2, 3, 4), "cache": ((2,), 3)},
     {"x": st.just(ones(2, 5, 4)), "cache": one_of(
         (2, 3), ((3,), 3), ((2,), 2.5), ((2,), 3, int), ((2,), 3, "float33"))}),
    (remembered, {}, {"value": st.just(ones(2, 3, 4))}),
    (made(nn.FeedForward), {"dim": 4, "hidden_dim": 4}, {
        "activation": no.word, "dim": no.size_or_none, "hidden_dim": no.size_or_none}),
    (made(nn.Model), {"config": nn.ModelConfig(dim=4), "vocabulary_size": 11},
     {"config": one_of(None, "decoder", {"dim": 4}, 11), "vocabulary_size": no.size_or_none}),
    (made(nn.LocalPAttention), {"score": "dot", "query_dim": 4, "key_dim": 4, "radius": 1},
     dict.fromkeys(("radius", "hidden_dim"), no.size)),
    (made(nn.LocalMAttention), {"score": "dot", "query_dim": 4, "key_dim": 4, "radius": 1},
     {"radius": no.count, "alignment": no.word, "dropout_rate": no.rate}),
    (made(nn.MonotonicAttention), {"score": "dot", "query_dim": 4, "key_dim": 4},
     {"score": no.score, "key_dim": no.size_or_none | st.just(3)}),
    (nn.rotary, {"x": ones(2, 4)}, {
        "x": no.floats | one_of(None, ones(4), ones(2, 3)), "max_wavelength": no.positive,
        "position_ids": no.arrays | one_of(1, [0], [[0, 1]])}),
    (nn.rotary, {"x": ones(2, 5, 4)}, {"position_ids": one_of(
        *(np.zeros(shape, int) for shape in ((), (4,), (3, 5), (5, 2), (1, 5), (2, 5, 5))))}),
    (nn.sinusoidal_encoding, {"position_ids": [0, 1], "dim": 4}, {
        "position_ids": no.arrays, "dim": no.size_or_none | st.just(3),
        "max_wavelength": no.positive}),
    (nn.anchored_positions, {"length": 4, "lengths": [3], "anchor": "end"},
     {"length": no.count, "lengths": no.integers | st.none(), "anchor": no.word}),
    *((draw, {"rng": jax.random.key(0), "count": 3, "limit": 5},
       {"rng": no.rng, "count": no.size_or_none | st.just(6), "limit": no.size_or_none})
      for draw in (nn.random_position_ids, nn.random_window_position_ids)),
    (calling(attention), CALLED, wrong_called),
    (calling(heads), CALLED, wrong_called | {
        "bias": wrong_called["bias"] | one_of(ones(2, 3, 3), aj.alibi_bias(0.5) + ones(2, 3, 3))}),
    (nn.ModelConfig, {}, {
        **dict.fromkeys(("dim", "hidden_dim", "num_heads", "num_key_heads", "decoder_layers"),
                        one_of(2.5, "2", [2]) | st.integers(max_value=-1)),
        **dict.fromkeys(("architecture", "activation", "norm", "attention", "alignment",
                         "positions", "position_anchor", "position_draw", "tied_embeddings",
                         "dtype"),
                        no.word | st.none()),
        "dropout_rate": no.rate, "position_limit": no.size_or_none | st.just(True),
        "radius": no.side.filter(lambda x: x != 2**31 and not (type(x) is int and x > 0)),
        "normalizer": no.normalizer.filter(lambda x: x is not None), "score": no.score,
        "encoder_layers": no.count.filter(lambda x: x is not True),
        **dict.fromkeys(("max_wavelength", "min_wavelength", "position_scale"),
                        no.positive | one_of(np.inf, None)),
        **dict.fromkeys(("mask_padding", "remat"), no.word),
        "self_attention_score": no.score.filter(lambda x: x is not None),
        "self_attention_normalizer": no.normalizer}),
    (nn.ModelConfig, {"min_wavelength": 1.0}, {"max_wavelength": st.just(0.5)}),
    (using(nn.ModelConfig, architecture="decoder"), {},
     {"attention": st.just("coverage"), "encoder_layers": st.just(3)}),
    (calling(encoder_decoder), MODEL, wrong_model),
    (calling(decoder), MODEL, wrong_model | {"source": no_ids.filter(lambda x: x is not None),
                                    "target_inputs": no_ids | st.just(ones(2, 2, 11))}),
    (calling(decoder), MODEL | {"source": None, "source_lengths": None},
     {"source_lengths": one_of([0, 0], [3, 2]), "target_inputs": no_ids | st.just(ones(2, 2, 7))}),
    (calling(decoder, "greedy_decode"), MODEL_SOURCE | ENDS, wrong_ends),
    (calling(decoder, "sample_decode", rng=jax.random.key(0)), MODEL_SOURCE | ENDS,
     wrong_ends | {"temperature": no.number | one_of(0.0, -1.0, np.nan, [1.0, 2.0])}),
    (calling(decoder, "sample_decode"), MODEL_SOURCE | ENDS, {"rng": no.rng | st.none()}),
    (calling(decoder, "beam_decode", beams=2), MODEL_SOURCE | ENDS,
     wrong_ends | {"length_penalty": no.number | one_of(-1.0, np.nan)}),
    (calling(decoder, "beam_decode"), MODEL_SOURCE | ENDS, {"beams": no.size_or_none}),
    (calling(decoder, "start_decoding"), MODEL_SOURCE | {"max_length": 2},
     {name: wrong_ends[name] for name in ("source", "source_lengths", "max_length")}),
    (decode_step, {"tokens": [1, 2]},
     {"tokens": no.integers | one_of(None, 1, [1], [1, 2, 3], [1, -1], [1, 11], [[1], [2]])}),
    (calling(block), {"x": ones(2, 3, 4), "source": nn.Source(ones(2, 5, 4))},
     {"x": no.floats | one_of(None, ones(4), ones(2, 3, 5)),
      "source": one_of(None, ones(2, 5, 4))}),
]  # fmt: skip

test_a_wrong_argument_is_named_in_one_line = refuses(WRONG)


# --- mistakes of users of other libraries, and the hint that each gets ---


@dataclasses.dataclass(frozen=True)
class Swapped(aj.Score):
    """Its `init` takes the sizes first."""

    def init(self, query_dim, key_dim, rng):
        return {"kernel": jax.random.normal(rng, (query_dim, key_dim))}

    def pair(self, params, q_features, k_features):
        return q_features @ params["kernel"] @ k_features.T


def flax_layer(attention_fn):
    options = {"attention_fn": attention_fn, "decode": False, "rngs": nnx.Rngs(0)}
    return nnx.MultiHeadAttention(2, 4, **options)(ones(2, 3, 4))


LINEAR = (aj.attention, aj.attention_weights, aj.local_attention, aj.local_attention_weights)
ORDERED = (aj.coverage_attention, aj.monotonic_attention, aj.ring_attention)
OF_OTHERS = {
    "is_causal": r"mask=causal_mask\(\), or call interop.dot_product_attention",
    "scale": r"ScaledDot\(scale=...\), or call interop.dot_product_attention",
    "query_seq_lengths": "mask=padding_mask", "key_value_seq_lengths": "mask=padding_mask",
    "local_window_size": "mask=local_mask",
    "attn_mask": "mask=attn_mask as in scaled.*mask=~attn_mask as in Multi.*bias=attn_mask",
    "need_weights": "return_weights.*leave it out", "average_attn_weights": r"mean\(axis=-3\)",
    "key_padding_mask": r"mask=token_mask\(~key_padding_mask\)",
}  # fmt: skip
MAKERS = {
    "heads": functools.partial(nn.MultiHeadAttention, "dot", 4, num_heads=2),
    "attention": functools.partial(nn.Attention, "dot", 4, 4),
    "model": functools.partial(nn.Model, nn.ModelConfig(), 11),
    "block": functools.partial(nn.Block, nn.ModelConfig()),
    "cross": functools.partial(nn.CrossAttention, nn.ModelConfig()),
    "encoding": functools.partial(nn.PositionEncoding, nn.ModelConfig()),
    "feed-forward": functools.partial(nn.FeedForward, 4, 4),
}
HINTS = [  # (a call, words of its error)
    *((functools.partial(function, *CALLED.values(), **{name: 1}), f"{function.__name__}.*{hint}")
      for function in (*LINEAR, *ORDERED) for name, hint in OF_OTHERS.items()),
    *((lambda name=name: MAKERS["heads"](rngs=nnx.Rngs(0))(ones(3, 4), **{name: 1}), hint)
      for name, hint in OF_OTHERS.items()),
    (lambda: flax_layer(aj.get_score("additive")), "attention_fn=interop.flax_attention_fn"),
    (lambda: flax_layer(aj.attention), "attention_fn=interop.flax_attention_fn"),
    (lambda: nn.MultiHeadAttention(4, 64, rngs=nnx.Rngs(0)), "score must come first.*num_heads=4"),
    (lambda: nn.MultiHeadAttention("dot", 64, rngs=nnx.Rngs(0)), "num_heads must be an integer"),
    *((functools.partial(MAKERS["heads"], **{name: 1}), f"{name}.: give {hint}") for name, hint in (
        ("embed_dim", "query_dim"), ("bias", "use_bias"), ("device", "nothing"))),
    *((functools.partial(make, rngs=rngs), rf"rngs must .*nnx.Rngs\(0\) has; got {got}")
      for make in MAKERS.values()
      for rngs, got in ((0, "int"), (jax.random.key(0), "PRNGKeyArray"),
                        (nnx.Rngs(dropout=0), r"\['dropout'\]"))),
    *((functools.partial(MAKERS[name], **{argument: dtype}, rngs=nnx.Rngs(0)), f"^{argument} must")
      for name in ("heads", "attention", "feed-forward")
      for argument in ("dtype", "param_dtype") for dtype in (jnp.int32, "float33")),
    *((functools.partial(make, Swapped(), 4, **sizes, rngs=nnx.Rngs(0)),
       r"init raised TypeError.*\(rng, query_dim, key_dim\)")
      for make, sizes in (
          (nn.MultiHeadAttention, {"num_heads": 2}), (nn.Attention, {"key_dim": 4}))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HINTS)))
def test_a_mistake_gets_a_hint_in_one_line(number):
    call, words = HINTS[number]
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
