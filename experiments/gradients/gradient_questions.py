"""Computations of gradient_analysis.py: one function per question, arrays by sample or seed.

Everything random comes from the given seeds; nothing is read or written. Samples and seeds are
`vmap`ped, and each program is compiled once per shape.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import attention_weights
from attention_jax.analysis import (
    attention_gradients,
    capture_gradients,
    gradient_norms,
    gradient_signal_to_noise,
    hessian_spectrum_edges,
    hessian_trace,
    hessian_vector_product,
    logit_variance,
    softmax_jacobian_norm,
    weight_entropy,
)
from attention_jax.scores import Additive, get_score
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.losses import real_tokens
from experiments.reversal.arms import CROSS, Arrays, follow, fresh_batch, look_at_cross_attention
from experiments.reversal.strings import reversal_batch

Array = jax.Array

PRODUCTS = ("dot", "scaled")  # the same logits up to the factor 1 / sqrt(d)
VALUE_DIM = 64  # of random values; no result depends on it
TANH_BOUND = 0.99  # beyond it a unit's derivative, 1 - tanh^2, is below 2 %
SELF = "encoder_0/self_attention"
GROUPS = {  # group of parameters -> its path in a model with score general
    "cross kernel": "decoder/0/cross_attention/attention/params/kernel",
    "encoder attention": "encoder/0/self_attention",
    "all parameters": "",
}


# --- 1. the size of a dot product ---


def random_products(dim: int, *, source_length: int, samples: int, seed: int) -> dict[str, Arrays]:
    """Measures one query and S keys of unit variance, `samples` times.

    The entries of the weights' gradient, dweights = doutput value^T, have variance 1, so that the
    mean square of |dlogits| = |J dweights| is that of |J|_F.

    Returns:
        {score: {name: [samples]}}
    """
    rng = jax.random.fold_in(jax.random.key(seed), dim)
    rows_by_score = _random_products(dim, source_length, samples, rng)
    return jax.tree.map(np.asarray, rows_by_score)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_products(dim: int, source_length: int, samples: int, rng: Array) -> dict[str, Any]:
    rngs = jax.random.split(rng, 4)
    query = jax.random.normal(rngs[0], (samples, 1, dim))
    key = jax.random.normal(rngs[1], (samples, source_length, dim))
    value = jax.random.normal(rngs[2], (samples, source_length, VALUE_DIM))
    doutput = jax.random.normal(rngs[3], (samples, 1, VALUE_DIM)) / math.sqrt(VALUE_DIM)
    rows_by_score = {}
    for score in PRODUCTS:
        weights = attention_weights(query, key, score=score)
        gradients = attention_gradients(query, key, value, doutput, score=score)
        logits = jax.vmap(functools.partial(get_score(score), {}))(query, key)
        rows = {
            # With S - 1 degrees of freedom its mean is the variance, whatever S is.
            "logit_variance": logit_variance(logits, per_row=True)
            * (source_length / (source_length - 1)),
            "entropy": weight_entropy(weights),
            "jacobian_norm": softmax_jacobian_norm(weights),
            "dlogits_norm": jnp.linalg.norm(gradients.dlogits, axis=-1),
            "dquery_rms": jnp.linalg.norm(gradients.dquery, axis=-1) / math.sqrt(dim),
        }
        rows_by_score[score] = {name: row[:, 0] for name, row in rows.items()}
    return rows_by_score


def limit_of_entropy(count: int, *, samples: int, seed: int) -> float:
    """Returns E H(softmax(z)) for n standard normal z: the limit of scaled dot's as d grows."""
    z = np.random.default_rng(seed).standard_normal((samples, count))
    weights = np.exp(z)
    weights /= weights.sum(-1, keepdims=True)
    return float(-np.sum(weights * np.log(weights), axis=-1).mean())


def learning(config: Reversal, *, strings: int, seed: int, every: int | None = None) -> Arrays:
    """Follows the loss and the cross attention's statistics on a batch that is not trained on."""
    task = config
    batch_rng, loss_rng = jax.random.split(jax.random.key(seed))
    batch = fresh_batch(config, batch_rng, strings)
    look = look_at_cross_attention(task, batch, loss_rng)
    return follow(config, task, look, every=every)


# --- 2. the tanh ---


def growing_kernels(
    scales: Sequence[float], *, dim: int, length: int, samples: int, seed: int
) -> dict[str, Arrays]:
    """Measures additive and scaled dot of projected tokens while their kernels grow.

    Tokens are layer-normalised. Both scores have the same random kernels up to a factor; at scale 1
    the arguments of tanh have variance 1, and so have the logits of scaled dot.

    Returns:
        {score: {name: [scales, samples]}}
    """

    @functools.partial(jax.vmap, in_axes=(None, 0))
    @functools.partial(jax.vmap, in_axes=(0, None))
    def sample(rng: Array, scale: Array) -> dict[str, dict[str, Array]]:
        token_rng, value_rng, doutput_rng, score_rng = jax.random.split(rng, 4)
        tokens = jax.random.normal(token_rng, (2, length, dim))
        tokens = tokens - jnp.mean(tokens, axis=-1, keepdims=True)
        query, key = tokens / jnp.std(tokens, axis=-1, keepdims=True)
        value = jax.random.normal(value_rng, (length, VALUE_DIM))
        doutput = jax.random.normal(doutput_rng, (length, VALUE_DIM)) / math.sqrt(VALUE_DIM)
        initial = Additive().init(score_rng, dim, dim)
        kernels = {name: initial[name] * scale for name in ("query_kernel", "key_kernel")}
        return {
            "additive": _additive({**kernels, "v": initial["v"]}, query, key, value, doutput),
            "scaled": _projected_dot(
                # Additive's have variance 1 / (2 D): each side makes half of the tanh's argument.
                {name: kernel * math.sqrt(2) for name, kernel in kernels.items()},
                query, key, value, doutput,
            ),
        }  # fmt: skip

    rngs = jax.random.split(jax.random.key(seed), samples)
    statistics = jax.jit(sample)(rngs, jnp.asarray(scales, jnp.float32))
    return jax.tree.map(np.asarray, statistics)


def _additive(params: Any, query: Array, key: Array, value: Array, doutput: Array) -> Any:
    score = Additive()
    logits = score(params, query, key)
    q_features, k_features = score.project_query(params, query), score.project_key(params, key)
    units = jnp.tanh(q_features[:, None, :] + k_features[None, :, :])  # [T, S, A]
    gradients = attention_gradients(query, key, value, doutput, score=score, params=params)
    return {
        **_row_means(logits, gradients.dlogits),
        **gradient_norms(gradients.dparams),
        "saturated_units": jnp.mean((jnp.abs(units) > TANH_BOUND).astype(jnp.float32)),
        "largest_logit_of_bound": jnp.max(jnp.abs(logits)) / jnp.sum(jnp.abs(params["v"])),
    }


def _projected_dot(kernels: Any, query: Array, key: Array, value: Array, doutput: Array) -> Any:
    projected = query @ kernels["query_kernel"], key @ kernels["key_kernel"]
    gradients = attention_gradients(*projected, value, doutput, score="scaled")
    dkernels = {
        "query_kernel": query.T @ gradients.dquery,
        "key_kernel": key.T @ gradients.dkey,
    }
    logits = get_score("scaled")({}, *projected)
    return {**_row_means(logits, gradients.dlogits), **gradient_norms(dkernels)}


def _row_means(logits: Array, dlogits: Array) -> dict[str, Array]:
    weights = jax.nn.softmax(logits)
    return {
        "logit_variance": jnp.mean(logit_variance(logits, per_row=True)),
        "entropy": jnp.mean(weight_entropy(weights)),
        "dlogits_norm": jnp.mean(jnp.linalg.norm(dlogits, axis=-1)),
    }


# --- 3. padding ---


def padding(config: Reversal, *, width: int, strings: int, batches: int, seed: int) -> Arrays:
    """Measures the share of weights and gradients at padding, before and after training.

    The strings are the same for every width: only the padding after them differs. `bare` is the
    loss on the shortest strings without padding, `padded` with the padding of training.

    Returns:
        {name: [2, seeds]}
    """
    task = Widened.of(config, width)
    batch_rng, loss_rng, many_rng = jax.random.split(jax.random.key(seed), 3)
    batch = widened(fresh_batch(config, batch_rng, strings), width)
    size = config.train.batch_size or 1
    many = jax.vmap(lambda rng: task.batch(rng, size=size))(jax.random.split(many_rng, batches))
    shortest = dataclasses.replace(config, max_length=config.min_length)
    bare = fresh_batch(shortest, batch_rng, strings)

    def look(params: Any) -> dict[str, Any]:
        captured = capture_gradients(task.loss, params, batch, loss_rng)
        gradient = jax.grad(lambda params, batch: task.loss(params, batch, loss_rng)[0])
        gradients = jax.vmap(gradient, in_axes=(None, 0))(params, many)
        ratios: dict[str, Array] = {}
        for depth in (0, 3, None):
            ratios |= gradient_signal_to_noise(gradients, depth=depth)
        return {
            "loss": captured.loss,
            "bare": task.loss(params, bare, loss_rng)[0],
            "padded": task.loss(params, widened(bare, width), loss_rng)[0],
            "signal_to_noise": {name: ratios[group] for name, group in GROUPS.items()},
            **{
                name: padding_shares(captured.attentions[name], captured.gradients[name], batch)
                for name in (CROSS, SELF)
            },
        }

    return follow(config, task, look, every=config.train.steps)


def padding_shares(captured: Any, gradient: Any, batch: Batch) -> dict[str, Array]:
    """Returns the share of an attention's weights, gradient and keys that is at padding.

    Weights and keys are means over the queries whose output influences the loss.
    """
    source_length = captured.weights.shape[-1]
    padded = ~real_tokens(batch.source_lengths, source_length)
    heads = captured.weights.ndim - 3
    padded = padded.reshape(-1, *(1,) * heads, 1, source_length)
    padded = jnp.broadcast_to(padded, captured.weights.shape)
    rows = jnp.any(gradient.doutput != 0, axis=-1)
    counted = jnp.where(rows[..., None] & padded, 1.0, 0.0)
    sizes = jnp.abs(gradient.dlogits)
    count = jnp.maximum(jnp.sum(rows), 1).astype(sizes.dtype)
    total = jnp.sum(sizes)
    return {
        "weights": jnp.sum(captured.weights * counted) / count,
        "gradient": jnp.sum(jnp.where(padded, sizes, 0)) / jnp.where(total == 0, 1, total),
        "keys": jnp.sum(counted) / (count * source_length),
    }


def widened(batch: Batch, width: int) -> Batch:
    """Returns the same strings, padded to `width`."""
    more = width - batch.source.shape[1]
    letters = jnp.pad(batch.source, ((0, 0), (0, more)))
    return reversal_batch(letters, batch.source_lengths, source_start=False)


@dataclasses.dataclass(frozen=True)
class Widened(Reversal):
    """The task with batches that are padded to a width."""

    width: int = 0

    @classmethod
    def of(cls, task: Reversal, width: int) -> Widened:
        """Returns the task with a width."""
        settings = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
        return cls(**settings, width=width)

    def batch(self, rng: Array, *, size: int, length: int | None = None) -> Batch:
        return widened(super().batch(rng, size=size, length=length), self.width)


# --- 4. curvature ---


def curvature(
    config: Reversal, *, iterations: int, samples: int, strings: int, seed: int
) -> Arrays:
    """Measures the Hessian of one batch's loss before and after training, {name: [2, seeds]}."""
    task = config
    batch_rng, loss_rng, edges_rng, trace_rng = jax.random.split(jax.random.key(seed), 4)
    batch = fresh_batch(config, batch_rng, strings)

    def loss(params: Any) -> Array:
        return task.loss(params, batch, loss_rng)[0]

    def look(params: Any) -> dict[str, Array]:
        edges = hessian_spectrum_edges(loss, params, edges_rng, iterations=iterations)
        trace = hessian_trace(loss, params, trace_rng, samples=samples)
        squares = _sum_of_squared_eigenvalues(loss, params, trace_rng, samples)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return {
            "loss": loss(params),
            "largest": edges.largest,
            "smallest": edges.smallest,
            "largest_residual": edges.residuals[-1],
            "trace": trace.mean,
            "trace_error": trace.standard_error,
            "rms": jnp.sqrt(squares / size),
            "parameters": jnp.asarray(size, jnp.float32),
        }

    return follow(config, task, look, every=config.train.steps)


def _sum_of_squared_eigenvalues(
    loss: Callable[[Any], Array], params: Any, rng: Array, samples: int
) -> Array:
    """E |H z|^2 over random signs z, which is tr H^2."""

    def sample(rng: Array) -> Array:
        leaves, structure = jax.tree.flatten(params)
        signs = [
            jax.random.rademacher(leaf_rng, leaf.shape, leaf.dtype)
            for leaf_rng, leaf in zip(jax.random.split(rng, len(leaves)), leaves, strict=True)
        ]
        product = hessian_vector_product(loss, params, jax.tree.unflatten(structure, signs))
        return gradient_norms(product, depth=0)[""] ** 2

    return jnp.mean(jax.lax.map(sample, jax.random.split(rng, samples)))


def standard_error(values: np.ndarray) -> np.ndarray:
    """Returns the standard error of the mean over the last axis."""
    return np.std(values, axis=-1, ddof=1) / math.sqrt(np.shape(values)[-1])
