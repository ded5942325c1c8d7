"""Attention compiled for an H100: the additive kernels of Mosaic GPU, and the calls of cuDNN.

The CUDA plugin of JAX (the extra `[cuda13]`) compiles them without a GPU, and reports the registers
and spills of a kernel. If the package triton is installed, its `nvdisasm` lists the instructions.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from benchmarks.measure import JSON, attempt
from benchmarks.targets import judged
from command_line import environment_variables

import attention_jax as aj
from compilation import targets
from compilation.programs import attention

BATCH, LENGTH, DIM, FEATURES = 2, 2048, 64, 128
CUDNN_SCORES = ("dot", "scaled", "general", "cosine", "distance")

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)([^;/]*)")


def reports(only: str) -> dict[str, list[JSON]]:
    """Rows of the additive kernels and of the scores that cuDNN serves, and the targets."""
    rows: list[JSON] = []
    for score in ("additive", *CUDNN_SCORES):
        about = {"program": score if score == "additive" else f"{score}, cuDNN"}
        if only in about["program"]:
            found, refusal = attempt(_rows_of, score)
            rows += [about | row for row in found or [refusal]]
    return {"compiled-h100": rows, "compiled-h100-targets": targets_of(rows)}


def targets_of(rows: list[JSON]) -> list[JSON]:
    """The targets, which were set before the kernels were written, and whether they are met."""
    checks = []
    for row in (row for row in rows if "registers" in row):
        claim = f"{row['program']}, {row['kernel']}, H100"
        checks.append(judged(claim, "bytes of spilled registers", "at most 0", row["spills"]))
        if row["kernel"] == "attention_forward" and row["special"]:
            what, most = "special functions per pair and feature", "at most 0.6"
            checks.append(judged(claim, what, most, max(row["special"])))
    return checks


def _rows_of(score: str) -> list[JSON]:
    """The gradient of causal attention."""
    is_additive = score == "additive"
    function, args = attention(
        targets.H100,
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
        with environment_variables(variables):
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
    labels: dict[str, int] = {}
    instructions: list[tuple[str, str]] = []
    spans: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append((found[1], found[2].strip()))
            target = re.search(r"BRA `\(\.(L_x_\d+)\)", line)
            if target and target[1] in labels:
                spans.append((labels[target[1]], len(instructions)))
    loops = []
    for first, end in spans:
        inside = [span for span in spans if first <= span[0] and span[1] <= end]
        body = instructions[first:end]
        products = sum(name == "FFMA" and rest.endswith(", 1") for name, rest in body)
        special = [name for name, _ in body if name.startswith("MUFU")]
        if len(inside) == 1 and products and "MUFU.RCP" in special and "MUFU.EX2" not in special:
            loops.append((len(special) / products, len(body)))
    return loops
