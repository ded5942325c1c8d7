"""Mistaken arguments of the analysis: each raises a ValueError that names the argument.

Those of most statistics, of `attention_rollout` and of `attention_gradients` are in
`test_wrong_calls.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import analysis

T, S = 5, 7
PAIRS = np.full((2, T, S), 1 / S, np.float32)
LAYERS = np.full((3, 2, T, T), 1 / T, np.float32)  # three layers, two heads
TOKENS = (np.ones((T, 4)), np.ones((S, 4)), np.ones((S, 3)))
PAGE = {"weights": np.ones((1, T, S))}
RNG = jax.random.key(0)


def cube(x):
    return jnp.sum(x**3)


# (function, arguments, keyword arguments, what the error names)
MISTAKES = [
    # capture
    (analysis.capture, (3,), {}, "function must be a function"),
    (analysis.capture, (nnx.Linear, 2), {}, "got the class Linear"),
    (analysis.capture, (cube, jnp.ones(3)), {}, "function must call attention"),
    (analysis.capture, (aj.attention_weights, PAIRS, PAIRS), {}, "it calls none"),
    (analysis.capture_gradients, (cube, jnp.ones(3)), {}, "loss must call attention"),
    (analysis.capture_gradients, (lambda x: x, jnp.ones(3)), {}, "loss must be one float"),
    (analysis.capture_gradients, (lambda x: [cube(x)], jnp.ones(3)), {}, "loss must be one float"),
    (analysis.capture_gradients, (cube, {"n": jnp.arange(3)}), {}, "params n must be floating"),
    # gradients
    (analysis.logit_scale_sweep, (*TOKENS, np.ones((T, 3)), np.ones((2, 2))), {}, "scales"),
    (analysis.logit_scale_sweep, (*TOKENS, np.ones((T, 3)), np.arange(3)), {}, "scales"),
    (analysis.softmax_jacobian_norm, (np.float32(1),), {}, "weights .*got a scalar"),
    (analysis.gradient_norms, ({"a": {"b": np.ones(2, int)}},), {}, "gradients a/b"),
    (analysis.gradient_norms, ({"a": np.ones(2)},), {"depth": -1}, "depth"),
    (analysis.gradient_signal_to_noise, ({"a": jnp.ones((1, 2))},), {}, "gradients .*at least 2"),
    (analysis.gradient_signal_to_noise, ([jnp.ones(3), jnp.ones(2)],), {}, "gradients .*the same"),
    # statistics
    (analysis.attention_summary, (PAIRS,), {"bound": 2}, "bound"),
    # rollout
    (analysis.cross_rollout, (LAYERS[0], LAYERS[0]), {}, "encoder_rollout"),
    (analysis.cross_rollout, (LAYERS[0, 0], LAYERS[0, 0]), {}, "cross_weights"),
    # curvature
    (analysis.hessian_trace, (cube, {}, RNG), {}, "params must hold at least one number"),
    (analysis.hessian_trace, (cube, [jnp.arange(3)], RNG), {}, r"params\[0\] must be floating"),
    (analysis.hessian_trace, (cube, jnp.ones(3), 3), {}, "rng must be one PRNG key"),
    (analysis.hessian_trace, (cube, jnp.ones(3), RNG), {"samples": 0}, "samples"),
    (analysis.hessian_spectrum_edges, (cube, jnp.ones(3), RNG), {"iterations": 0}, "iterations"),
    (analysis.hessian_spectrum_edges, (lambda x: x, jnp.ones(3), RNG), {}, r"loss\(params\)"),
    (analysis.hessian_vector_product, (cube, jnp.ones(3), jnp.ones(2)), {}, "vector"),
    (analysis.hessian_vector_product, (cube, jnp.ones(3), [jnp.ones(3)]), {}, "vector"),
    # cost
    (analysis.score_cost, ("general", 3, 2.5), {}, "key_dim"),
    (analysis.attention_memory, ("dot", -1, 3), {}, "length"),
    # the page
    (analysis.view, (np.ones((T, S)),), {}, "attentions must be what capture"),
    (analysis.view, ({"a": {"wieghts": np.ones((1, T, S))}},), {}, "wieghts"),
    (analysis.view, ({"a": {"mask": np.ones((1, T, S))}},), {}, "weights, logits or dlogits"),
    (analysis.view, ({"a": {"weights": np.ones((T, S))}},), {}, "example"),
    (analysis.view, ({"a": PAGE},), {"example": 1}, "example"),
    (analysis.view, ({"a": {**PAGE, "mask": np.ones((1, T, T))}},), {}, "arrays of one shape"),
    (analysis.view, ({"a": {"weights": np.ones((1, T, 0))}},), {}, "without an axis of 0"),
    (analysis.view, ({"a": PAGE}, "word"), {}, "tokens .*got 'word'"),
    (analysis.view, ({"a": PAGE}, list("abcdef")), {}, "tokens must be 1 to 5 labels"),
    (analysis.view, ({"a": PAGE}, {"b*": ("x", "y")}), {}, "tokens .*fits 'a'"),
    (analysis.view, ({"a": PAGE},), {"precision": "int8"}, "precision"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "expected"), MISTAKES)
def test_the_argument_is_named(function, arguments, options, expected):
    with pytest.raises(ValueError, match=expected):
        function(*arguments, **options)


def test_a_capture_without_matrices_makes_no_page():
    captured = analysis.capture(aj.attention, *TOKENS, matrices=False)
    with pytest.raises(ValueError, match="matrices=True"):
        analysis.view(captured)
