"""The contestants of the attention benchmark that run on JAX: ours, and its peers.

Every contestant computes the same output from the same inputs, projections of the score included,
and the same gradients. Arrays are brought to a contestant's own layout before any time is taken.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax import attention
from attention_jax.implementations import IMPLEMENTATIONS, Inputs
from attention_jax.implementations.choice import chosen_implementation
from benchmarks.attention_works import Tree, Work
from benchmarks.measure import JSON, compile_cold, free_bytes

Array = jax.Array
INSTALL = ".venv/bin/pip install -e '.[bench]'"
_FREE_SHARE = 0.8  # of free memory that a contestant may take


class Contestant(NamedTuple):
    """Someone who does the work.

    Attributes:
        call: once; returns the output, or (output, gradients by name), when they are there.
        about: further entries of its row; "layout" is that of its arrays.
        most_repeats: for one so slow that more would be a waste; None for as many as the others.
    """

    call: Callable[[], Any]
    about: JSON
    most_repeats: int | None = None


def forward_backward(attend: Callable[[Tree], Array]) -> Callable[[Tree, Array], Any]:
    """(inputs, cotangent of the output) -> (output, gradients of all inputs)."""

    def both(inputs: Tree, cotangent: Array) -> tuple[Array, Tree]:
        output, pull_back = jax.vjp(attend, inputs)
        return output, pull_back(cotangent)[0]

    return both


def pushed_forward(attend: Callable[[Tree], Array]) -> Callable[[Tree, Tree], Any]:
    """(inputs, tangents of all inputs) -> (output, its tangent)."""
    return lambda inputs, tangents: jax.jvp(attend, (inputs,), (tangents,))


def ours(work: Work) -> Contestant:
    """`attention_jax.attention`; LookupError, as from every peer, says why it is absent."""
    if work.implementation not in (None, *IMPLEMENTATIONS):
        raise LookupError(f"there is no implementation {work.implementation!r}")
    return jax_contestant(work, our_attention(work), implementation=_implementation(work))


def _implementation(work: Work) -> str:
    """The one asked for, or the one that `attention` picks."""
    if work.implementation is not None:
        return work.implementation
    arrays, _ = work.arrays()
    inputs = Inputs(**arrays, mask=work.mask_object(), bias=None, dropout_rng=None)
    return chosen_implementation(work.score_object(), inputs, jax.default_backend())


def our_attention(work: Work) -> Callable[[Tree], Array]:
    """A function of inputs such as `work.arrays()` makes."""
    score, mask = work.score_object(), work.mask_object()

    def attend(inputs: Tree) -> Array:
        return attention(**inputs, score=score, mask=mask, implementation=work.implementation)

    return attend


def jax_contestant(
    work: Work,
    attend: Callable[[Tree], Array],
    layout: str = "BNTD",
    *,
    inputs: Tree | None = None,
    **about: Any,
) -> Contestant:
    """A function of inputs, those of the work or others, compiled."""
    usual, cotangent = work.arrays()
    inputs = usual if inputs is None else inputs
    if layout == "BTND":
        inputs |= {name: inputs[name].swapaxes(1, 2) for name in ("query", "key", "value")}
        cotangent = cotangent.swapaxes(1, 2)
    arguments: tuple = jax.tree.map(lambda leaf: jnp.asarray(leaf, work.dtype), (inputs, cotangent))
    program: Callable[..., Any] = attend
    if work.backward:
        program = forward_backward(attend)
    elif work.jvp:
        program, arguments = pushed_forward(attend), (arguments[0], arguments[0])
    else:
        arguments = arguments[:1]
    compiled = compile_cold(program, *arguments)
    if compiled.needed_bytes > _FREE_SHARE * free_bytes():
        needed, free = (size / 2**30 for size in (compiled.needed_bytes, free_bytes()))
        raise LookupError(f"it needs {needed:.1f} GiB, and {free:.1f} GiB are free")
    return Contestant(
        call=lambda: jax.block_until_ready(compiled.call(*arguments)),
        about={
            "layout": layout,
            "device": jax.default_backend(),
            "compile_seconds": compiled.compile_seconds,
            "temporary_mib": compiled.temporary_mib,
            **about,
        },
    )


# --- ours, under other conditions ---


def _ours_with(**changes: Any) -> Callable[[Work], Contestant]:
    return lambda work: ours(dataclasses.replace(work, **changes))


def _half_as_long(work: Work) -> Contestant:
    return ours(dataclasses.replace(work, length=work.length // 2))


# --- peers ---


def naive(work: Work) -> Contestant:
    """What one writes in JAX without a library, jitted: every pair at once."""
    if work.score not in _NAIVE_LOGITS:
        raise LookupError(f"it has no score {work.score}")

    def attend(inputs: Tree) -> Array:
        logits = _NAIVE_LOGITS[work.score](inputs["query"], inputs["key"], inputs["params"])
        mask = _table(work)
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        return jax.nn.softmax(logits) @ inputs["value"]

    return jax_contestant(work, attend)


def _naive_additive(query: Array, key: Array, params: Tree) -> Array:
    query, key = query @ params["query_kernel"], key @ params["key_kernel"]
    hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
    return jnp.einsum("...tsa,a->...ts", hidden, params["v"])


def _naive_dot(query: Array, key: Array) -> Array:
    return jnp.einsum("...td,...sd->...ts", query, key)


_NAIVE_LOGITS: dict[str, Callable[[Array, Array, Tree], Array]] = {
    "additive": _naive_additive,
    "dot": lambda query, key, params: _naive_dot(query, key),
    "general": lambda query, key, params: _naive_dot(query @ params["kernel"], key),
    "scaled": lambda query, key, params: _naive_dot(query, key) / math.sqrt(key.shape[-1]),
}


def _table(work: Work) -> Array | None:
    mask = work.mask_object()
    return None if mask is None else mask.materialize(*work.lengths)


def _jax_nn(work: Work, implementation: Literal["cudnn"] | None = None) -> Contestant:
    if implementation == "cudnn" and (jax.default_backend() != "gpu" or work.dtype == "float32"):
        raise LookupError("cuDNN needs a GPU and 16-bit floats")
    window = None if work.window is None else (work.window, work.window)

    def attend(inputs: Tree) -> Array:
        query, scale = projected(work, inputs)
        return jax.nn.dot_product_attention(
            query, inputs["key"], inputs["value"],
            scale=scale, is_causal=work.mask == "causal", local_window_size=window,
            implementation=implementation,
        )  # fmt: skip

    return jax_contestant(work, attend, layout="BTND")


def projected(work: Work, inputs: Any) -> tuple[Any, float]:
    """A query, and the scale with which the score is a dot product; of any library's arrays."""
    if work.score == "general":
        return inputs["query"] @ inputs["params"]["kernel"], 1.0
    if work.score not in ("dot", "scaled"):
        raise LookupError(f"it has no score {work.score}")
    return inputs["query"], 1.0 if work.score == "dot" else 1 / math.sqrt(work.dim)


def _flax(work: Work) -> Contestant:
    from flax import nnx

    if work.score != "scaled":
        raise LookupError(f"it has no score {work.score}")

    def attend(inputs: Tree) -> Array:
        return nnx.dot_product_attention(
            inputs["query"], inputs["key"], inputs["value"], mask=_table(work)
        )

    return jax_contestant(work, attend, layout="BTND")


def _keras(work: Work) -> Contestant:
    """Keras' layer has neither projections nor heads: it is given projected queries and keys."""
    if work.score != "additive" or work.mask:
        raise LookupError("AdditiveAttention has the additive score without a mask")
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = import_peer("keras")
    if keras.backend.backend() != "jax":
        raise LookupError(f"its backend is {keras.backend.backend()}; set KERAS_BACKEND=jax")
    target, source = work.lengths
    rows, features = work.batch * work.heads, work.hidden_dim
    layer = keras.layers.AdditiveAttention(use_scale=True)
    layer.build([(rows, target, features), (rows, source, work.dim), (rows, source, features)])

    def attend(inputs: Tree) -> Array:
        params = inputs["params"]
        query = inputs["query"] @ params["query_kernel"]
        key = inputs["key"] @ params["key_kernel"]
        merged = [x.reshape(rows, *x.shape[2:]) for x in (query, inputs["value"], key)]
        output, _ = layer.stateless_call([params["v"]], [], merged)
        return output.reshape(inputs["query"].shape)

    return jax_contestant(work, attend, version=keras.__version__)


def _tokamax(work: Work) -> Contestant:
    if jax.default_backend() != "gpu":
        raise LookupError("it is for GPU and TPU")
    tokamax = import_peer("tokamax")

    def attend(inputs: Tree) -> Array:
        query, scale = projected(work, inputs)
        return tokamax.dot_product_attention(
            query, inputs["key"], inputs["value"], scale=scale, is_causal=work.mask == "causal"
        )

    if work.window is not None:
        raise LookupError("this benchmark gives it no window")
    return jax_contestant(work, attend, layout="BTND")


def import_peer(module: str) -> Any:
    """The module; LookupError, with how to install it, if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LookupError(f"{reason}; {INSTALL}") from error


def _pytorch(name: str) -> Callable[[Work], Contestant]:
    def contestant(work: Work) -> Contestant:
        import_peer("torch")
        if name == "KeOps":
            import_peer("pykeops")
        from benchmarks import attention_pytorch

        return attention_pytorch.CONTESTANTS[name](work)

    return contestant


PEERS: dict[str, Callable[[Work], Contestant]] = {
    "ours, reference": _ours_with(implementation="reference"),
    "ours, not causal": _ours_with(mask=""),
    "ours, forward": _ours_with(jvp=False),
    "ours, scaled dot": _ours_with(score="scaled"),
    "ours, half as long": _half_as_long,
    "naive JAX": naive,
    "jax.nn": _jax_nn,
    "flax": _flax,
    "Keras": _keras,
    "PyTorch SDPA": _pytorch("SDPA"),
    "PyTorch naive": _pytorch("naive"),
    "KeOps": _pytorch("KeOps"),
    "cuDNN": lambda work: _jax_nn(work, "cudnn"),
    "tokamax": _tokamax,
}
