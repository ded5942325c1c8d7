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
from experiments.costs.complexity_ledger_figures import plot
from experiments.experiment import JSON, Expectation, near, run_experiment

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "run"]

Array = jax.Array
Tree = dict[str, Array]

FORMS = ("naive", "reference", "tiled")
PUBLISHED_PARAMETERS = {"additive": 8256, "general": 4096, "dot": 0, "scaled": 0}  # at d = 64

CAPTIONS = {
    "complexity_ledger": (
        "Temporary memory of attention with all gradients against sequence length, for additive "
        "and scaled dot, and for eight scores at length 4096. The naive formula and the reference "
        "grow as the square of the length; the tiled implementation grows linearly and lies far "
        "below. At length 4096 tiles take 1 to 7 MiB, the naive formula hundreds to tens of "
        "thousands."
    ),
    "complexity_ledger_flops": (
        "Operations for one query against the number of keys. Additive attention as the chapter "
        "computes it takes about a hundred times as many as dot product attention. With its two "
        "projections computed once per token it takes less than twice as many, and a tanh per "
        "feature. General, dot and scaled dot nearly coincide at many keys."
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        scores: names of the scores to count.
        dim: d, features of queries, keys, values and hidden layers.
        lengths: T = S, at least three, rising.
        block: rows and columns of a tile.
    """

    scores: tuple[str, ...] = tuple(SCORES)
    dim: int = 64
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    block: int = 128

    def __post_init__(self) -> None:
        for name in self.scores:
            if name not in SCORES:
                raise ValueError(f"scores must be of {', '.join(SCORES)}; got {name!r}")
        missing = [name for name in PUBLISHED_PARAMETERS if name not in self.scores]
        if missing:
            raise ValueError(f"scores must have the chapter's four; {', '.join(missing)} missing")
        if len(self.lengths) < 3 or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths must be at least three, rising; got {self.lengths}")
        for name, size in (("dim", self.dim), ("block", self.block), ("lengths", self.lengths[0])):
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")


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
            "parameters_at_64": ledger.parameter_count(name, 64, 64),
            **{side: list(getattr(cost, side)) for side in ("query", "key", "pair")},
            # T queries share the projected keys; T = S.
            "flops_per_query": [cost.flops_per_query(n, n) for n in config.lengths],
            "memory": {form: _memory(name, form, config) for form in FORMS},
        }
    return {
        "scores": scores,
        "stated_flops_per_query": {
            name: [2 * stated(config.dim, n) for n in config.lengths]
            for name, stated in STATED.items()
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


def expectations(numbers: JSON) -> list[Expectation]:
    """The chapter's ledger, and the notebook's exponents."""
    scores, checks = numbers["scores"], []
    exact = "a count: exact"
    for name, published in PUBLISHED_PARAMETERS.items():
        checks.append(
            near(
                f"parameters of {name} at d = 64", str(published),
                scores[name]["parameters_at_64"], published, 0, exact,
            )
        )  # fmt: skip
    stated, longest = numbers["stated_flops_per_query"], numbers["config"]["lengths"][-1]
    dim = numbers["config"]["dim"]
    checks.append(
        near(
            f"operations of additive as the chapter computes it / stated, T = {longest}",
            "T (2d² + d)", numbers["concatenated_flops_per_query"][-1] / stated["additive"][-1],
            1, 0, exact,
        )
    )  # fmt: skip
    for name, source, surplus in (
        ("dot", "T d", 0), ("general", "d² + T d", 0),
        # We scale the query, d products; the chapter scales T logits, a multiply-add each.
        ("scaled", "T d + T", dim - 2 * longest),
    ):  # fmt: skip
        checks.append(
            near(
                f"operations of {name} for one query, T = {longest}", source,
                scores[name]["flops_per_query"][-1], stated[name][-1] + surplus, 0, exact,
            )
        )  # fmt: skip
    # Per query: 2d² for its own projection, 2d² for that of one key, and 3d per pair.
    checks.append(
        near(
            f"operations of additive, projections shared, for one query, T = {longest}", "",
            scores["additive"]["flops_per_query"][-1], 4 * dim**2 + 3 * dim * longest, 0, exact,
        )
    )  # fmt: skip
    of_softmax = "the softmax and scaling add terms of order T² and T d to T² d"
    for name, expected, within in (("length", 2, 0.02), ("dim", 1, 0.1)):
        checks.append(
            near(
                f"exponent of scaled dot attention's operations in the {name}", "O(n² d)",
                numbers["exponents"][name], expected, within, of_softmax,
            )
        )  # fmt: skip
    for name, of_score in scores.items():
        for form, low, high in zip(FORMS, (1.9, 1.9, 0), (2.1, 2.1, 1.1), strict=True):
            for direction in ("forward", "backward"):
                checks.append(
                    Expectation(
                        f"exponent of memory, {name}, {form}, {direction}",
                        "O(n²)" if low else "",
                        of_score["memory"][form][direction]["exponent_of_increments"],
                        low, high, "a program also holds arrays of size T d, and padding",
                    )
                )  # fmt: skip
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
