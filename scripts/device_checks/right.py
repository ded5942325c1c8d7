"""Right? Output, statistics and gradients of each implementation, beside the reference's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import BlockSizes, attention, causal_mask, get_score, padding_mask
from attention_jax.kernels import IMPLEMENTATIONS
from benchmarks.measure import JSON, attempt
from device_checks.record import NOT_MEASURED, Record

Array = jax.Array


def manhattan(query: Array, key: Array) -> Array:
    """-|q - k|_1 / sqrt(D), as a user writes a score."""
    return -jnp.sum(jnp.abs(query[:, None] - key[None]), axis=-1) / query.shape[-1] ** 0.5


SCORES: dict[str, Any] = {
    **{name: name for name in ("scaled", "additive", "general", "l2", "neural")},
    "user": manhattan,
}
MASKS = ("padding", "causal", "none")
# The bounds of output, statistics and gradients, relative to the largest entry. For float32 they
# are the contract's. Rounding to bfloat16 changes a number by up to 2^-9 of it. Products round the
# features of queries and keys, the weights, the result, the gradients of the logits and those of
# the features. Counted as 2^-8 for statistics, twice that for the output and four times that for
# gradients, as in the tests of this library.
BOUNDS = {
    "float32": (2e-6, 2e-6, 2e-5),
    "bfloat16": (2e-6 + 2 * 2**-8, 2e-6 + 2**-8, 2e-5 + 4 * 2**-8),
}


class Program(NamedTuple):
    """A compiled program: `run` waits for its results, which are arrays on the host."""

    run: Callable[[], JSON]
    has_statistics: bool


# What was prepared for a case: the inputs' pairs that may attend, the program of each
# implementation or why there is none, and the true results, without and with statistics.
Prepared = tuple[np.ndarray, dict[str, tuple[Program | None, JSON]], dict[bool, JSON]]


def check(record: Record) -> None:
    """Rows of all masks, dtypes, scores and implementations, mask after mask.

    The programs of a mask compile in several threads. They run afterwards, one after the other and
    beside nothing else: cuDNN captures a CUDA graph when its program first runs, and the capture
    fails if another thread uses the GPU meanwhile.
    """
    for mask in MASKS:
        cases = [*itertools.product([record], [mask], BOUNDS, SCORES)]
        prepared = [*record.in_threads(_prepared, cases)]
        for (_, _, dtype, score), (allowed, programs, true) in zip(cases, prepared, strict=True):
            for name, (program, entries) in programs.items():
                if program is not None:
                    found, entries = attempt(program.run)
                    entries = entries or _errors(
                        found, true[program.has_statistics], allowed, dtype
                    )
                if name not in IMPLEMENTATIONS and "wrong" in entries:  # at the default precision
                    entries["for information"] = entries.pop("wrong")
                work = f"{score}, {mask}, {dtype}"
                record.add("right", work, name, score=score, dtype=dtype, **entries)


def _prepared(record: Record, mask: str, dtype: str, score: str) -> Prepared:
    """Compiles the programs without a row, and computes what they are compared with."""
    work, names = f"{score}, {mask}, {dtype}", [*IMPLEMENTATIONS]
    if dtype == "float32" and mask == "causal" and jax.default_backend() != "cpu":
        # A GPU rounds factors to 10 bits, and a TPU to 7, unless the precision is "highest".
        names += [f"{name}, default precision" for name in IMPLEMENTATIONS]
    inputs, allowed = _inputs(record.shrink, score, mask, dtype)
    programs: dict[str, tuple[Program | None, JSON]] = {}
    for name in names:
        if record.has("right", work, name):
            continue
        programs[name] = None, NOT_MEASURED
        if record.left() > 0:
            implementation, _, by_default = name.partition(", ")
            precision = "highest" if dtype == "float32" and not by_default else None
            with jax.default_matmul_precision(precision):
                programs[name] = attempt(_program, score, mask, implementation, inputs, allowed)
    kinds = {program.has_statistics for program, _ in programs.values() if program is not None}
    return allowed, programs, {kind: _true_results(score, mask, inputs, kind) for kind in kinds}


def _inputs(shrink: int, score: str, mask: str, dtype: str) -> tuple[JSON, np.ndarray]:
    """Arrays rounded to the dtype, and which pairs may attend, bool [B, T, S]."""
    target, source, dim = (203, 317, 64) if shrink == 1 else (23, 27, 16)
    lengths = dict.fromkeys(("query", "doutput"), target) | dict.fromkeys(("key", "value"), source)
    rng, batch = np.random.default_rng(0), 3
    inputs: JSON = {x: rng.standard_normal((batch, lengths[x], dim)) for x in lengths}
    if score != "user":
        inputs["params"] = get_score(score).init(jax.random.key(1), dim, dim)
    inputs = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), inputs)
    for name in ("dlogsumexp", "dentropy"):
        inputs[name] = rng.standard_normal((batch, target), np.float32)
    inputs["lengths"] = np.array([source, source // 3, 0], np.int32)
    rows, columns = np.arange(target)[:, None], np.arange(source)
    allowed = columns <= (rows if mask == "causal" else source)
    if mask == "padding":
        allowed = columns < inputs["lengths"][:, None, None]
    return inputs, np.broadcast_to(allowed, (batch, target, source))


def _program(score: str, mask: str, name: str, inputs: JSON, allowed: np.ndarray) -> Program:
    """Output, statistics and gradients by an implementation, with NaN in the padding."""
    poison = np.where(allowed.any(1), 0, np.nan)[:, :, None].astype(inputs["key"].dtype)
    blocks = BlockSizes(*(8 * -(-length // 24) for length in allowed.shape[1:]))  # three each way
    inputs = inputs | {token: inputs[token] + poison for token in ("key", "value")}
    options = {"implementation": name, "block_sizes": blocks if name == "tiled" else None}
    try:
        return _compiled(score, mask, inputs, True, **options)
    except NotImplementedError:  # perhaps without statistics
        return _compiled(score, mask, inputs, False, **options)


def _true_results(score: str, mask: str, inputs: JSON, statistics: bool) -> JSON:
    """The same in float64 on the host: all pairs at once, by automatic differentiation."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = jax.tree.map(lambda x: x.astype(np.float64), inputs) | {"lengths": inputs["lengths"]}
        return _compiled(score, mask, wide, statistics, implementation="reference").run()


def _compiled(score: str, mask: str, inputs: JSON, statistics: bool, **options: Any) -> Program:
    """The program of {"output", "gradients"}, and "logsumexp" and "entropy" with statistics.

    The gradients are those of all that it returns: without statistics, those of the output alone.
    """

    @jax.jit
    def results(inputs: JSON) -> JSON:
        masks = {"causal": causal_mask(), "padding": padding_mask(inputs["lengths"]), "none": None}
        names = ("query", "key", "value", "params")
        tokens = {name: inputs[name] for name in names if name in inputs}

        def forward(tokens: JSON) -> JSON:
            arguments = {"score": SCORES[score], "mask": masks[mask], **options}
            found: Any = attention(**tokens, **arguments, return_statistics=statistics)
            if not statistics:
                return {"output": found}
            output, measured = found
            return {"output": output, **{x: getattr(measured, x) for x in ("logsumexp", "entropy")}}

        found, pull_back = jax.vjp(forward, tokens)
        return {**found, "gradients": pull_back({x: inputs[f"d{x}"] for x in found})[0]}

    program = results.lower(inputs).compile()
    return Program(lambda: jax.device_get(program(inputs)), statistics)


def _errors(found: JSON, true: JSON, allowed: np.ndarray, dtype: str) -> JSON:
    """The errors as shares of their bounds, and the largest share; the names of those beyond 1."""
    found = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), found)
    rows, keys, gradients = allowed.any(2), allowed.any(1), found["gradients"]
    errors = {
        "output": [_error(found["output"], true["output"])],
        "statistics": [_error(found[x], true[x]) for x in ("logsumexp", "entropy") if x in found],
        "gradients": jax.tree.leaves(jax.tree.map(_error, gradients, true["gradients"])),
    }
    hidden = [found["output"][~rows], gradients["query"][~rows], gradients["key"][~keys]]
    is_zero = not any(np.any(x) for x in (*hidden, gradients["value"][~keys]))  # NaN is not
    shares = {"must be 0": 0.0 if is_zero else 1e9}
    for (name, each), bound in zip(errors.items(), BOUNDS[dtype], strict=True):
        if each:
            shares[name] = float(f"{min(max(each) / bound, 1e9):.3g}")
    wrong = [name for name, share in shares.items() if share > 1]
    return {"shares": shares, "worst": max(shares.values()), **({"wrong": wrong} if wrong else {})}


def _error(found: np.ndarray, true: np.ndarray) -> float:
    """The largest error relative to the largest entry; infinite for NaN, or for a wrong Inf."""
    finite = np.isfinite(true)
    if not np.array_equal(found[~finite], true[~finite]) or np.isnan(found).any():
        return float("inf")
    error = np.max(np.abs(found[finite] - true[finite]), initial=0.0)
    return float(error / np.max(np.abs(true[finite]), initial=1e-300))
