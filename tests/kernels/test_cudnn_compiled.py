"""cuDNN's attention compiled for an H100: one forward call, and one backward call for gradients."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from accelerator_targets import custom_calls, gradient_on_h100

import attention_jax as aj
from benchmarks.compilation import targets

pytestmark = pytest.mark.accelerators

B, N, T, D = 2, 4, 512, 64
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
MASKS = {
    "none": lambda lengths: None,
    "causal": lambda lengths: aj.causal_mask(),
    "window": lambda lengths: aj.local_mask(100, 0),
    "padding": aj.padding_mask,
    "causal padding": lambda lengths: aj.causal_mask() & aj.padding_mask(lengths),
}
SCORES = ("dot", "scaled", "general", "cosine", "distance")


@pytest.mark.parametrize(
    ("score_name", "mask_name"),
    [("scaled", mask) for mask in MASKS]
    + [(score, "causal") for score in SCORES if score != "scaled"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_call_forward_and_one_backward(score_name, mask_name, dtype):
    if (score_name, dtype) == ("distance", "float16"):
        pytest.skip("the squares of a distance stay float32, which cuDNN does not take")
    tokens = jax.ShapeDtypeStruct((B, N, T, D), jnp.dtype(dtype))
    gradient, arguments, attend = gradient_on_h100(
        "cudnn", aj.get_score(score_name), tokens, MASKS[mask_name], D
    )
    forward = attend.lower(*arguments).compile()
    assert [call for call in custom_calls(forward) if "fmha" in call] == [FORWARD]
    gradient = gradient.lower(*arguments).compile()
    calls = collections.Counter(call for call in custom_calls(gradient) if "fmha" in call)
    assert calls == {FORWARD: 1, BACKWARD: 1}
    # No array of T x S: the temporaries are copies of the inputs and their gradients.
    table = B * N * T * T * 2
    assert gradient.memory_analysis().temp_size_in_bytes < 3 * table, "a table [T, S] is stored"


@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(8, 8), (8, 2), (8, 1)])
def test_a_model_pays_no_transposition_and_no_copy_of_keys(num_heads, num_key_heads):
    """Its arrays are [B, T, N, H]: the program is that of `jax.nn` alone."""
    if reason := targets.missing_compiler(targets.H100):
        pytest.skip(reason)
    array = functools.partial(
        targets.array, dtype=jnp.bfloat16, device=targets.device(targets.H100)
    )
    query, key = array((B, T, num_heads, D)), array((B, T, num_key_heads, D))

    def compiled(attend):
        def loss(query, key, value, doutput):
            return jnp.sum((attend(query, key, value) * doutput).astype(jnp.float32))

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return gradient.lower(query, key, key, query).compile()

    options = {"is_causal": True, "implementation": "cudnn"}
    ours, bare = (
        compiled(functools.partial(module.dot_product_attention, **options))
        for module in (aj.interop, jax.nn)
    )
    for program in (ours, bare):
        assert not re.search(r"= bf16\S* (transpose|copy)\(", program.as_text())
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (ours, bare)]
    assert sizes[0] <= sizes[1]
    # The gradients of the keys are those of the key heads.
    assert f"bf16[{B},{num_key_heads},{T},{D}]" in ours.as_text()
