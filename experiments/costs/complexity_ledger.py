"""What does each score cost in parameters, operations and memory, as stated and as measured?

Source:   chapter 38 ("Attention Variants"), §38.6, "A complexity ledger for the four variants" and
          the cell that counts parameters; the notebook's complexity analysis, O(n² d) time and
          O(n²) memory.
Command:  .venv/bin/python -m experiments.costs.complexity_ledger
Time:     2 minutes on 2 CPU cores, 6 beside other work; it compiles programs and runs none.
Expected: attention parameters at d = 64: additive 8256, general 4096, dot and scaled 0. Operations
          per query T (2d² + d), d² + T d, T d and T d + T, a multiplication and its addition
          counted as one. Memory grows as T² where [T, S] is materialised, and as T in tiles.

Parameters are counted from the shapes that `init` makes. XLA counts operations in the traced
program (an addition and a multiplication are two) and memory in the compiled program: the temporary
memory of one example and one head, T = S, forward, and forward with all gradients. "naive" is the
formula as one writes it down; "reference" and "tiled" are this library's implementations, tiled
with the same tile size at all lengths. Tiles also take a constant amount of memory, so the exponent
is fitted to the increments from one length to the next, in which the constant cancels.

The chapter's T (2d² + d) for additive is the cost of its own computation: it concatenates each
query with each key and multiplies the pair by W. With W = [W_q W_k], W [q; k] = W_q q + W_k k, and
each product is computed once per token. A pair then costs d additions, d tanh and a product
with v.

The ledger, the naive formulas and the operations are those of named scores. Other scores of
`--scores` get their parameters, operations, and memory as "reference" and "tiled".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import SCORES, BlockSizes, attention, get_score
from attention_jax.analysis import ledger
from experiments.costs.complexity_ledger_figures import FORMS, plot
from experiments.costs.complexity_ledger_report import (
    PUBLISHED_PARAMETERS,
    expectations,
    report,
)
from experiments.costs.price_of_additive import price_of_additive
from experiments.experiment import JSON, ScoreNames, run_experiment
from experiments.setting_checks import check_least

__all__ = [
    "CAPTIONS",
    "QUICK",
    "Config",
    "expectations",
    "plot",
    "price_of_additive",
    "report",
    "run",
]

Array = jax.Array
Tree = dict[str, Array]

CAPTIONS = {
    "complexity_ledger": (
        "Temporary memory of attention with all gradients against sequence length, for additive "
        "and scaled dot, and for eight scores at length 4096. The naive formula and the reference "
        "grow as the square of the length; the tiled implementation grows linearly and lies far "
        "below."
    ),
    "complexity_ledger_flops": (
        "Operations for one query against the number of keys. Additive attention as the chapter "
        "computes it, a product with a matrix per pair, lies far above. With its two projections "
        "computed once per token it lies near dot product attention, but takes a tanh per feature "
        "besides. General, dot and scaled dot nearly coincide at many keys."
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        scores: the scores to count.
        dim: d, features of queries, keys, values and hidden layers.
        lengths: T = S, at least three, rising.
        block: rows and columns of a tile.
    """

    scores: ScoreNames = tuple(SCORES)
    dim: int = 64
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    block: int = 128

    def __post_init__(self) -> None:
        if not self.scores or len(set(self.scores)) != len(self.scores):
            raise ValueError(f"scores must be one or more, each once; got {self.scores}")
        for score in self.scores:
            get_score(score)
        if len(self.lengths) < 3 or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths must be at least three, rising; got {self.lengths}")
        check_least(self, dim=1, block=1, lengths=1)


QUICK = Config(scores=tuple(PUBLISHED_PARAMETERS), dim=16, lengths=(64, 128, 256), block=32)


# --- the naive forms: each formula as one writes it down ---


def _dot(params: Tree, query: Array, key: Array) -> Array:
    return query @ key.T


def _scaled(params: Tree, query: Array, key: Array) -> Array:
    return query @ key.T / jnp.sqrt(float(key.shape[-1]))


def _additive(params: Tree, query: Array, key: Array) -> Array:
    sums = (query @ params["query_kernel"])[:, None] + (key @ params["key_kernel"])[None]
    return jnp.tanh(sums) @ params["v"]


def _concat(params: Tree, query: Array, key: Array) -> Array:
    shape = (len(query), len(key))
    sides = query[:, None], key[None]
    pairs = jnp.concatenate([jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in sides], axis=-1)
    return jnp.tanh(pairs @ params["kernel"]) @ params["v"]


def _cosine(params: Tree, query: Array, key: Array) -> Array:
    norms = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    return jnp.exp(params["log_scale"]) * (query @ key.T) / jnp.matmul(next(norms), next(norms).T)


def _distance(params: Tree, query: Array, key: Array) -> Array:
    differences = query[:, None] - key[None]
    return -jnp.sum(differences**2, axis=-1) / jnp.sqrt(8.0 * key.shape[-1])


NAIVE: dict[str, Callable[[Tree, Array, Array], Array]] = {
    "additive": _additive,
    "concat": _concat,
    "cosine": _cosine,
    "distance": _distance,
    "dot": _dot,
    "general": lambda params, query, key: (query @ params["kernel"]) @ key.T,
    "scaled": _scaled,
    "softcap": lambda params, query, key: 50 * jnp.tanh(_scaled(params, query, key) / 50),
}


def naive_attention(score: str) -> Callable[..., Array]:
    """Returns the function (query, key, value, params) -> output of one example."""

    def attend(query: Array, key: Array, value: Array, params: Tree) -> Array:
        return jax.nn.softmax(NAIVE[score](params, query, key), axis=-1) @ value

    return attend


# --- the ledger ---


def run(config: Config) -> JSON:
    """Counts parameters and operations, and compiles for the memory."""
    scores: JSON = {}
    for name in config.scores:
        cost = ledger.score_cost(name, config.dim, config.dim)
        scores[name] = {
            "parameters": cost.parameters,
            **{side: list(getattr(cost, side)) for side in ("query", "key", "pair")},
            # T queries share the projected keys; T = S.
            "flops_per_query": [cost.flops_per_query(n, n) for n in config.lengths],
            "memory": {
                form: _memory(name, form, config)
                for form in FORMS
                if form != "naive" or name in NAIVE
            },
        }
    return {
        "scores": scores,
        "stated_flops_per_query": {
            name: [2 * stated(config.dim, n) for n in config.lengths]
            for name, stated in STATED.items()
            if name in config.scores
        },
        "concatenated_flops_per_query": [
            _flops_of_concatenation(config.dim, n) for n in config.lengths
        ],
        "exponents": _exponents(config),
    }


# At some sizes XLA:CPU replaces the whole of a naive attention by one kernel of YNNPACK, whose
# allocations it does not count: 0 bytes for dot at T = S = 4096. This option turns that off.
_COUNT_ALL = {"xla_cpu_experimental_ynn_fusion_type": ""}

# The chapter's ledger, (d, T) -> multiply-adds for one query.
STATED: dict[str, Callable[[int, int], int]] = {
    "additive": lambda d, n: n * (2 * d * d + d),
    "dot": lambda d, n: n * d,
    "general": lambda d, n: d * d + n * d,
    "scaled": lambda d, n: n * d + n,
}


def _memory(score: str, form: str, config: Config) -> dict[str, Any]:
    """Bytes at each length, forward and forward + backward, and the exponents of their growth."""
    numbers: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        bytes_held = [
            _temporary(score, form, length, direction == "backward", config)
            for length in config.lengths
        ]
        numbers[direction] = {
            "bytes": bytes_held,
            "exponent": round(ledger.growth_exponent(config.lengths, bytes_held), 4),
            "exponent_of_increments": round(growth_of_increments(config.lengths, bytes_held), 4),
        }
    return numbers


def growth_of_increments(lengths: Sequence[int], bytes_held: Sequence[int]) -> float:
    """Returns the exponent of growth, whatever constant is added; 0 if nothing grows."""
    increments = np.diff(bytes_held)
    if not increments.any():
        return 0.0
    if (increments > 0).all():
        return ledger.growth_exponent(lengths[1:], increments.tolist())
    return ledger.growth_exponent(lengths, bytes_held)


def _temporary(score: str, form: str, length: int, backward: bool, config: Config) -> int:
    if form != "naive":
        return ledger.attention_memory(
            score,
            length,
            config.dim,
            implementation=form,
            block_sizes=BlockSizes(config.block, config.block),
            backward=backward,
        ).temporary
    token = jax.ShapeDtypeStruct((length, config.dim), jnp.float32)
    program: Callable[..., Any] = naive_attention(score)
    inputs = [token, token, token, get_score(score).param_shapes({}, config.dim, config.dim)]
    if backward:
        program = functools.partial(ledger.forward_and_backward, program)
        inputs = [token, *inputs]
    options = _COUNT_ALL if jax.default_backend() == "cpu" else None
    return ledger.program_memory(program, *inputs, compiler_options=options).temporary


def _flops_of_concatenation(dim: int, length: int) -> float:
    """Operations of one query's logits as the chapter computes them: W [q; k] for each key."""
    query, key = (jax.ShapeDtypeStruct((n, dim), jnp.float32) for n in (1, length))
    params = SCORES["concat"].param_shapes({}, dim, dim)
    return ledger.operation_count(_concat, params, query, key).flops


def _exponents(config: Config) -> JSON:
    """Exponents in n and d of scaled dot attention's operations, softmax and values included."""

    def flops(length: int, dim: int) -> float:
        token = jax.ShapeDtypeStruct((length, dim), jnp.float32)
        attend = functools.partial(attention, score="scaled", implementation="reference")
        return ledger.operation_count(attend, token, token, token).flops

    dims = [config.dim * 2**n for n in range(5)]
    longest = config.lengths[-1]
    by_length = [flops(n, config.dim) for n in config.lengths]
    by_dim = [flops(longest, dim) for dim in dims]
    return {
        "flops_by_length": by_length,
        "length": round(ledger.growth_exponent(config.lengths, by_length), 4),
        "dims": dims,
        "flops_by_dim": by_dim,
        "dim": round(ledger.growth_exponent(dims, by_dim), 4),
    }


if __name__ == "__main__":
    run_experiment(__name__)
