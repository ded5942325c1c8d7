"""Attention compiled for an H100: the additive kernels, and the calls of cuDNN."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import attention_jax as aj
from attention_jax.core.programs import one_line
from compilation import h100, targets
from compilation.tables import Rows, target_row

SIZES = {"batch": 2, "length": 2048, "features": 128, "values": 64}
CUDNN_SCORES = ("dot", "scaled", "general", "cosine", "distance")
MOST_SPECIAL = 0.6  # special functions per pair and feature, of the forward kernel


def rows() -> Rows:
    """The additive kernels, which are the same for 16-bit inputs, and each score by cuDNN."""
    found = _row_or_error({"program": "additive"}, _additive)
    for score in CUDNN_SCORES:
        program = {"program": f"{score}, cuDNN"}
        found += _row_or_error(program, functools.partial(_cudnn, score))
    return found


def _row_or_error(row: dict[str, Any], compiled: Callable[[], Rows]) -> Rows:
    if reason := targets.missing_compiler(targets.H100):
        return [{**row, "error": f"not compiled here: {reason}"}]
    try:
        return [{**row, **numbers} for numbers in compiled()]
    except Exception as error:
        return [{**row, "error": f"{type(error).__name__}: {one_line(error)}"}]


def _additive() -> Rows:
    score = aj.Additive(hidden_dim=SIZES["features"])
    function, args = _gradient(score, "float32", "mosaic_gpu")
    return [
        {
            "kernel": name,
            "registers": kernel.registers,
            "spills": kernel.spills,
            "special": [loop.special_per_feature for loop in kernel.loops],
            "instructions": [loop.instructions for loop in kernel.loops],
        }
        for name, kernel in h100.kernels_of(function, *args).items()
    ]


def _cudnn(score: str) -> Rows:
    function, args = _gradient(aj.get_score(score), "bfloat16", "cudnn")
    text = function.lower(*args).compile().as_text() or ""
    calls = re.findall(r'custom_call_target="__cudnn\$(fmha[^"]*)"', text)
    return [{"kernel": ", ".join(sorted(calls))}]


def _gradient(score: Any, dtype: str, implementation: str) -> tuple[Any, tuple[Any, ...]]:
    """(the jitted gradient of a sum of outputs, the types of its arguments)."""
    (device,) = targets.devices(targets.H100)
    dim = SIZES["values"]
    shapes = jax.eval_shape(lambda: score.init(jax.random.key(0), dim, dim))
    params = jax.tree.map(lambda leaf: targets.array(leaf.shape, leaf.dtype, device), shapes)
    shape = SIZES["batch"], SIZES["length"], dim
    tokens = targets.array(shape, jnp.dtype(dtype), device)

    def loss(params: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        output = aj.attention(
            query,
            key,
            value,
            score=score,
            params=params,
            mask=aj.causal_mask(),
            implementation=implementation,
        )
        return jnp.sum(output.astype(jnp.float32))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))), (params, tokens, tokens, tokens)


def targets_of(found: Rows) -> Rows:
    """The targets, which were set before the kernels were written, and whether they are met."""
    checks: Rows = []

    def add(claim: str, what: str, target: float, number: float) -> None:
        checks.append(target_row(claim, what, target, number))

    for row in found:
        if "registers" in row:
            claim = f"{row['program']}, {row['kernel']}, H100"
            add(claim, "bytes of spilled registers", 0, row["spills"])
            if row["kernel"] == "attention_forward" and row["special"]:
                what = "special functions per pair and feature"
                add(claim, what, MOST_SPECIAL, max(row["special"]))
    return checks
