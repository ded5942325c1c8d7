"""The Pallas TPU kernels, interpreted on the CPU with memory that starts as NaN, and their limits.

`test_mosaic_tpu_compiled.py` compiles them for TPUs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import BFLOAT16, check, draw
from oracles import normal
from score_cases import CORE_SCORES, SCORE_CASES, slow_unless

import attention_jax as aj
from attention_jax.experimental.mosaic_tpu.tanh_tiles import tanh_tile, tanh_tile_vjp

NAME = "mosaic_tpu"
T, S, DV = 130, 140, 3  # two tiles each way
LENGTHS = aj.padding_mask(jnp.array([137, 9]), jnp.array([T, 61]))
MASKS = {
    "none": None,
    "windows": aj.local_mask(9, 2) & aj.causal_mask(-4) & LENGTHS,
    "segments": aj.segment_mask(jnp.arange(T) // 50, jnp.arange(S)[::-1] // 45)
    & aj.local_mask(jnp.array([60, 90]), 30)
    & LENGTHS,
}


def arrays_of(name, dtype=jnp.float32):
    """(score, arrays, cotangent of the output)"""
    case = SCORE_CASES[name]
    return case.score, *draw(case.score, (T, S), (case.query_dim, 11, DV), dtype)


FAST = {("own", "segments")}


@pytest.mark.parametrize(
    ("score_name", "mask_name"),
    slow_unless(
        FAST, [(s, m) for s in SCORE_CASES for m in (MASKS if s in CORE_SCORES else ["windows"])]
    ),
)
def test_every_score_and_mask(interpreted, score_name, mask_name):
    score, arrays, doutput = arrays_of(score_name)
    check(NAME, score, MASKS[mask_name], arrays, doutput)


@pytest.mark.slow
@pytest.mark.parametrize("score_name", ["softcap", "additive", "distance"])
def test_bfloat16(interpreted, score_name):
    score, arrays, doutput = arrays_of(score_name, jnp.bfloat16)
    check(NAME, score, MASKS["windows"], arrays, doutput, BFLOAT16)


@pytest.mark.slow
def test_two_cores_do_not_race(capfd):
    """Tiles of queries may be computed at the same time."""
    score, (query, key, value, _), _ = arrays_of("dot")
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    with pltpu.force_tpu_interpret_mode(params), jax.disable_jit():
        output = aj.attention(
            query[0], key[0], value[0], score=score, implementation=NAME,
            block_sizes=aj.BlockSizes(128, 128),
        )  # fmt: skip
        jax.block_until_ready(output)
    assert "RACE" not in "".join(capfd.readouterr()).upper()


# --- what JAX lowers for a TPU without one, and what it cannot ---


def lower_for_a_tpu(dtype=jnp.float32, **options):
    """The text of the gradient of attention, lowered for a TPU; nothing is compiled."""
    tokens = jnp.ones((2, 128, 8), dtype)

    def loss(tokens):
        return aj.attention(tokens, tokens, tokens, implementation=NAME, **options).sum()

    return jax.jit(jax.grad(loss)).trace(tokens).lower(lowering_platforms=("tpu",)).as_text()


def test_float32_lowers_where_jax_enables_float64():
    # The tests' strict promotion is for programs of one width.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        lower_for_a_tpu(mask=aj.causal_mask())


def test_more_keys_than_fit_are_refused():
    tokens = jax.ShapeDtypeStruct((2**17, 128), jnp.float32)

    def loss(query, key):
        return aj.attention(query, key, key, implementation=NAME).sum()

    with pytest.raises(NotImplementedError, match=r"gradients of all keys.*: 256 MiB, more"):
        jax.jit(jax.grad(loss, argnums=1)).trace(tokens, tokens)


def test_what_one_precision_cannot_lower_is_not_remembered_for_others():
    with jax.default_matmul_precision("high"):
        if jax.__version_info__ < (0, 12):  # which lowers "high", too
            with pytest.raises(NotImplementedError, match="HIGH"):
                lower_for_a_tpu()
        assert "attention_backward" in lower_for_a_tpu(dtype=jnp.bfloat16)
    lower_for_a_tpu()


# --- the tiles of additive attention, at every kind of tile size ---


def in_kernel(function, *args):
    """The function in a kernel that reads all arguments at once."""
    shapes = jax.eval_shape(function, *args)

    def kernel(*refs):
        results = function(*(ref[...] for ref in refs[: len(args)]))
        for ref, result in zip(refs[len(args) :], jax.tree.leaves(results), strict=True):
            ref[...] = result

    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    leaves = jax.tree.leaves(shapes)
    return pl.pallas_call(kernel, out_shape=leaves, interpret=interpret)(*args)


@pytest.mark.parametrize(
    ("t", "s", "features"),
    slow_unless([(128, 256, 6)], [(128, 256, 6), (256, 384, 1), (128, 128, 130)]),
)
def test_against_float64(t, s, features):
    arrays = [normal(*shape) for shape in ((features,), (t, features), (s, features), (t, s))]
    v, a, b, d = map(np.float64, arrays)
    h = np.tanh(a[:, None] + b[None])  # [t, s, A]
    slopes = v * (1 - h**2) * d[..., None]
    (logits,) = in_kernel(tanh_tile, *arrays[:3])
    np.testing.assert_allclose(logits, h @ v, rtol=2e-6, atol=1e-5)
    expected = np.einsum("ij,ijf->f", d, h), slopes.sum(1), slopes.sum(0)
    for got, wanted in zip(in_kernel(tanh_tile_vjp, *arrays), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=3e-4)
