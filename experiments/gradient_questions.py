"""What `gradient_analysis.py` computes: one function for each question, arrays by sample or seed.

Everything is drawn from given seeds; nothing is read or written. Samples and seeds are `vmap`ped,
and each program is compiled once a shape.
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
    learning_statistics,
    logit_variance,
    softmax_jacobian_norm,
    weight_entropy,
)
from attention_jax.scores import Additive, get_score
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.reversal.data import reversal_batch
from attention_jax.tasks.reversal.task import ReversalConfig, optimizer, reversal_task
from attention_jax.training.loop import Task, initial_state, train_steps
from attention_jax.training.losses import real_tokens

Array = jax.Array
Arrays = dict[str, Any]  # of NumPy arrays, or of more such
Look = Callable[[Any], dict[str, Array]]  # params of one seed -> {name: float []}

PRODUCTS = ("dot", "scaled")  # the same logits but for the factor 1 / sqrt(d)
VALUE_DIM = 64  # of random values; no result depends on it
TANH_BOUND = 0.99  # beyond it a unit's derivative, 1 - tanh^2, is below 2 %
CROSS, SELF = "decoder_0/cross_attention", "encoder_0/self_attention"
GROUPS = {  # parameters -> where the tree of a model with score general has them
    "cross kernel": "decoder/0/cross_attention/attention/params/kernel",
    "encoder attention": "encoder/0/self_attention",
    "all parameters": "",
}


# --- 1. the size of a dot product ---


def random_products(dim: int, *, source_length: int, samples: int, seed: int) -> dict[str, Arrays]:
    """One query and S keys of unit variance, `samples` times: each sample's row, by score.

    The gradient that comes to the weights, dweights = doutput value^T, has variance 1 each, so that
    the mean square of |dlogits| = |J dweights| is that of |J|_F.
    """
    rng = jax.random.fold_in(jax.random.key(seed), dim)
    found = _random_products(dim, source_length, samples, rng)
    return jax.tree.map(np.asarray, found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_products(dim: int, source_length: int, samples: int, rng: Array) -> dict[str, Any]:
    rngs = jax.random.split(rng, 4)
    query = jax.random.normal(rngs[0], (samples, 1, dim))
    key = jax.random.normal(rngs[1], (samples, source_length, dim))
    value = jax.random.normal(rngs[2], (samples, source_length, VALUE_DIM))
    doutput = jax.random.normal(rngs[3], (samples, 1, VALUE_DIM)) / math.sqrt(VALUE_DIM)
    found = {}
    for score in PRODUCTS:
        weights = attention_weights(query, key, score=score)
        gradients = attention_gradients(query, key, value, doutput, score=score)
        logits = jax.vmap(functools.partial(get_score(score), {}))(query, key)
        rows = {
            # Of S - 1 degrees of freedom: its mean is the variance, whatever S is.
            "logit_variance": logit_variance(logits, per_row=True)
            * (source_length / (source_length - 1)),
            "entropy": weight_entropy(weights),
            "jacobian_norm": softmax_jacobian_norm(weights),
            "dlogits_norm": jnp.linalg.norm(gradients.dlogits, axis=-1),
            "dquery_rms": jnp.linalg.norm(gradients.dquery, axis=-1) / math.sqrt(dim),
        }
        found[score] = {name: row[:, 0] for name, row in rows.items()}
    return found


def gap_density(count: int) -> float:
    """How dense the gap between the two largest of n standard normal numbers is at 0.

        f(0) = n (n - 1) integral phi(x)^2 Phi(x)^(n - 2) dx

    Of logits that are sqrt(d) times such numbers only these two count as d grows: the weights are
    p and 1 - p with p = sigmoid(sqrt(d) gap), |J|_F = 2 p (1 - p), and E |J|_F -> f(0) / sqrt(d).
    """
    x = np.linspace(-9, 9, 20001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([(1 + math.erf(point / math.sqrt(2))) / 2 for point in x])
    integrand = density**2 * below ** (count - 2)
    return float(count * (count - 1) * np.sum(integrand) * (x[1] - x[0]))


def limit_of_entropy(count: int, *, samples: int, seed: int) -> float:
    """E H(softmax(z)), z of n standard normal numbers: scaled dot's as d grows."""
    z = np.random.default_rng(seed).standard_normal((samples, count))
    weights = np.exp(z)
    weights /= weights.sum(-1, keepdims=True)
    return float(-np.sum(weights * np.log(weights), axis=-1).mean())


# --- models of several seeds, looked at before and while they learn ---


def follow(config: ReversalConfig, task: Task, look: Look, *, every: int | None = None) -> Arrays:
    """What `look` sees of every seed at the start and after each `every` steps: [looks, seeds].

    With `every` None nothing is trained.
    """
    optimizer_ = optimizer(config)
    state = initial_state(task, optimizer_, config.loop)
    look_at_all = jax.jit(jax.vmap(look))
    seen = [look_at_all(state.params)]
    if every is not None:
        advance = jax.jit(jax.vmap(functools.partial(train_steps, task, optimizer_, every)))
        for _ in range(config.loop.steps // every):
            state, _ = advance(state)
            seen.append(look_at_all(state.params))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *seen)


def learning(
    config: ReversalConfig, *, strings: int, seed: int, every: int | None = None
) -> Arrays:
    """Loss and the cross attention's statistics on one batch that is not learned from."""
    task = reversal_task(config)
    batch_rng, loss_rng = jax.random.split(jax.random.key(seed))
    batch = _strings(config, batch_rng, strings)

    def look(params: Any) -> dict[str, Array]:
        found = learning_statistics(task.loss, params, batch, loss_rng, depth=0)
        cross = {
            name.removeprefix(f"{CROSS}/"): value
            for name, value in found.items()
            if name.startswith(f"{CROSS}/")
        }
        return {"loss": found["loss"], **cross}

    return follow(config, task, look, every=every)


# --- 2. the tanh ---


def growing_kernels(
    scales: Sequence[float], *, dim: int, length: int, samples: int, seed: int
) -> dict[str, Arrays]:
    """Additive and scaled dot of projected tokens, whose kernels grow: [scales, samples] each.

    Tokens are layer-normalised. The random kernels are the same for both but for a factor; at scale
    1 the tanh's arguments have variance 1, and so have the logits of scaled dot.
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
                # Additive's have variance 1 / (2 D), half of the tanh's argument from either side.
                {name: kernel * math.sqrt(2) for name, kernel in kernels.items()},
                query, key, value, doutput,
            ),
        }  # fmt: skip

    rngs = jax.random.split(jax.random.key(seed), samples)
    found = jax.jit(sample)(rngs, jnp.asarray(scales, jnp.float32))
    return jax.tree.map(np.asarray, found)


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


def padding(config: ReversalConfig, *, width: int, strings: int, batches: int, seed: int) -> Arrays:
    """What of weights and gradients goes to padding, before and after training: [2, seeds].

    The strings are those of any other width: only the padding behind them differs. `bare` is the
    loss on the shortest strings with nothing behind them, `padded` on the same as in training.
    """
    task = reversal_task(config)
    task = task._replace(batch=lambda rng: widened(reversal_task(config).batch(rng), width))
    batch_rng, loss_rng, many_rng = jax.random.split(jax.random.key(seed), 3)
    batch = widened(_strings(config, batch_rng, strings), width)
    many = jax.vmap(task.batch)(jax.random.split(many_rng, batches))
    shortest = dataclasses.replace(config, max_length=config.min_length)
    bare = _strings(shortest, batch_rng, strings)

    def look(params: Any) -> dict[str, Any]:
        found = capture_gradients(task.loss, params, batch, loss_rng)
        gradient = jax.grad(lambda params, batch: task.loss(params, batch, loss_rng)[0])
        gradients = jax.vmap(gradient, in_axes=(None, 0))(params, many)
        ratios: dict[str, Array] = {}
        for depth in (0, 3, None):
            ratios |= gradient_signal_to_noise(gradients, depth=depth)
        return {
            "loss": found.loss,
            "bare": task.loss(params, bare, loss_rng)[0],
            "padded": task.loss(params, widened(bare, width), loss_rng)[0],
            "signal_to_noise": {name: ratios[group] for name, group in GROUPS.items()},
            **{
                name: padding_shares(found.attentions[name], found.gradients[name], batch)
                for name in (CROSS, SELF)
            },
        }

    return follow(config, task, look, every=config.loop.steps)


def padding_shares(seen: Any, gradient: Any, batch: Batch) -> dict[str, Array]:
    """Of one attention to the source: what share of it is at keys that are padding.

    Weights and keys are means over queries whose output the loss depends on.
    """
    source_length = seen.weights.shape[-1]
    padded = ~real_tokens(batch.source_lengths, source_length)
    heads = seen.weights.ndim - 3
    padded = padded.reshape(-1, *(1,) * heads, 1, source_length)
    padded = jnp.broadcast_to(padded, seen.weights.shape)
    rows = jnp.any(gradient.doutput != 0, axis=-1)
    counted = jnp.where(rows[..., None] & padded, 1.0, 0.0)
    sizes = jnp.abs(gradient.dlogits)
    count = jnp.maximum(jnp.sum(rows), 1).astype(sizes.dtype)
    total = jnp.sum(sizes)
    return {
        "weights": jnp.sum(seen.weights * counted) / count,
        "gradient": jnp.sum(jnp.where(padded, sizes, 0)) / jnp.where(total == 0, 1, total),
        "keys": jnp.sum(counted) / (count * source_length),
    }


def widened(batch: Batch, width: int) -> Batch:
    """The same strings, padded to `width`."""
    more = width - batch.source.shape[1]
    return reversal_batch(jnp.pad(batch.source, ((0, 0), (0, more))), batch.source_lengths)


# --- 4. curvature ---


def curvature(
    config: ReversalConfig, *, iterations: int, samples: int, strings: int, seed: int
) -> Arrays:
    """The Hessian of one batch's loss in all parameters, before and after training: [2, seeds]."""
    task = reversal_task(config)
    batch_rng, loss_rng, edges_rng, trace_rng = jax.random.split(jax.random.key(seed), 4)
    batch = _strings(config, batch_rng, strings)

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

    return follow(config, task, look, every=config.loop.steps)


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


def _strings(config: ReversalConfig, rng: Array, count: int) -> Batch:
    """A batch to look at, of another size than those that are learned from."""
    return reversal_task(dataclasses.replace(config, batch_size=count)).batch(rng)


def standard_error(values: np.ndarray) -> np.ndarray:
    """Of the mean over the last axis."""
    return np.std(values, axis=-1, ddof=1) / math.sqrt(np.shape(values)[-1])
