"""Where does the gradient of attention go: which queries, parameters and positions receive it?

Answer:   With unscaled dot a few queries receive most of it: at d = 1,024 the mean gradient into a
          query is 4.4 times scaled dot's, but a tenth of the queries get 85 % of the gradient in
          the logits. Additive's tanh saturates, while its softmax stays soft. Without a padding
          mask, positions of padding get 4 to 34 % of the gradient in the logits.
Source:   Vaswani et al. 2017, section 3.2.1: unscaled dot products have "extremely small
          gradients". The rest is ours.
Command:  .venv/bin/python -m experiments.gradients.gradient_analysis
          # under 5 minutes on 2 CPU cores

1. Queries: one random query and S keys of unit variance; dweights = doutput value^T has entries of
   variance 1. The gap between the two largest of S standard normal numbers has a density at 0,
   f(0), that equals their expected maximum, and a median of about log(2) / f(0), as if it were
   exponential. Unscaled dot's median |dlogits| is then about 4 exp(-sqrt(d) gap).
2. Parameters: additive's kernels grow from 0.1 to 30 times their initial size, and so do those of a
   scaled dot product between projected tokens. At scale 1 the arguments of tanh have variance 1.
3. Positions: the reversal model with score general, whose kernel is the first that the gradient of
   the logits reaches, with a padding mask and without. `bare` is the loss on the shortest strings
   without padding, `padded` the loss on the same strings, padded as in training.

softmax_saturation shows the softmax's Jacobian; scale_and_dimension, how dot and scaled dot learn.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import analysis
from attention_jax.nn.config import ModelConfig
from attention_jax.reports import plotting
from attention_jax.scores import Additive
from attention_jax.tasks.reversal import Reversal, reversed_pair
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.losses import real_tokens
from attention_jax.training.metrics import share
from attention_jax.training.task import TrainConfig
from experiments import lab
from experiments.entropy_limits import expected_maximum
from experiments.lab import Claim, Row, column, gain, main, markdown, significant, spread, where
from experiments.reversal.arms import looks

Array = jax.Array
CAPTIONS = {
    "gradient_tanh": "Growing kernels: additive's tanh saturates, its logits stop growing and its"
    " softmax stays soft; scaled dot's logits grow on, and its median gradient vanishes.",
    "gradient_queries": "Unscaled dot's mean gradient into a query stays above scaled dot's over d;"
    " its median vanishes, since a tenth of the queries get nearly all of it.",
}
PRODUCTS = {"dot": "dot", "scaled": "scaled dot"}  # the same logits up to the factor 1 / sqrt(d)
VALUE_DIM = 64  # of random values; no result depends on it
TANH_BOUND = 0.99  # beyond it a unit's derivative, 1 - tanh², is below 2 %
# Headings of the table by the names of numbers in a row.
PADDING = {
    "cross_gradient": "share of the logits' gradient at padding, cross attention",
    "encoder_gradient": "the same, encoder",
    "padded": "loss on the shortest strings, padded",
    "bare": "the same, not padded",
}
ATTENTIONS = {"cross": "decoder_0/cross_attention", "encoder": "encoder_0/self_attention"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings."""

    dims: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # d of random queries and keys
    keys: int = 16  # S, keys per query
    samples: int = 2048  # random queries
    # Factors on the initial kernels.
    kernel_scales: tuple[float, ...] = (0.1, 0.2, 0.4, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 17, 30)
    kernel_dim: int = 32  # size of their tokens and of the hidden layer
    kernel_samples: int = 64  # sets of random kernels
    steps: int = 300  # of the trainings of part 3
    seeds: int = 3  # trainings of each model
    strings: int = 64  # in the batch that models are measured on
    dim: int = ModelConfig.dim  # size of the models' tokens and layers

    def __post_init__(self) -> None:
        lab.check_least(self, dims=1, keys=3, samples=10, kernel_scales=1e-6, kernel_samples=2)
        lab.check_least(self, kernel_dim=1, seeds=2, strings=1)


QUICK = Config((4, 64), 16, 256, (0.5, 1, 30), 16, 16, 2, 2, 8)


def run(config: Config) -> list[Row]:
    """Rows of the three parts."""
    return [*_queries(config), *_kernels(config), *_padding(config)]


def _summary(name: str, values: np.ndarray) -> Row:
    """Mean, its standard error, and median."""
    values = np.asarray(values, np.float64)
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    numbers = {name: values.mean(), f"{name}_error": error, f"{name}_median": np.median(values)}
    return {name: significant(number) for name, number in numbers.items()}


def _queries(config: Config) -> list[Row]:
    rows = []
    for dim in config.dims:
        rng = jax.random.fold_in(jax.random.key(0), dim)
        for score, sizes in random_gradients(dim, config.keys, config.samples, rng).items():
            largest = np.sort(sizes["dlogits"])[::-1]
            share = largest[: math.ceil(config.samples / 10)].sum() / largest.sum()
            row = {"part": "queries", "score": score, "dim": dim, "keys": config.keys}
            row |= {"top_tenth": significant(share), **_summary("dquery", sizes["dquery"])}
            rows.append(row | _summary("dlogits", sizes["dlogits"]))
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_gradients(dim: int, keys: int, samples: int, rng: Array) -> dict[str, dict[str, Array]]:
    """{score: |dlogits| and the root mean square of dquery, [samples] each}."""
    rngs = jax.random.split(rng, 4)
    query = jax.random.normal(rngs[0], (samples, 1, dim))
    key = jax.random.normal(rngs[1], (samples, keys, dim))
    value = jax.random.normal(rngs[2], (samples, keys, VALUE_DIM))
    doutput = jax.random.normal(rngs[3], (samples, 1, VALUE_DIM)) / math.sqrt(VALUE_DIM)
    sizes = {}
    for score in PRODUCTS:
        gradients = analysis.attention_gradients(query, key, value, doutput, score=score)
        dlogits, dquery = (x[:, 0] for x in (gradients.dlogits, gradients.dquery))
        of_query = jnp.linalg.norm(dquery, axis=-1) / math.sqrt(dim)
        sizes[score] = {"dlogits": jnp.linalg.norm(dlogits, axis=-1), "dquery": of_query}
    return sizes


def _kernels(config: Config) -> list[Row]:
    sample = functools.partial(grown_kernels, config.kernel_dim, config.keys)
    rngs = jax.random.split(jax.random.key(0), config.kernel_samples)
    scales, rows = jnp.asarray(config.kernel_scales, jnp.float32), []
    measured = jax.jit(jax.vmap(jax.vmap(sample, (None, 0)), (0, None)))(scales, rngs)
    for score, numbers in measured.items():
        for index, scale in enumerate(config.kernel_scales):
            row = {"part": "kernels", "score": score, "scale": scale, "keys": config.keys}
            for name, values in numbers.items():
                row |= _summary(name, values[index])
            rows.append(row)
    return rows


def grown_kernels(dim: int, keys: int, scale: Array, rng: Array) -> dict[str, dict[str, Array]]:
    """{score: {name: []}} of layer-normalised tokens; both scores have the same random kernels."""
    token_rng, value_rng, doutput_rng, score_rng = jax.random.split(rng, 4)
    tokens = jax.random.normal(token_rng, (2, keys, dim))
    tokens = tokens - jnp.mean(tokens, axis=-1, keepdims=True)
    query, key = tokens / jnp.std(tokens, axis=-1, keepdims=True)
    value = jax.random.normal(value_rng, (keys, VALUE_DIM))
    doutput = jax.random.normal(doutput_rng, (keys, VALUE_DIM)) / math.sqrt(VALUE_DIM)
    score = Additive()
    params = score.init(score_rng, dim, dim)
    params = {**{name: scale * params[name] for name in params}, "v": params["v"]}
    gradients = analysis.attention_gradients(query, key, value, doutput, score=score, params=params)
    q, k = query @ params["query_kernel"], key @ params["key_kernel"]
    units = jnp.tanh(q[:, None] + k[None])  # [T, S, A]
    additive = {name: jnp.linalg.norm(each) for name, each in gradients.dparams.items()}
    additive["saturated"] = share(abs(units) > TANH_BOUND)
    # Additive's kernels have variance 1 / (2 D), since each side makes half of tanh's argument.
    q, k = q * math.sqrt(2), k * math.sqrt(2)
    gradients = analysis.attention_gradients(q, k, value, doutput, score="scaled")
    scaled = {"query_kernel": jnp.linalg.norm(query.T @ gradients.dquery)}
    return {
        "additive": {**additive, **_of_logits(units @ params["v"])},
        "scaled": {**scaled, **_of_logits(q @ k.T / math.sqrt(dim))},
    }


def _of_logits(logits: Array) -> dict[str, Array]:
    return {
        "variance": jnp.mean(analysis.logit_variance(logits, per_row=True)),
        "entropy": jnp.mean(analysis.weight_entropy(jax.nn.softmax(logits))),
    }


def _padding(config: Config) -> list[Row]:
    batch_rng, loss_rng = jax.random.split(jax.random.key(0))
    train, size = TrainConfig(seeds=config.seeds, steps=config.steps), config.strings
    masked = Reversal(ModelConfig(dim=config.dim, score="general"), train, source_start=False)
    batch = masked.batch(batch_rng, size=size)
    bare = dataclasses.replace(masked, max_length=masked.min_length).batch(batch_rng, size=size)
    padded = widened(bare, masked.max_length)
    rows = []
    for mask in (True, False):
        model = dataclasses.replace(masked.model, mask_padding=mask)
        task = dataclasses.replace(masked, model=model)

        def look(params: Any, task: Reversal = task) -> Row:
            gradients = analysis.capture_gradients(task.loss, params, batch, loss_rng).gradients
            row = {
                f"{name}_gradient": share_at_padding(gradients[module].dlogits, batch)
                for name, module in ATTENTIONS.items()
            }
            row["bare"] = task.loss(params, bare, loss_rng)[0]
            return {**row, "padded": task.loss(params, padded, loss_rng)[0]}

        for step, found in looks(task, task.train.steps, look):
            rows.append({"part": "padding", "mask": mask, "step": step, **significant(found)})
    return rows


def share_at_padding(dlogits: Any, batch: Batch) -> Array:
    """The share of |dlogits| [B, ..., T, S] that lies at padding; 0 where there is no gradient."""
    sizes = jnp.abs(dlogits)
    by_key = jnp.sum(sizes, axis=range(1, sizes.ndim - 1))  # [B, S]
    padded = jnp.where(real_tokens(batch.source_lengths, sizes.shape[-1]), 0, by_key)
    total = jnp.sum(by_key)
    return jnp.sum(padded) / jnp.where(total == 0, 1, total)


def widened(batch: Batch, width: int) -> Batch:
    """The same strings, padded to `width`."""
    letters = jnp.pad(batch.source, ((0, 0), (0, width - batch.source.shape[1])))
    pairs = jax.vmap(reversed_pair)(letters, batch.source_lengths)
    return Reversal(source_start=False).padded(*pairs)


def claims(rows: list[Row]) -> list[Claim]:
    """At the largest d and scale; bounds are 4 standard errors, or 2 over seeds."""
    raw, ours = (where(rows, part="queries", score=score)[-1] for score in PRODUCTS)
    d, gap = raw["dim"], math.log(2) / expected_maximum(raw["keys"])
    of_both = f"at d = {d:,}, unscaled / scaled dot"
    vanishing = 4 * math.exp(-math.sqrt(d) * gap) / 0.25  # a soft row has a |J| of 1/4
    median, mean = (raw[x] / ours[x] for x in ("dlogits_median", "dquery"))
    notebook = "vanishingly small without scaling (the notebook)"
    share = raw["top_tenth"] - ours["top_tenth"]
    tenth = f"share of |dlogits| in a tenth of the queries at d = {d:,}, unscaled - scaled dot"
    tanh, other = (where(rows, part="kernels", score=s)[-1] for s in ("additive", "scaled"))
    scale, keys = tanh["scale"], tanh["keys"]
    at, units, error = f"at scale {scale:g}", saturated(scale), 4 * tanh["saturated_error"]
    # Half of a unit's argument comes from the query. The unit's signs for two keys therefore have
    # the covariance 2/pi arcsin(1/2) = 1/3 over queries, and its sign has the variance 2/3 within
    # a row. v² sums to 1 / E tanh² = 1 / 0.394294 of the initial arguments.
    signs = (keys - 1) / keys * (2 / 3) / 0.394294
    within = 4 * tanh["variance_error"] + signs * 4 / (scale * math.sqrt(2 * math.pi))
    entropy = tanh["entropy"] - other["entropy"]
    beyond = f"share of tanh units beyond {TANH_BOUND} {at}, as of normal arguments"
    variance = f"variance of additive's logits within a row {at} is that of signs"
    trained = where(rows, part="padding", mask=False)[-1]
    padded = "trained without a mask: loss on the shortest strings, without their padding - with"
    return [
        Claim(f"mean gradient into the query {of_both}", mean, 1, source=notebook, denies=True),
        Claim(tenth, share, 0, 1),
        Claim(f"median |dlogits| {of_both}", median, 0, vanishing, "extremely small gradients"),
        Claim(beyond, tanh["saturated"], units - error, units + error),
        Claim(variance, tanh["variance"], signs - within, signs + within),
        Claim(f"entropy {at}, additive - scaled dot, nats", entropy, 4 * tanh["entropy_error"]),
        Claim(padded, *gain(trained["bare"], trained["padded"])),
    ]


def saturated(scale: float) -> float:
    """The share of normal arguments of deviation `scale` whose tanh is beyond the bound."""
    return math.erfc(math.atanh(TANH_BOUND) / scale / math.sqrt(2))


def table(rows: list[Row]) -> str:
    """Padding by mask."""
    lines = [
        [row["mask"], row["step"], *(spread(row[name]) for name in PADDING)]
        for row in where(rows, part="padding")
    ]
    heads = "padding is masked", "steps of training", *PADDING.values()
    return markdown(heads, lines) + "\n\n± is one standard deviation over seeds."


def plot(rows: list[Row]) -> dict[str, Any]:
    """The tanh, and the queries."""
    return dict(zip(CAPTIONS, (_plot_kernels(rows), _plot_queries(rows)), strict=True))


def _line(ax: Any, rows: list[Row], x: str, name: str, label: str, ls: str = "-") -> None:
    """A column over x; means in a band of 1.96 standard errors."""
    numbers = np.array(column(rows, name))
    drawn = plotting.style_of(plotting.index_of(rows[0]["score"]))
    ax.plot(column(rows, x), numbers, ls=ls, ms=5, label=label, **drawn)
    if errors := column(rows, f"{name}_error"):
        low, high = numbers - 1.96 * np.array(errors), numbers + 1.96 * np.array(errors)
        ax.fill_between(column(rows, x), low.clip(0), high, color=drawn["color"], alpha=0.2, lw=0)


def _plot_kernels(rows: list[Row]) -> Any:
    figure, axes = plotting.new_figure(8.8, 6.8, rows=2, columns=2, grid=True)
    units, logits, entropy, gradient = axes
    additive, product = (where(rows, part="kernels", score=s) for s in ("additive", "scaled"))
    scales, keys = column(additive, "scale"), additive[0]["keys"]
    _line(units, additive, "scale", "saturated", "additive, measured")
    units.plot(scales, [*map(saturated, scales)], "k--", label="of normal arguments")
    for line, name in ((additive, "additive"), (product, "scaled dot")):
        deviations = [{**row, "deviation": row["variance"] ** 0.5} for row in line]
        _line(logits, deviations, "scale", "deviation", name)
        _line(entropy, line, "scale", "entropy", name)
    entropy.axhline(math.log(keys), color="k", ls="--", label=f"uniform, log {keys}")
    _line(gradient, additive, "scale", "query_kernel", "additive: query kernel")
    _line(gradient, additive, "scale", "v", "additive: v", "--")
    _line(gradient, product, "scale", "query_kernel", "scaled dot: query kernel, mean")
    _line(gradient, product, "scale", "query_kernel_median", "the same, median", ":")
    units.set(title=f"Tanh units with |tanh| > {TANH_BOUND}", ylabel="share")
    logits.set(title="Logits within a row", ylabel="standard deviation", yscale="log")
    entropy.set(title="Entropy of the weights", ylabel="nats")
    gradient.set(title="Gradient into the parameters", ylabel="norm", yscale="log", ylim=(0.02, 80))
    _finish(axes, "factor on the initial kernels")
    return figure


def _plot_queries(rows: list[Row]) -> Any:
    figure, (gradient, share) = plotting.new_figure(8.8, 3.6, columns=2, grid=True)
    for score, name in PRODUCTS.items():
        line = where(rows, part="queries", score=score)
        _line(gradient, line, "dim", "dquery", f"{name}, mean")
        _line(gradient, line, "dim", "dquery_median", f"{name}, median", ":")
        _line(share, line, "dim", "top_tenth", name)
    gradient.set(yscale="log", title="Gradient into the query", ylabel="rms of a component")
    share.axhline(0.1, color="k", ls="--", label="all queries alike")
    share.set(ylim=(0, 1), title="A tenth of the queries get", ylabel="share of |dlogits|")
    _finish((gradient, share), "dimension d")
    return figure


def _finish(axes: Any, xlabel: str) -> None:
    for ax in axes:
        ax.set(xscale="log", xlabel=xlabel)
        ax.legend(fontsize=9)


if __name__ == "__main__":
    main(__name__)
