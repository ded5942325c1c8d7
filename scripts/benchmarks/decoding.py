"""Greedy decoding with a cache, against decoding that recomputes all positions for every token.

The reversal model has random parameters and never emits the end of sequence, so that every output
has the maximal length. `Model.greedy_decode` caches the keys and values of earlier tokens and of
the source. The naive contestant, defined here, keeps nothing, and runs the model on all positions
in every step. Both end with another pass that computes the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.nn import Decoded, Model
from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import EOS, PAD, SOS
from benchmarks.measure import (
    JSON,
    SHRUNK,
    Options,
    Report,
    compile_cold,
    interleaved_seconds,
    print_progress,
)
from benchmarks.targets import with_target

Array = jax.Array
Decode = Callable[[Model, Array, Array, int], Decoded]

_BATCH = 64
_LENGTH = 64  # of the source, and of the output
_NEVER = -1e9  # the logit of a token that is never emitted

_CACHED, _NAIVE = "cached", "naive"
_COLUMNS = {
    "score": ("score", ""),
    "heads": ("heads", "d"),
    "shape": ("shape", ""),
    "cached, ms": ("milliseconds", ",.2f"),
    "naive, ms": ("naive_milliseconds", ",.2f"),
    "naive / cached": ("times_ours", ",.2f"),
    "cached, tokens/s": ("tokens_per_second", ",.0f"),
    "naive, tokens/s": ("naive_tokens_per_second", ",.0f"),
    "target": ("target", ""),
    "met": ("met", ""),
}

# The model's settings, and the target for the ratio of the naive time to ours.
_MODELS: list[tuple[JSON, float | None]] = [
    ({"score": "scaled"}, 3),
    ({"score": "additive"}, 3),
    ({"score": "scaled", "num_heads": 4}, None),
]


def check(options: Options) -> None:
    """Accepts all options."""


def run(options: Options) -> list[Report]:
    """Times both ways of decoding with every model; the two take turns."""
    length = max(2, _LENGTH // options.shrink)
    rows = [
        with_target(
            _race(ModelConfig(**settings), length, options.repeats),
            "times_ours",
            least,
        )
        for settings, least in _MODELS
    ]
    report = Report(
        name="decoding",
        title=f"Greedy decoding of the reversal model: median of {options.repeats} repeats",
        columns=_COLUMNS,
        rows=rows,
        settings={
            "repeats": options.repeats,
            "shrink": options.shrink,
            "batch_size": _BATCH,
            "source_length": length,
            "max_length": length,
        },
        notes=[
            "naive / cached: time of decoding that recomputes all positions, divided by ours",
            *[SHRUNK] * (options.shrink > 1),
        ],
        section=(),
    )
    return [report]


def _race(config: ModelConfig, length: int, repeats: int) -> JSON:
    source = jax.random.randint(
        jax.random.key(1), (_BATCH, length), EOS + 1, Reversal.vocabulary.size
    )
    arguments = (_never_ending(config), source, jnp.full((_BATCH,), length))
    compiled = {
        name: compile_cold(functools.partial(_decoded, config, decode, length), *arguments)
        for name, decode in {_CACHED: _cached, _NAIVE: _naive}.items()
    }
    outputs = {name: jax.device_get(program.call(*arguments)) for name, program in compiled.items()}
    seconds = interleaved_seconds(
        {
            name: functools.partial(_call, program.call, *arguments)
            for name, program in compiled.items()
        },
        repeats,
    )
    milliseconds = {name: 1000 * statistics.median(seconds[name]) for name in compiled}
    summary = ", ".join(f"{name} {value:,.1f}" for name, value in milliseconds.items())
    print_progress(f"decoding, {config.score}, {config.num_heads} heads: milliseconds of {summary}")
    tokens = _BATCH * length
    return {
        "score": config.score,
        "heads": config.num_heads,
        "config": dataclasses.asdict(config),
        "shape": f"B{_BATCH} T=S={length} D{config.dim}",
        "device": jax.default_backend(),
        "tokens": tokens,
        "milliseconds": milliseconds[_CACHED],
        "naive_milliseconds": milliseconds[_NAIVE],
        "times_ours": milliseconds[_NAIVE] / milliseconds[_CACHED],
        "tokens_per_second": 1000 * tokens / milliseconds[_CACHED],
        "naive_tokens_per_second": 1000 * tokens / milliseconds[_NAIVE],
        "repeat_seconds": seconds[_CACHED],
        "naive_repeat_seconds": seconds[_NAIVE],
        "compile_seconds": compiled[_CACHED].compile_seconds,
        "naive_compile_seconds": compiled[_NAIVE].compile_seconds,
        # Rounding may decide between two letters that are almost equally likely.
        "same_tokens": float((outputs[_CACHED].tokens == outputs[_NAIVE].tokens).mean()),
    }


def _model(config: ModelConfig) -> Model:
    return Model(config, Reversal.vocabulary.size, rngs=nnx.Rngs(0))


def _never_ending(config: ModelConfig) -> Any:
    """Random parameters, with a bias that excludes EOS."""
    params = nnx.to_pure_dict(nnx.state(_model(config)))
    params["logits"]["bias"] = params["logits"]["bias"].at[EOS].set(_NEVER)
    return params


def _decoded(
    config: ModelConfig, decode: Decode, length: int, params: Any, source: Array, lengths: Array
) -> Decoded:
    graph = nnx.graphdef(nnx.eval_shape(lambda: _model(config)))
    return decode(nnx.merge(graph, params), source, lengths, length)


def _call(program: Callable[..., Any], *arguments: Any) -> None:
    jax.block_until_ready(program(*arguments))


# --- the two ways ---


def _cached(model: Model, source: Array, source_lengths: Array, max_length: int) -> Decoded:
    return model.greedy_decode(
        source,
        source_lengths,
        max_length=max_length,
        sos=SOS,
        eos=EOS,
        pad=PAD,
        return_weights=True,
    )


def _naive(model: Model, source: Array, source_lengths: Array, max_length: int) -> Decoded:
    """Decoding without a cache: shapes must not change, so each step computes all positions."""
    inputs = jnp.full((len(source), max_length + 1), PAD, source.dtype).at[:, 0].set(SOS)

    def unfinished(carried: Any) -> Array:
        step, _, ended = carried
        return (step < max_length) & ~jnp.all(ended)

    def extend(carried: Any) -> Any:
        step, inputs, ended = carried
        logits = model(source, source_lengths, inputs[:, :-1])
        best = jnp.argmax(logits[:, step], axis=-1).astype(inputs.dtype)
        best = jnp.where(ended, jnp.asarray(PAD, inputs.dtype), best)
        return step + 1, inputs.at[:, step + 1].set(best), ended | (best == EOS)

    carried = (jnp.int32(0), inputs, jnp.zeros(len(source), bool))
    _, inputs, _ = jax.lax.while_loop(unfinished, extend, carried)
    _, weights = model(source, source_lengths, inputs[:, :-1], return_weights=True)
    return Decoded(inputs[:, 1:], weights)
