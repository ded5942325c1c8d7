"""At which length does self attention become slower than a recurrent network, and is it n = d?

Answer:   Operations are equal at n = d, as the source says. Time is not: on 2 CPU cores attention
          takes at most 0.59 of the GRU's time for n < d, and more than the GRU from 3.6 to 11 d on.
Source:   day 11 ("Scaled Dot-Product Attention"), §11.5: of n tokens with d features, a recurrent
          network takes O(n d²) operations in O(n) sequential steps, and attention O(n² d) in O(1);
          for n < d attention wins on everything.
Command:  .venv/bin/python -m experiments.costs.recurrence   # 3 minutes on 2 CPU cores

Both read the same tokens [4, n, d] and return as many. The GRU's products with the tokens are one
product before the loop; each step multiplies the state [4, d] by a kernel [d, 3 d]. Attention is
scaled dot with one head, between four projections [d, d]. With an addition and a multiplication as
two operations,

    GRU         12 n d²
    attention    8 n d² + 4 n² d,

which are equal at n = d (without projections: at n = 3 d). The gates and the softmax come on top;
XLA counts them as well.

A time is that of one call of a compiled program in float32, with JAX's default precision. The two
programs take turns (a, b, b, a, ...), and a time is the median over turns. The GRU is a
`lax.scan`, as XLA compiles it; fused recurrent kernels, as cuDNN has, are not measured. A causal
mask, which halves attention's pairs, is not either.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from attention_jax import attention
from attention_jax.analysis import ledger
from attention_jax.reports import plotting
from experiments import lab
from experiments.lab import Claim, Row, column, interleaved, main, markdown, significant
from experiments.reversal.gru_model import gru, initial_gru

Array = jax.Array
BATCH = 4
GRU, ATTENTION = "GRU", "attention"
TIMES = ("forward", "forward + backward")
CAPTIONS = {
    "recurrence": "Time of a call with its gradients over the number n of tokens. Dotted: n = d."
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        dims: d, features of tokens, states, queries, keys and values.
        lengths: n, tokens per sequence, rising.
        turns: turns of each program.
        turn_seconds: time of a turn.
    """

    dims: tuple[int, ...] = (64, 512)
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    turns: int = 6
    turn_seconds: float = 0.2

    def __post_init__(self) -> None:
        lab.check_least(self, dims=1, lengths=1, turns=1, turn_seconds=0)
        if not set(self.dims) <= set(self.lengths):
            raise ValueError(f"dims must be among the lengths; got {self.dims} and {self.lengths}")


QUICK = Config((8,), (4, 8, 16), 1, 0.0)


def attend(kernels: Array, tokens: Array, implementation: str | None = None) -> Array:
    """Self attention with one head between projections [4, d, d]: [B, n, d] -> [B, n, d]."""
    query, key, value = (tokens @ kernel for kernel in kernels[:3])
    return attention(query, key, value, implementation=implementation) @ kernels[3]


def run(config: Config) -> list[Row]:
    """A row for each d, n and model."""
    device, rows = jax.devices()[0].device_kind, []
    for dim, length in itertools.product(config.dims, config.lengths):
        labels = {"device": device, "dim": dim, "length": length}
        rows += [labels | row for row in _measured(dim, length, config)]
        lab.say(f"d = {dim}, n = {length}")
    return rows


def _measured(dim: int, length: int, config: Config) -> list[Row]:
    """Operations of one example and milliseconds of a call, for each model."""
    rngs = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.normal(rngs[0], (BATCH, length, dim))
    kernels = jax.random.normal(rngs[1], (4, dim, dim)) * dim**-0.5
    models: dict[str, tuple[Any, Any]] = {
        GRU: (gru, initial_gru(rngs[2], dim, dim)),
        ATTENTION: (attend, kernels),
    }
    rows: dict[str, Row] = {}
    for name, (model, params) in models.items():
        counted = model if name == GRU else functools.partial(model, implementation="reference")
        operations = ledger.operation_count(counted, params, tokens[:1]).flops
        rows[name] = {"model": name, "operations": significant(operations)}
    for time in TIMES:
        calls = {name: _program(time, *model, tokens) for name, model in models.items()}
        for name, turns in interleaved(calls, config.turns, config.turn_seconds).items():
            rows[name][time] = significant(np.median(turns))
    return [*rows.values()]


def _program(time: str, model: Any, params: Any, tokens: Array) -> Callable[[], object]:
    both = functools.partial(ledger.forward_and_backward, model)
    function, inputs = (model, ()) if time == TIMES[0] else (both, (tokens,))
    program = jax.jit(function).lower(*inputs, params, tokens).compile()
    return lambda: jax.block_until_ready(program(*inputs, params, tokens))


# --- what came out ---


def of(rows: list[Row], name: str, **at: Any) -> np.ndarray:
    """Lengths, and a column of the GRU and of attention: [3, lengths]."""
    lengths = column(rows, "length", model=GRU, **at)
    return np.array([lengths, *(column(rows, name, model=x, **at) for x in (GRU, ATTENTION))])


def crossing(lengths: np.ndarray, of_gru: np.ndarray, of_attention: np.ndarray) -> float:
    """The length from which on attention takes more; inf if it takes less at the longest.

    Between two lengths the logarithm of the ratio is a straight line in that of the length.
    """
    gaps = np.log(of_attention / of_gru)
    last = np.flatnonzero(gaps <= 0)[-1:].sum()  # the first length if attention always takes more
    if gaps[-1] <= 0:
        return math.inf
    return float(np.exp(np.interp(0, gaps[last : last + 2], np.log(lengths[last : last + 2]))))


def claims(rows: list[Row]) -> list[Claim]:
    """What the source says about operations and about time; bounds are from before the runs."""
    dims, device = [*dict.fromkeys(column(rows, "dim"))], rows[0]["device"]
    counts = [crossing(*of(rows, "operations", dim=dim)) / dim for dim in dims]
    farthest = max(counts, key=lambda ratio: abs(math.log(ratio)))
    times = [(dim, of(rows, time, dim=dim)) for dim, time in itertools.product(dims, TIMES)]
    below = max(float((x[2] / x[1])[x[0] < dim].max()) for dim, x in times)
    least = min(crossing(*x) / dim for dim, x in times)
    lengths, of_gru, _ = times[-2][1]  # forward, at the largest d
    growth = ledger.growth_exponent(lengths[-3:].tolist(), of_gru[-3:].tolist())
    text = "length from which on attention takes more operations, over d, the farthest from 1"
    ratio = f"{device}, n < d: time of attention over the GRU's, the largest"
    begins = f"{device}: length from which on attention takes more time, over d, the least"
    power = f"{device}: exponent of the GRU's time in n, the three longest"
    return [
        Claim(text, farthest, 0.9, 1.1, "O(n d²) and O(n² d)"),
        Claim(ratio, below, 0, 1, "for n < d attention wins on everything"),
        Claim(begins, least, 1, 16),
        Claim(power, growth, 0.9, 1.1, "O(n) sequential steps"),
    ]


def table(rows: list[Row]) -> str:
    """Where attention begins to take more than the GRU, and their ratio at three lengths."""
    lines = []
    for dim in dict.fromkeys(column(rows, "dim")):
        for name in ("operations", *TIMES):
            lengths, *both = of(rows, name, dim=dim)
            begins, ratios = crossing(lengths, *both), both[1] / both[0]
            cells = [f"{begins:,.0f} ({begins / dim:.2g} d)" if math.isfinite(begins) else "none"]
            cells += [f"{x:.2g}" for x in (ratios[0], *ratios[lengths == dim], ratios[-1])]
            lines.append((rows[0]["device"], dim, name, *cells))
    longest, ratio = max(column(rows, "length")), "attention / GRU at n ="
    head = ["device", "d", "of", f"more for attention from n = (none: not up to {longest:,})"]
    head += [f"{ratio} {min(column(rows, 'length'))}", f"{ratio} d", f"{ratio} {longest:,}"]
    return markdown(head, lines)


def plot(rows: list[Row]) -> dict[str, Any]:
    """Time over the length, a panel per d."""
    dims = [*dict.fromkeys(column(rows, "dim"))]
    figure, axes = plotting.new_figure(3.6 * len(dims), 3.7, columns=len(dims), grid=True)
    for ax, dim in zip(axes, dims, strict=True):
        lengths, *both = of(rows, TIMES[1], dim=dim)
        for index, (model, times) in enumerate(zip((GRU, ATTENTION), both, strict=True), start=4):
            ax.loglog(lengths, times, label=model, **plotting.style_of(index))
        ax.axvline(dim, color="black", linestyle=":", linewidth=1.2)
        ax.set(title=f"{rows[0]['device']}, d = {dim}", xlabel="tokens n", ylabel="milliseconds")
    axes[0].legend()
    return {"recurrence": figure}


if __name__ == "__main__":
    main(__name__)
