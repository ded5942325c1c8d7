"""What are the four scores of one query and one key, and attention over three tokens, by hand?

Answer:   Dot is 1.1800, scaled 0.5900, general 0.3471 and additive -0.6569, all as the source
          prints them. Its second form of general, with W^T h, gives -0.0027 instead.
Source:   chapter 38 ("Attention Variants"), §38.1 (four scores of one pair) and exercise 38.1
          (general is dot on projected keys); day 11, E11.1 (three tokens by hand).
Command:  .venv/bin/python -m experiments.scores.worked_example   # 10 seconds on 2 CPU cores

General and additive have random parameters in the source; `torch_random` draws the same ones. Any
other score has parameters of its own initialisation.

Exercise 38.1 projects keys by h' = W^T h, and §38.1 by K' = K W^T. These differ: the rows of K W^T
are W h, and s . W h = s^T W h is the score. With W^T h the result is s^T W^T h, another number
unless W is symmetric. W^T projects the query, which is cheaper where there are fewer queries than
keys. The general score of T queries, S keys and D features takes

    T S (D² + D)      multiplications, one pair at a time,
    S D² + T S D      with keys projected once,
    T D² + T S D      with queries projected once, as `General` does.

§38.1 also says that additive is the only score that can fall where s . h rises. General can as well
(W = -I reverses every order). The experiment counts, for random keys and the source's parameters,
how many pairs of keys each score puts in the order of s . h.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attention_jax import attention, attention_weights
from attention_jax.reports import plotting
from attention_jax.scores import get_score
from experiments.lab import Claim, Row, ScoreNames, column, main, markdown, significant, where
from experiments.torch_random import TorchRandom

# §38.1
QUERY, KEY = jnp.array([[1.0, -0.5, 0.3, 0.8]]), jnp.array([[0.6, 0.2, -0.4, 1.0]])
PRINTED = {"dot": 1.1800, "scaled": 0.5900, "general": 0.3471, "additive": -0.6569}
PRINTED_STEPS = {  # s W, and tanh(Wq s + Wk h)
    "general": (0.166, 0.57, -0.183, 0.06),
    "additive": (-0.63, 0.659, -0.101, 0.877),
}
SUMMANDS = {
    "dot": "sᵢ hᵢ",
    "scaled": "sᵢ hᵢ / √4",
    "general": "(sᵀW)ᵢ hᵢ",
    "additive": "vᵢ tanh(W_q s + W_k h)ᵢ",
}
# Day 11, E11.1, where K and V are the same numbers.
THREE_QUERIES = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
THREE_KEYS = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])

CAPTIONS = {
    "worked_example": "The four summands of one logit, a bar chart per score; above it their sum.",
    "worked_example_three_tokens": "Attention of three tokens, computed by hand.",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        scores: scores to compare.
        keys: random keys, whose order by each score is compared with that by dot product.
    """

    scores: ScoreNames = ("dot", "scaled", "general", "additive")
    keys: int = 1000


QUICK = Config(keys=50)


def run(config: Config) -> list[Row]:
    """The numbers of the sources' examples: a row per score, number and table."""
    of_source = source_parameters()
    keys = jax.random.normal(jax.random.key(0), (config.keys, KEY.shape[1]))
    first, second = np.triu_indices(config.keys, k=1)
    by_dot = np.asarray(QUERY @ keys.T)[0]
    rows: list[Row] = []
    for name in config.scores:
        score = get_score(name)
        params = of_source.get(name) or score.init(jax.random.key(2), 4, 4)
        logits = np.asarray(score(params, QUERY, keys))[0]
        same_order = (logits[first] > logits[second]) == (by_dot[first] > by_dot[second])
        row = {"logit": score(params, QUERY, KEY)[0, 0]}
        row |= {"same_order": same_order.mean(), **steps(name, params)}
        rows.append({"score": name, **significant(row)})
    transposed = (QUERY @ (KEY @ of_source["general"]["kernel"]).T)[0, 0]
    rows.append({"number": "s . W^T h", "is": significant(transposed)})
    tables = {
        "dot products QKᵀ": THREE_QUERIES @ THREE_KEYS.T,
        "scaled QKᵀ / √2": get_score("scaled")({}, THREE_QUERIES, THREE_KEYS),
        "weights A, rows sum to 1": attention_weights(THREE_QUERIES, THREE_KEYS),
        "output AV": attention(THREE_QUERIES, THREE_KEYS, THREE_KEYS),
    }
    digits = {name: np.asarray(each, np.float64).round(6) for name, each in tables.items()}
    return rows + [{"table": name, "is": each.tolist()} for name, each in digits.items()]


def source_parameters() -> dict[str, Any]:
    """Returns the parameters of §38.1 in the form that our scores take."""
    random = TorchRandom(11)
    general, both, v = (0.3 * random.randn(*shape) for shape in ((4, 4), (4, 8), (4,)))
    additive = {"query_kernel": both[:, :4].T, "key_kernel": both[:, 4:].T, "v": v}
    return jax.tree.map(jnp.asarray, {"general": {"kernel": general}, "additive": additive})


def steps(name: str, params: Any) -> Row:
    """The step that §38.1 prints and the summands of the logit, for a score of the source."""
    if name not in SUMMANDS:
        return {}
    query = get_score(name).project_query(params, QUERY)[0]
    key = get_score(name).project_key(params, KEY)[0]
    if name == "additive":
        query, key = jnp.tanh(query + key), params["v"]
    return {"step": query, "summands": query * key}


def claims(rows: list[Row]) -> list[Claim]:
    """The sources' numbers and claims."""
    scores = {row["score"]: row for row in where(rows, "score")}
    general = scores["general"]
    logit = max(abs(scores[name]["logit"] - printed) for name, printed in PRINTED.items())
    step = max(
        np.abs(np.subtract(scores[name]["step"], printed)).max()
        for name, printed in PRINTED_STEPS.items()
    )
    transposed = where(rows, number="s . W^T h")[0]["is"] - general["logit"]
    text = "share of pairs of keys that general puts in the order of s . h"
    only = "1: only additive can fall where s . h rises"
    return [
        Claim("largest difference from the printed scores", logit, 0, 5.1e-5, "four scores"),
        Claim("largest difference from the printed steps", step, 0, 5.1e-4, "s W, tanh(...)"),
        Claim("s . W^T h - general, absolute", abs(transposed), 1e-3, source="0", denies=True),
        Claim(text, general["same_order"], high=0.9, source=only, denies=True),
    ]


def table(rows: list[Row]) -> str:
    """The logits beside the source's, and how often a score keeps the order of s . h."""
    head = ["score", "logit of query s and key h", "as the source prints it"]
    head.append("pairs of random keys in the order of their dot products")
    lines = []
    for row in where(rows, "score"):
        printed = f"{PRINTED[row['score']]:.4f}" if row["score"] in PRINTED else ""
        share = f"{100 * row['same_order']:.0f} %"
        lines.append((row["score"], f"{row['logit']:.4f}", printed, share))
    return markdown(head, lines)


def plot(rows: list[Row]) -> dict[str, Figure]:
    """The summands of each logit, and the four tables of E11.1."""
    scores = where(rows, "score")
    width = max(2.6 * len(scores), 5.2)
    summands, axes = plotting.new_figure(width, 3.6, columns=len(scores), sharey=True)
    for ax, row in zip(axes, scores, strict=True):
        name, heights = row["score"], row.get("summands") or [row["logit"]]
        features = range(1, len(heights) + 1)
        index = plotting.index_of(name, column(scores, "score"))
        bars = ax.bar(features, heights, color=plotting.style_of(index)["color"])
        ax.bar_label(bars, fmt="%.3f", padding=2)
        ax.axhline(0, color="black", linewidth=0.8)
        title = filter(None, (name, SUMMANDS.get(name), f"logit {row['logit']:+.4f}"))
        ax.set_title("\n".join(title), fontsize=11)
        ax.set(xlabel="feature i", xticks=features)
    axes[0].set_ylabel("summand of the logit")
    axes[0].margins(y=0.15)
    summands.suptitle("The logit of one query s and one key h, and its summands, for each score")
    ratios = {"width_ratios": [3, 3, 3, 2]}
    tokens, axes = plotting.new_figure(10.5, 3.6, columns=4, gridspec_kw=ratios)
    for ax, row in zip(axes, where(rows, "table"), strict=True):
        numbers = np.array(row["is"])
        plotting.draw_weights(ax, numbers, "123", "123"[: numbers.shape[1]])
        for (query, key), number in np.ndenumerate(numbers):
            color = "white" if number < 0.6 else "black"
            ax.text(key, query, f"{number:.4f}", ha="center", va="center", color=color)
        ax.set_title(row["table"], fontsize=11)
    axes[0].set_ylabel("query")
    axes[-1].set_xlabel("feature")
    tokens.suptitle("Three tokens by hand: the third query weighs all keys alike")
    return {"worked_example": summands, "worked_example_three_tokens": tokens}


if __name__ == "__main__":
    main(__name__)
