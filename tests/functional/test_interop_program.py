"""A call of `interop.dot_product_attention` outside of `jit` is one program; axes of its masks."""

import jax
import numpy as np
from conformance import quick_jit

import attention_jax as aj
from attention_jax.functional.interop import dot_product_attention

B, T, S, N, K, D = 4, 5, 7, 4, 2, 3  # as many heads as examples
RNG = np.random.default_rng(0)
attend = quick_jit(dot_product_attention)
QUERY = RNG.normal(size=(B, T, N, D)).astype(np.float32)
KEY = RNG.normal(size=(B, S, K, D)).astype(np.float32)


def test_a_call_is_one_program_that_is_traced_once():
    traces = []

    def score(q, k):
        traces.append(q.shape)
        return q @ k.T

    def call(query, lengths, bias):
        return dot_product_attention(
            query, KEY, KEY, bias, aj.causal_mask(1), is_causal=True, score=score,
            key_value_seq_lengths=lengths, local_window_size=3, return_residual=True,
        )  # fmt: skip

    inputs = QUERY, np.array([1, 3, 7, 2]), np.zeros((N, 1, 1), np.float32)
    # Outside of `jit`, each equation of this would be a program of its own.
    equations = jax.make_jaxpr(call)(*inputs).eqns
    assert len(equations) == 1
    call(*inputs)
    once = len(traces)
    call(2 * inputs[0], inputs[1] + 0, inputs[2] + 1)
    assert len(traces) == once + 1  # a user's score is traced on a small tile in every call


def test_an_array_of_three_axes_has_heads_first_as_in_jax_nn():
    mask = RNG.random((N, T, S)) < 0.5
    mask[..., 0] = True
    key = np.repeat(KEY, N // K, axis=2)
    expected = quick_jit(jax.nn.dot_product_attention)(QUERY, key, key, mask=mask)
    got = attend(QUERY, KEY, KEY, mask=mask)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_lengths_in_a_mask_need_the_head_axis():
    lengths = np.array([1, 3, 7, 2], np.int32)
    mask = aj.padding_mask(lengths[:, None])
    got = attend(QUERY, KEY, KEY, mask=mask)
    expected = attend(QUERY, KEY, KEY, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
