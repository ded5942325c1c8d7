"""Mistaken arguments of the functions in `functional/`: a call, and the argument that is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax import analysis
from attention_jax.functional.centers import predicted_centers, reversed_centers
from attention_jax.functional.memory import key_and_value, remember

B, T, S, D, DV, N, K = 2, 5, 7, 4, 3, 6, 3


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


TOKENS = {"query": ones(B, T, D), "key": ones(B, S, D), "value": ones(B, S, DV)}
HEADS = {"query": ones(B, T, N, D), "key": ones(B, S, K, D), "value": ones(B, S, K, D)}
KERNEL = {"coverage_kernel": ones(D), "score": "dot"}
P, W, RNG = ones(B, T, S), {"centers": ones(B, T), "radius": 1}, jax.random.key(0)
MEMORY = remember("dot", None, TOKENS["key"], TOKENS["value"], query_dim=D)
ADDITIVE = aj.Additive(5).init(RNG, D, D)


def of(function, arguments, *changes):
    """A row for each (changed arguments, the argument that is named, what else is said)."""
    for changed, *message in changes:
        yield functools.partial(function, **arguments | changed), *message


def calls(*rows):
    """The same for functions whose arguments have no defaults."""
    return rows


CASES = [
    *of(
        aj.attention,
        TOKENS,
        ({"query": "tokens"}, "query", "got str"),
        ({"query": ones(D)}, "query"),
        ({"query": ones(B, T, 0)}, "query", "feature"),
        ({"query": ones(B, T, D, dtype=int)}, "query", "floating-point"),
        ({"key": ones(B, S, 3)}, "key", "to match score ScaledDot"),
        ({"key": ones(3, S, D)}, "key", "batch"),
        ({"key": MEMORY.keys, "score": aj.Additive(5), "params": ADDITIVE}, "key", "features"),
        ({"value": ones(B, T, DV)}, "value", "to match key"),
        ({"value": ones(3, S, DV)}, "value", "batch"),
        ({"value": ones(DV)}, "value"),
        ({"score": "additiv"}, "score", "did you mean 'additive'"),
        ({"score": "additive"}, "params"),
        ({"score": "general", "params": {"kernel": ones(3, D)}}, "params", "kernel"),
        ({"score": "general", "params": {"kernel": ones(3, D, D)}}, "params", "broadcast"),
        ({"mask": ones(T, S)}, "mask", "boolean"),
        ({"mask": ones(T, T, dtype=bool)}, "mask", "broadcast"),
        ({"bias": ones(3, T, S)}, "bias", "broadcast"),
        ({"normalizer": "softmin"}, "normalizer"),
        ({"normalizer": "softmax(sink=True)"}, "normalizer_params"),
        ({"normalizer_params": {"sink": ones()}}, "normalizer_params"),
        ({"dropout_rate": 1.0, "dropout_rng": RNG}, "dropout_rate"),
        ({"dropout_rate": 0.5}, "dropout_rng"),
        ({"dropout_rate": 0.5, "dropout_rng": 0.5}, "dropout_rng"),
        ({"dropout_rate": 0.5, "dropout_rng": jax.random.split(RNG, 3)}, "dropout_rng", r"\[2\]"),
        ({"implementation": "fast"}, "implementation"),
        ({"block_sizes": (2, 3)}, "block_sizes"),
        ({"normalizer": "entmax", "return_statistics": True}, "return_statistics"),
    ),
    *of(
        aj.local_attention,
        TOKENS | W,
        ({"centers": ones(3, T)}, "mask centers"),
        ({"centers": ones(B, T, dtype=bool)}, "centers"),
        ({"centers": 1.0}, "centers"),
        ({"radius": -1}, "radius"),
        ({"radius": 1.5}, "radius"),
        ({"sigma": 0.0}, "sigma", "greater than 0"),
        ({"sigma": ones(2, 1, 1)}, "bias sigma"),
    ),
    *of(
        aj.coverage_attention,
        TOKENS | KERNEL,
        ({"coverage_kernel": ones(S)}, "coverage_kernel"),
        ({"coverage_kernel": ones(1)}, "coverage_kernel"),
        ({"coverage_kernel": ones(3, D)}, "coverage_kernel"),
        ({"coverage_kernel": None}, "coverage_kernel"),
        ({"coverage": ones(B, 1)}, "coverage"),
        ({"coverage": ones(1, B, S)}, "coverage"),
        ({"coverage": ones(B, S, dtype=int)}, "coverage", "floating-point"),
        ({"params": {"v": ones(2)}}, "params"),
    ),
    *of(
        aj.monotonic_attention,
        TOKENS | {"score": "dot"},
        ({"offset": ones(3)}, "offset"),
        ({"offset": ones(2, dtype=int)}, "offset", "floating-point"),
        ({"noise_rng": 0.5}, "noise_rng"),
        ({"noise_scale": ones(1, 1)}, "noise_scale"),
        ({"initial": ones(5)}, "initial"),
        ({"hard": 1}, "hard"),
        ({"return_weights": "all"}, "return_weights"),
        ({"key": ones(B, S, 3)}, "key"),
    ),
    *of(
        aj.interop.dot_product_attention,
        HEADS,
        ({"query": ones(B, T, N + 1, D)}, "query", "multiple of the 3 heads"),
        ({"query": ones(5, 3), "key": ones(5, 3), "value": ones(5, 3)}, "query and key"),
        ({"key": ones(3, S, K, D)}, "query and key"),
        ({"key": ones(B, S, K, 3), "value": ones(B, S, K, D)}, "key", "to match score"),
        ({"value": ones(B, S, 2, D)}, "value"),
        ({"mask": ones(B, K, T, S, dtype=bool)}, "mask", "broadcast"),
        ({"mask": "causal"}, "mask", "got str"),
        ({"mask": aj.padding_mask(np.array([3, 4]))}, "mask key_lengths", "all 2 batch axes"),
        ({"bias": ones(K, T, S)}, "bias", "broadcast"),
        ({"bias": ones(T, S, dtype=int)}, "bias", "float"),
        ({"bias": {0.5}}, "bias", "got set"),
        ({"score": "additive"}, "params"),
        ({"score": "general", "params": {"kernel": ones(K, D, D)}}, "params", "broadcast"),
        ({"score": "general", "params": {"kernel": "big"}}, "params", "kernel.*got str"),
        ({"scale": 0.3, "score": "dot"}, "scale"),
        ({"scale": 0.3, "score": aj.ScaledDot(0.3)}, "scale"),
        ({"scale": ones(N)}, "scale"),
        ({"implementation": "xla"}, "implementation"),
        ({"local_window_size": (1, 2, 3)}, "local_window_size"),
        ({"local_window_size": (-1, 2)}, "local_window_size"),
        ({"query_seq_lengths": np.array(3)}, "query_seq_lengths"),
        ({"key_value_seq_lengths": "all"}, "key_value_seq_lengths", "got str"),
        ({"key_value_seq_lengths": ones(B)}, "key_value_seq_lengths", "integers"),
    ),
    *of(
        aj.interop.flax_attention_fn("additive"),
        HEADS,
        ({}, "params"),
        ({"query": ones(T, D)}, "query and key"),
    ),
    *of(
        aj.interop.flax_attention_fn(),
        HEADS | {"dropout_rng": RNG},
        ({"dropout_rate": 0.5, "dropout_rng": None}, "dropout_rng"),
        ({"dropout_rate": 1.5}, "dropout_rate"),
    ),
    *of(
        analysis.attention_gradients,
        TOKENS | {"doutput": ones(B, T, DV)},
        ({"doutput": ones(B, T, D)}, "doutput", r"\[2, 5, 3\].*got \[2, 5, 4\]"),
        ({"doutput": ones(B, T, DV, dtype=int)}, "doutput", "floating-point"),
        ({"score": "general"}, "params"),
    ),
    *calls(
        (lambda: aj.interop.flax_attention_fn("aditive"), "score"),
        (lambda: aj.interop.flax_attention_fn(implementation="xla"), "implementation"),
        (lambda: aj.coverage_loss(ones(S)), "weights"),
        (lambda: aj.coverage_loss(ones(T, S, dtype=int)), "weights"),
        (lambda: aj.coverage_loss(ones(T, S), ones(T)), "coverage"),
        (lambda: aj.monotonic_weights(P > 0), "probabilities"),
        (lambda: aj.monotonic_weights(P[0, 0]), "probabilities"),
        (lambda: aj.monotonic_weights(P, P[0]), "initial"),
        (lambda: aj.monotonic_weights(P, ones(S, dtype=int)), "initial"),
        (lambda: aj.monotonic_weights(jnp.asarray(-3.5 * P)), "probabilities", r"got -3.5 \("),
        (lambda: aj.monotonic_weights(np.inf * P), "probabilities", r"got inf \("),
        (lambda: aj.hard_monotonic_weights(1.25 * P), "probabilities", r"got 1.25 \("),
        (lambda: aj.hard_monotonic_positions(P.astype(jnp.bfloat16) * 2), "probabilities"),
        (lambda: aj.hard_monotonic_positions(P, 0.5), "start"),
        (lambda: aj.hard_monotonic_positions(P, np.arange(3)), "start"),
        (lambda: predicted_centers(ones(B, T, D), {"kernel": ones(D, 2)}, 7), "params"),
        (lambda: predicted_centers(ones(B, T, 3), {"kernel": ones(D, 2), "v": ones(2)}, 7), "par"),
        (lambda: predicted_centers(ones(T, D), {"kernel": ones(D, 2), "v": ones(2)}, 7.0), "sou"),
        (lambda: reversed_centers(-1, 7), "target_length"),
        (lambda: reversed_centers(3, 7.0), "source_lengths"),
        (lambda: remember("dot", None, TOKENS["key"], ones(B, T, DV), query_dim=D), "value"),
        (lambda: remember("dot", None, ones(D), None, query_dim=D), "key"),
        (lambda: remember("dot", None, ones(S, D, dtype=int), None, query_dim=D), "key"),
        (lambda: remember("additive", None, TOKENS["key"], None, query_dim=D), "params"),
        (lambda: key_and_value(MEMORY, TOKENS["value"]), "value", "None where key is a Memory"),
    ),
]


@pytest.mark.parametrize(("call", "argument", "said"), [(*case, "")[:3] for case in CASES])
def test_the_mistaken_argument_is_named(call, argument, said):
    with pytest.raises(ValueError, match=f"^{argument}.*{said}") as caught:
        call()
    # Under `jit` JAX adds a note of its own.
    assert "\n" not in str(caught.value).split("\n-----")[0]
