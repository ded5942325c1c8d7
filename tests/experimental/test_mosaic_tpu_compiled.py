"""The Pallas TPU kernels, compiled for TPUs that are not there: libtpu is enough, and no TPU.

`scripts/test -m accelerators` installs libtpu and runs these tests.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from score_cases import CORE_SCORES, SCORE_CASES

import attention_jax as aj
from attention_jax.scores import Concat
from benchmarks.compilation import programs, targets

pytestmark = [
    pytest.mark.accelerators,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install -e ".[tpu]"'
    ),
    # libtpu looks for the TPUs of a pod, and JAX for a cache that its topologies do not have.
    pytest.mark.filterwarnings("default"),
]

every_target = pytest.mark.parametrize("target", targets.TARGETS)
SCORES = {name: SCORE_CASES[name].score for name in CORE_SCORES} | {
    "additive": aj.Additive(hidden_dim=programs.DIM),
    "concat": Concat(hidden_dim=programs.DIM),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("score", SCORES)
@every_target
def test_every_score_and_dtype(target, score, dtype):
    function, args = programs.attention(
        target, SCORES[score], length=256, dtype=jnp.dtype(dtype), blocks=(128, 128)
    )
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text.count("tpu_custom_call") == 2


def test_every_mask_with_statistics():
    """A length that is no multiple of a tile, and heads."""
    array = functools.partial(targets.array, dtype=jnp.bfloat16, device=targets.device("v5e"))
    mask = aj.local_mask(100, 3) & aj.padding_mask(jnp.array(150), jnp.array(170))
    mask = mask & aj.segment_mask(jnp.arange(300) // 70, jnp.arange(300) // 90)

    def loss(query, key, value):
        output, statistics = aj.attention(
            query, key, value, mask=mask, return_statistics=True, implementation="mosaic_tpu",
            block_sizes=aj.BlockSizes(query=128, key=128),
        )  # fmt: skip
        return output.astype(jnp.float32).sum() + statistics.logsumexp.sum()

    tokens = array((2, 300, 64))
    args = tokens, tokens, array((2, 300, 128))
    jax.jit(jax.grad(loss, argnums=range(3))).lower(*args).compile()


@pytest.mark.parametrize("score", [programs.distance, programs.bilinear_network])
def test_scores_of_a_user(score):
    dim = programs.DIM
    params = {"forms": 8 * [jnp.zeros((dim, dim))], "weights": 8 * [jnp.zeros((1, 1))]}
    function, args = programs.attention(
        "v5e", score, length=256, dtype=jnp.float32, blocks=(128, 128),
        params=params if score is programs.bilinear_network else None,
    )  # fmt: skip
    jax.jit(function).lower(*args).compile()


def test_memory_is_linear():
    def temporary(length):
        function, args = programs.attention(
            "v5e", "scaled", length=length, dtype=jnp.bfloat16, blocks=(512, 512)
        )
        return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary(16384) <= 8 * 2**20
