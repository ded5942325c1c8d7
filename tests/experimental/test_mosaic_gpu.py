"""The Mosaic GPU kernels, interpreted on the CPU with memory that starts as NaN.

`test_mosaic_gpu_compiled.py` compiles them for an H100. Nothing runs on a GPU.
"""

import jax
import jax.numpy as jnp
import kernel_cases
import pytest
from kernel_cases import BFLOAT16, check, results

import attention_jax as aj
from attention_jax.experimental import mosaic_gpu
from attention_jax.scores import Concat

NAME = "mosaic_gpu"
# One example, because the interpreter computes them one by one; two steps of loops over features.
B, T, S, DQ, DK, A, DV = 1, 67, 71, 5, 7, 6, 2


def window_mask():
    """Queries 0 to 3 have no keys; nor do those from 65 on."""
    padding = aj.padding_mask(jnp.array([69]), jnp.array([65]))
    return aj.local_mask(9, 2) & aj.causal_mask(jnp.array(-4)) & padding


def draw(scale=1.0, dtype=jnp.float32, score=None):
    """(score, (query, key, value, params), cotangent of the output)"""
    score = score or aj.Additive(hidden_dim=A)
    (*tokens, params), doutput = kernel_cases.draw(score, (T, S), (DQ, DK, DV), dtype)
    params = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else scale * leaf, params)
    return score, (*(array[:B] for array in tokens), params), doutput[:B]


def test_statistics_under_a_mask(interpreted):
    score, arrays, doutput = draw()
    check(NAME, score, window_mask(), arrays, doutput)


# 6: near the bound, where a product of two denominators is 2^126; 200: exponentials overflow.
@pytest.mark.slow
@pytest.mark.parametrize("scale", [6.0, 200.0])
def test_large_features(interpreted, scale):
    score, arrays, doutput = draw(scale)
    check(NAME, score, None, arrays, doutput, statistics=False)


@pytest.mark.slow
def test_bfloat16_and_concat(interpreted):
    score, arrays, doutput = draw(dtype=jnp.bfloat16, score=Concat(hidden_dim=A))
    check(NAME, score, window_mask(), arrays, doutput, BFLOAT16, statistics=False)


@pytest.mark.slow
def test_the_interpreter_finds_no_races(capfd):
    interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    score, arrays, doutput = draw()
    races = interpreter.InterpretGPUParams(detect_races=True)
    with interpreter.force_gpu_interpret_mode(races):
        jax.block_until_ready(results(NAME, score, window_mask(), arrays, doutput))
    assert "RACE" not in "".join(capfd.readouterr()).upper()


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "nvidia_generation", lambda: 8.6)
    score, (query, key, value, params), _ = draw()
    query = query[:, :9]  # a shape of its own: what was traced is not asked again
    with pytest.raises(NotImplementedError, match=r"of compute capability 9.0; got 8.6"):
        aj.attention(query, key, value, score=score, params=params, implementation=NAME)
