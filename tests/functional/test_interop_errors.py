"""Errors of `interop.dot_product_attention` name the argument, what was expected and what came."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import ScaledDot
from attention_jax.functional.interop import dot_product_attention

B, T, S, N, K, D = 2, 5, 7, 6, 3, 11


def ones(*shape):
    return np.ones(shape, np.float32)


ERRORS = {
    "heads": ({"query": ones(B, N, T, D)}, "N a multiple of the 3 heads of key"),
    "mask_swapped": ({"mask": np.ones((B, T, N, K), bool)}, "mask must broadcast to"),
    "bias": ({"bias": ones(B, N, S, T)}, r"bias must broadcast to \[2, 6, 5, 7\].*5\]"),
    "mask": ({"mask": ones(T, S)}, "mask must be boolean"),
    "key": ({"key": ones(3, S, K, D)}, r"query and key must be.*got \[2, 5.*\[3, 7"),
    "value": ({"value": ones(B, S, 2, D)}, r"value must be \[\*B, S, K, Dv\].*\[2, 7, 2, 11"),
    "feature": ({"key": ones(B, S, K, 4)}, "to match score ScaledDot"),
    "params": ({"score": "additive"}, "params must be"),
    "axis": ({"score": "general", "params": {"kernel": ones(K, D, D)}}, "kernel.*broadcast"),
    "scale": ({"scale": 0.3, "score": "dot"}, "scale must be None.*got 0.3 with score Dot"),
    "two_scales": ({"scale": 0.3, "score": ScaledDot(0.3)}, "scale must be None"),
    "scales": ({"scale": ones(N)}, "scale must be None, or one number"),
    "xla": ({"implementation": "xla"}, "one of reference.*got jax.nn's 'xla': leave it out"),
    "unknown": ({"implementation": "fast"}, "implementation must be None or one of"),
    "window": ({"local_window_size": (1, 2, 3)}, r"local_window_size must be.*got \(1, 2, 3\)"),
    "negative": ({"local_window_size": (-1, 2)}, "each at least 0"),
    "length": ({"query_seq_lengths": np.array(3)}, r"query_seq_lengths must be integers \[2\]"),
    "lengths": ({"key_value_seq_lengths": "all"}, "key_value_seq_lengths must be an array; got s"),
    "text": ({"query": "tokens"}, "query must be an array; got str"),
    "list": ({"scale": [0.3]}, r"scale must be None, or one number.*got \[0.3\]"),
    "set": ({"bias": {0.5}}, "bias must be an array; got set"),
    "float": ({"key_value_seq_lengths": ones(B)}, r"integers \[2\]; got float32 \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument(case):
    arguments, message = ERRORS[case]
    arrays = {"query": ones(B, T, N, D), "key": ones(B, S, K, D), "value": ones(B, S, K, D)}
    with pytest.raises(ValueError, match=message):
        dot_product_attention(**(arrays | arguments))


def test_differs_refused_arguments():
    theirs, ours = (
        functools.partial(jax.eval_shape, function)
        for function in (jax.nn.dot_product_attention, dot_product_attention)
    )
    query, key, value = ones(B, T, N, D), ones(B, S, K, D), ones(B, S, K, 13)
    with pytest.raises(ValueError, match="value shape"):
        theirs(query, key, value)
    assert dot_product_attention(query, key, value).shape == (B, T, N, 13)
    half = query.astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="query dtype"):
        theirs(half, key, key)
    assert ours(half, key, key).dtype == jnp.bfloat16
    two_axes = ones(5, 3)
    assert theirs(two_axes, two_axes, two_axes).shape == (5, 3)
    with pytest.raises(ValueError, match=r"query must be \[B, T, N, Dq\].*got \[5, 3\]"):
        ours(two_axes, two_axes, two_axes)
    whole = np.ones((T, S), np.int32)
    with jax.numpy_dtype_promotion("standard"):
        theirs(query, key, key, whole)
    with pytest.raises(ValueError, match="bias must be floating-point"):
        ours(query, key, key, whole)
