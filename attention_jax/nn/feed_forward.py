"""The feed-forward layer of a block."""

import functools
from typing import Any, Literal

import jax
from flax import nnx

from attention_jax.core.arrays import any_array
from attention_jax.core.checks import check_choice, check_integer
from attention_jax.functional.checks import check_axes
from attention_jax.nn.parameters import check_dtypes, check_rngs

Array = jax.Array
Activation = Literal["relu", "gelu", "swiglu"]


class FeedForward(nnx.Module):
    """A network with one hidden layer, applied to every position alike.

        relu, gelu:  FFN(x) = f(x W_1 + b_1) W_2 + b_2
        swiglu:      FFN(x) = (swish(x W_1) * (x W_3)) W_2,  swish(z) = z sigmoid(z)

    Args:
        dim: size of x.
        hidden_dim: size of the hidden layer.
        activation: "relu", "gelu" or "swiglu", which has one more kernel and no biases.
        rngs: the stream of the initial parameters.
        options: `dtype`, `kernel_init` and `bias_init`, as in `nnx.Linear`.

    Raises:
        ValueError: there is no such activation, or a size is below 1.

    >>> import jax.numpy as jnp
    >>> feed_forward = FeedForward(4, 8, activation="swiglu", rngs=nnx.Rngs(0))
    >>> feed_forward(jnp.zeros((2, 4))).tolist()  # without biases, 0 stays 0
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]

    Source: Vaswani et al. 2017, equation 2; Hendrycks and Gimpel 2016 (gelu, exact); Shazeer 2020,
    equation 6 (swiglu; their W, V are W_1, W_3).
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = "relu",
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_choice("activation", activation, Activation)
        check_dtypes(**{name: dtype for name, dtype in options.items() if "dtype" in name})
        check_rngs(rngs)
        for name, size in (("dim", dim), ("hidden_dim", hidden_dim)):
            check_integer(name, size)
        gated = activation == "swiglu"
        self.activation = activation
        linear: Any = functools.partial(nnx.Linear, use_bias=not gated, rngs=rngs, **options)
        self.hidden = linear(dim, hidden_dim)
        self.gate = linear(dim, hidden_dim) if gated else None
        self.output = linear(hidden_dim, dim)

    def __call__(self, x: Array) -> Array:
        """x [..., dim] -> [..., dim]."""
        check_axes("x", any_array("x", x), (self.hidden.in_features,), None)
        hidden = self.hidden(x)
        if self.gate is not None:
            return self.output(nnx.silu(hidden) * self.gate(x))
        if self.activation == "gelu":
            return self.output(nnx.gelu(hidden, approximate=False))
        return self.output(nnx.relu(hidden))
