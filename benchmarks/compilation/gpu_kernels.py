"""Attention compiled for an H100: the additive kernels of Mosaic GPU, and the calls of cuDNN.

The CUDA plugin of JAX (the extra `[cuda13]`) compiles them without a GPU, and reports the registers
and spills of a kernel. If the package triton is installed, its `nvdisasm` lists the instructions.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import attention_jax as aj
from benchmarks.compilation.programs import attention
from benchmarks.compilation.targets import H100
from benchmarks.measure import JSON, attempt
from benchmarks.targets import targets_of

BATCH, LENGTH, DIM, FEATURES = 2, 2048, 64, 128
CUDNN_SCORES = ("dot", "scaled", "general", "cosine", "distance")

_LOOP = re.compile(r"(?s)(?=\.(L_x_\d+):(.*?BRA `\(\.\1\)))")  # from a label to a branch back
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)([^;/\n]*)")


def reports(only: str) -> dict[str, list[JSON]]:
    """Rows of the additive kernels and of the scores that cuDNN serves, and the targets."""
    rows: list[JSON] = []
    for score in ("additive", *CUDNN_SCORES):
        about = {"program": score if score == "additive" else f"{score}, cuDNN"}
        if only in about["program"]:
            found, refusal = attempt(_rows_of, score)
            rows += [about | row for row in found or [refusal]]
    return {
        "compiled-h100": rows,
        "compiled-h100-targets": targets_of("compiled-h100", judged_rows(rows)),
    }


def judged_rows(rows: list[JSON]) -> list[JSON]:
    """The numbers that targets judge."""
    numbers = []
    for row in (row for row in rows if "registers" in row):
        about = {"work": f"{row['program']}, {row['kernel']}, H100", "contestant": "ours"}
        numbers.append(about | {"bytes of spilled registers": row["spills"]})
        if row["special"]:
            numbers[-1]["special functions per pair and feature"] = max(row["special"])
    return numbers


def _rows_of(score: str) -> list[JSON]:
    """The gradient of causal attention."""
    is_additive = score == "additive"
    function, args = attention(
        H100,
        aj.Additive(hidden_dim=FEATURES) if is_additive else score,
        LENGTH,
        dtype=jnp.float32 if is_additive else jnp.bfloat16,
        batch=(BATCH,),
        dim=DIM,
        mask=aj.causal_mask(),
        implementation="mosaic_gpu" if is_additive else "cudnn",
    )
    if is_additive:
        kernels = kernels_of(jax.jit(function), *args).items()
        return [{"kernel": name, **row} for name, row in kernels]
    text = jax.jit(function).lower(*args).compile().as_text() or ""
    calls = re.findall(r'custom_call_target="__cudnn\$(fmha[^"]*)"', text)
    return [{"kernel": ", ".join(sorted(calls))}]


def kernels_of(function: Any, *args: Any) -> dict[str, dict[str, Any]]:
    """Compiles a jitted function for the device of its arguments: its Mosaic GPU kernels by name.

    "registers" and "spills", the bytes that are stored and loaded, are the assembler's. "special",
    the operations of the special function unit (MUFU) per pair and feature, and "instructions" of
    one thread are those of each innermost loop over features that are not large; [] without
    `nvdisasm`.
    """
    importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # it sets MOSAIC_GPU_CUDA_ROOT
    with tempfile.TemporaryDirectory() as folder:
        variables = {f"MOSAIC_GPU_DUMP_{name}": "1" for name in ("PTXAS", "SASS")}
        variables["MOSAIC_GPU_DUMP_TO"] = folder
        if triton := importlib.util.find_spec("triton"):
            toolkit = Path(triton.origin or "").parent / "backends" / "nvidia"
            variables["MOSAIC_GPU_CUDA_ROOT"] = str(toolkit)
        with mock.patch.dict(os.environ, variables):
            function.lower(*args).compile()
        files = sorted(Path(folder).glob("*.ptxas"))
        return {re.sub(r"_\d+$", "", file.stem): _kernel(file) for file in files}


def _kernel(file: Path) -> dict[str, Any]:
    text = file.read_text()
    (registers,) = re.findall(r"Used (\d+) registers", text)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
    listings = (listing.read_text() for listing in file.parent.glob(f"{file.stem}.sass*"))
    loops = _loops_of_products(next(listings, ""))
    special, instructions = ([loop[i] for loop in loops] for i in range(2))
    about = {"registers": int(registers), "spills": spills}
    return about | {"special": special, "instructions": instructions}


def _loops_of_products(listing: str) -> list[tuple[float, int]]:
    """The innermost loops that compute 1 + x y and its reciprocal, and no exponential.

    1 + x y is computed once for each feature of each pair.

    Returns:
        for each loop the special functions per pair and feature, and the number of instructions.
    """
    loops = [found[2] for found in _LOOP.finditer(listing)]
    found = []
    for loop in loops:
        instructions = [(name, rest.strip()) for name, rest in _INSTRUCTION.findall(loop)]
        products = sum(name == "FFMA" and rest.endswith(", 1") for name, rest in instructions)
        special = [name for name, _ in instructions if name.startswith("MUFU")]
        is_innermost = not any(other in loop for other in loops if other is not loop)
        if is_innermost and products and "MUFU.RCP" in special and "MUFU.EX2" not in special:
            found.append((len(special) / products, len(instructions)))
    return found
