"""What does each score cost in parameters, operations and memory, as stated and as measured?

Answer:   If each token is projected once, additive needs 1.5 times dot's operations, not the 129
          times of the chapter's ledger; in tiles its memory at 4,096 tokens is 4 MiB instead of
          8.3 GiB. Memory in tiles grows linearly from about 2,048 tokens on (dot: 525 bytes per
          token, two arrays [T, 64]). Fitted from 256 tokens on, its exponent is up to 1.38, where
          at most 1.1 was expected: shorter sequences share buffers.
Source:   chapter 38, §38.6, "A complexity ledger for the four variants" and the cell that counts
          parameters; the notebook's complexity analysis of scaled dot-product attention: O(n² d)
          time and O(n²) memory.
Command:  .venv/bin/python -m experiments.costs.complexity_ledger   # 2 minutes on 2 CPU cores

Parameters are counted from the shapes that `init` makes. XLA counts the operations of the traced
program; an addition and a multiplication are two, where the chapter counts one. XLA also reports
the memory of the compiled program, which is not run: the temporary memory of one example and one
head, T = S, with all gradients. "naive" is the formula as it is usually written, for the chapter's
scores and concat; "reference" and "tiled" are this library's implementations, tiled with the same
tile size at all lengths. Programs also take a constant amount of memory, so the exponent of growth
is that of the increments from one length to the next, in which the constant cancels.

The chapter's T (2d² + d) for additive is the cost of its own computation: it concatenates each
query with each key and multiplies the pair by W. With W = [W_q W_k], W [q; k] = W_q q + W_k k, and
each product is computed once per token. A pair then costs d additions, d tanh and a product
with v.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import BlockSizes, attention, get_score
from attention_jax.analysis import ledger
from attention_jax.reports import plotting
from experiments import lab
from experiments.lab import Claim, Row, column, main, markdown, where
from experiments.reversal.arms import SHORT_STRINGS, changed
from experiments.reversal.gru_model import GRUReversal

Array = jax.Array
CAPTIONS = {
    "complexity_ledger": "Memory of attention with all gradients over the length: it grows as the"
    " square of the length where all pairs are stored, and in tiles linearly from about 2,048"
    " tokens on."
}
FORMS = ("naive", "reference", "tiled")
PARAMETERS = {"additive": 8256, "general": 4096, "dot": 0, "scaled": 0}  # the chapter, d = 64
MODELS = {"additive": 63773, "general": 59613, "dot": 55517, "scaled": 55517}  # with a GRU
# At some sizes XLA:CPU replaces the whole of a naive attention by one kernel of YNNPACK, whose
# allocations it does not count: 0 bytes for dot at T = S = 4096. This option turns that off.
_COUNT_ALL = {"xla_cpu_experimental_ynn_fusion_type": ""}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        scores: the scores to count.
        dim: d, features of queries, keys, values and hidden layers.
        lengths: T = S, rising.
        block: rows and columns of a tile.
    """

    scores: lab.ScoreNames = (
        "additive", "concat", "cosine", "distance", "dot", "general", "scaled", "softcap",
    )  # fmt: skip
    dim: int = 64
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    block: int = 128

    def __post_init__(self) -> None:
        lab.check_least(self, dim=1, block=1, lengths=1)


QUICK = Config(("additive", "general", "dot", "scaled"), 16, (64, 128, 256), 32)


# --- the naive forms: each formula as one writes it down ---


def _additive(params: Any, query: Array, key: Array) -> Array:
    sums = (query @ params["query_kernel"])[:, None] + (key @ params["key_kernel"])[None]
    return jnp.tanh(sums) @ params["v"]


def _concat(params: Any, query: Array, key: Array) -> Array:
    shape = len(query), len(key), query.shape[-1]
    pairs = [jnp.broadcast_to(side, shape) for side in (query[:, None], key[None])]
    return jnp.tanh(jnp.concatenate(pairs, axis=-1) @ params["kernel"]) @ params["v"]


NAIVE: dict[str, Callable[[Any, Array, Array], Array]] = {
    "additive": _additive,
    "concat": _concat,
    "dot": lambda params, query, key: query @ key.T,
    "general": lambda params, query, key: (query @ params["kernel"]) @ key.T,
    "scaled": lambda params, query, key: query @ key.T / jnp.sqrt(float(key.shape[-1])),
}


def naive_attention(score: str) -> Callable[..., Array]:
    """The function (query, key, value, params) -> output of one example."""
    return lambda q, k, v, params: jax.nn.softmax(NAIVE[score](params, q, k), axis=-1) @ v


# --- the ledger ---


def run(config: Config) -> list[Row]:
    """A row per score, one of the chapter's additive, and one per size of a whole attention."""
    dim, lengths, longest, rows = config.dim, config.lengths, config.lengths[-1], []
    for score in config.scores:
        cost = ledger.score_cost(score, dim, dim)
        row = {"score": score, "dim": dim, "lengths": lengths, "parameters": cost.parameters}
        row["operations"] = cost.flops_per_query(longest, longest)  # T queries share the keys
        row["tanh"] = cost.pair.transcendentals
        for form in FORMS if score in NAIVE else FORMS[1:]:
            row[form] = [temporary(score, form, length, config) for length in lengths]
        rows.append(row)
    for score in MODELS:
        model = changed(GRUReversal(**vars(SHORT_STRINGS), hidden_dim=64), {}, score=score)
        leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
        rows.append({"model": score, "parameters": sum(leaf.size for leaf in leaves)})
    params = get_score("concat").param_shapes({}, dim, dim)
    chapter = ledger.operation_count(_concat, params, _token(1, dim), _token(longest, dim)).flops
    rows.append({"chapter": "additive", "operations": chapter})
    attend = functools.partial(attention, score="scaled", implementation="reference")
    for n, d in [*((n, dim) for n in lengths), *((longest, dim * 2**i) for i in range(1, 5))]:
        operations = ledger.operation_count(attend, *[_token(n, d)] * 3).flops
        rows.append({"attention": "scaled", "length": n, "dim": d, "operations": operations})
    return rows


def _token(length: int, dim: int) -> Any:
    return jax.ShapeDtypeStruct((length, dim), jnp.float32)


def temporary(score: str, form: str, length: int, config: Config) -> int:
    """Bytes of temporary memory of an attention with all its gradients."""
    dim, block = config.dim, BlockSizes(config.block, config.block)
    if form != "naive":
        return ledger.attention_memory(
            score, length, dim, implementation=form, block_sizes=block, backward=True
        ).temporary
    program = functools.partial(ledger.forward_and_backward, naive_attention(score))
    inputs = [*[_token(length, dim)] * 4, get_score(score).param_shapes({}, dim, dim)]
    options = _COUNT_ALL if jax.default_backend() == "cpu" else None
    return ledger.program_memory(program, *inputs, compiler_options=options).temporary


def exponent(row: Row, form: str) -> float:
    """The exponent of the memory's growth without its constant part; 0 if nothing grows."""
    lengths, sizes = row["lengths"], row[form]
    increments = np.diff(sizes)
    if not increments.any():
        return 0.0
    if (increments > 0).all():
        lengths, sizes = lengths[1:], increments.tolist()
    return ledger.growth_exponent(lengths, sizes)


# --- what came out ---


def claims(rows: list[Row]) -> list[Claim]:
    """The chapter's ledger, the notebook's exponents, and what tiles save."""
    scores = _by_score(rows)
    d, n = scores["dot"]["dim"], scores["dot"]["lengths"][-1]
    operations = {score: row["operations"] for score, row in scores.items()}
    (chapter,) = column(rows, "operations", chapter="additive")
    stated = {"dot": 2 * n * d, "general": 2 * (d**2 + n * d)}
    wrong = [chapter - 2 * n * (2 * d**2 + d), *(operations[s] - x for s, x in stated.items())]
    # Scaled: the chapter scales T logits; we scale the query, d products. Additive, per query: 2d²
    # for its projection, 2d² for that of one key, and 3d per pair.
    scaled, shared = 2 * n * d + d, 4 * d**2 + 3 * d * n
    at, source = f"operations for one query, T = {n:,}", "T (2d² + d), T d, d² + T d"
    counts = [scores[score]["parameters"] - count for score, count in PARAMETERS.items()]
    models = where(rows, "model")
    wrong_models = max(abs(row["parameters"] - MODELS[row["model"]]) for row in models)
    text = "parameters at d = 64: largest difference"
    found = [
        Claim(f"{at}: largest difference", max(map(abs, wrong)), 0, 0, source),
        Claim(f"{at}, scaled: T d + d / 2", operations["scaled"], scaled, scaled, "T d + T", True),
        Claim(f"{at}, additive, each token projected once", operations["additive"], shared, shared),
        Claim(text, max(map(abs, counts)), 0, 0, "8256, 4096, 0, 0"),
        Claim(f"the chapter's models: {text}", wrong_models, 0, 0, "63773, 59613, 55517, 55517"),
    ]
    by_length = where(rows, attention="scaled", dim=d)
    by_dim = where(rows, attention="scaled", length=n)
    for line, axis, power, within in ((by_length, "length", 2, 0.02), (by_dim, "dim", 1, 0.1)):
        growth = ledger.growth_exponent(column(line, axis), column(line, "operations"))
        text = f"exponent of scaled dot attention's operations in the {axis}"
        found.append(Claim(text, growth, power - within, power + within, "O(n² d)"))
    text = "exponent of memory where all pairs are stored, the farthest from 2"
    others = [row for score, row in scores.items() if score != "scaled"]
    for of, of_scores, source in (
        ("scaled", [scores["scaled"]], "O(n²)"),
        ("other scores", others, ""),
    ):
        stored = [exponent(row, form) for form in FORMS[:2] for row in where(of_scores, form)]
        farthest = max(stored, key=lambda power: abs(power - 2))
        found.append(Claim(f"{text}, {of}", farthest, 1.9, 2.1, source))
    tiled = max(exponent(row, "tiled") for row in scores.values())
    saved = min(row["naive"][-1] / row["tiled"][-1] for row in where(rows, "naive"))
    return [
        *found,
        Claim("exponent of memory in tiles, the largest", tiled, 0, 1.1),
        Claim(f"memory at T = {n:,}, naive / tiled, smallest of all scores", saved, 40),
    ]


def _by_score(rows: list[Row]) -> dict[str, Row]:
    return {row["score"]: row for row in where(rows, "score")}


def table(rows: list[Row]) -> str:
    """The ledger at the longest length."""
    head = ("score", "parameters", "operations for a query's logits", "tanh and roots per pair")
    lines = [
        [score]
        + [f"{row[name]:,.0f}" for name in ("parameters", "operations", "tanh")]
        + [f"{row[form][-1] / 2**20:,.1f}" if form in row else "" for form in FORMS]
        for score, row in _by_score(rows).items()
    ]
    (row, *_), memory = _by_score(rows).values(), [f"MiB, {form}" for form in FORMS]
    note = f"{row['lengths'][-1]:,} tokens of {row['dim']} features; memory with all gradients."
    return f"{note} Empty: not measured.\n\n{markdown((*head, *memory), lines)}"


def plot(rows: list[Row]) -> dict[str, Any]:
    """Memory over the length for two scores."""
    scores = _by_score(rows)
    drawn = sorted(scores, key=lambda score: score not in ("additive", "scaled"))[:2]
    shape: Any = {"columns": len(drawn), "sharey": True}
    figure, axes = plotting.new_figure(4.2 * len(drawn), 4, grid=True, **shape)
    for ax, score in zip(axes, drawn, strict=True):
        row = scores[score]
        for form in FORMS:
            if form in row:
                look = plotting.style_of(plotting.index_of(form, FORMS))
                mib = np.array(row[form]) / 2**20
                ax.loglog(row["lengths"], mib, ms=5, label=form, **look)
        ax.set(title=score, xlabel="length, T = S")
        ax.set_xticks(row["lengths"], row["lengths"])
        ax.minorticks_off()
    axes[0].set_ylabel("temporary memory (MiB)")
    axes[0].legend()
    return {"complexity_ledger": figure}


if __name__ == "__main__":
    main(__name__)
