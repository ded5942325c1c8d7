"""The masking and the derivatives around cuDNN; XLA's own product attention stands in for cuDNN."""

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
from kernel_cases import check
from score_cases import slow_unless

import attention_jax as aj
from attention_jax.implementations import BlockSizes, Inputs, Options
from attention_jax.kernels import choice, cudnn

NAME = "cudnn"
T, S, D, DV = 5, 7, 11, 13
SCORES = ("dot", "scaled", "general", "cosine", "distance")
KEY_LENGTHS, QUERY_LENGTHS = jnp.array([4, 0]), jnp.array([3, 5])  # no key in example 1
MASKS = {
    "none": None,
    "causal": aj.causal_mask(),
    "window": aj.local_mask(2, 1) & aj.causal_mask(),
    "padding": aj.padding_mask(KEY_LENGTHS, QUERY_LENGTHS),
    "causal padding": aj.padding_mask(KEY_LENGTHS, QUERY_LENGTHS) & aj.causal_mask(),
}
BOUNDS = (2**-6, 2**-6)  # four roundings to bfloat16


def draw(score_name, dtype=jnp.bfloat16):
    """(score, (query, key, value, params), cotangent of the output): numbers of 16 bits."""
    score = aj.get_score(score_name)
    return score, *kernel_cases.draw(score, (T, S), (D, D, DV), dtype)


CASES = [("scaled", mask) for mask in MASKS] + [
    (score, "causal padding") for score in SCORES if score != "scaled"
]
FAST = [("scaled", "window"), ("general", "causal padding")]


@pytest.mark.parametrize(("score_name", "mask_name"), slow_unless(FAST, CASES))
def test_output_and_gradients_are_those_of_float64(interpreted, score_name, mask_name):
    """XLA's own attention does not multiply float16 on every CPU."""
    score, arrays, doutput = draw(score_name)
    check("cudnn", score, MASKS[mask_name], arrays, doutput, BOUNDS, statistics=False)


def inputs_of(score, query, key, value, params):
    return Inputs(query, key, value, params, aj.causal_mask(), None, None, {})


def test_none_chooses_it_on_a_gpu_that_has_it(interpreted, monkeypatch):
    score, arrays, _ = draw("scaled")
    inputs, options = inputs_of(score, *arrays), Options(score, BlockSizes())
    statistics = Options(score, BlockSizes(), return_statistics=True)
    for generation, backend, call, chosen in (
        (None, "gpu", (options, inputs), True),
        (7.5, "gpu", (options, inputs), False),
        (None, "cpu", (options, inputs), False),
        (None, "tpu", (options, inputs), False),
        (None, "gpu", (statistics, inputs), False),
    ):
        monkeypatch.setattr(choice, "nvidia_generation", lambda generation=generation: generation)
        name, _ = choice.choose(None, None, *call, backend)
        assert (name == "cudnn") is chosen, (generation, backend)


@pytest.mark.parametrize("says_so_when", ["traced", "compiled"])
def test_a_gpu_without_cudnn_falls_back(says_so_when, monkeypatch):
    """`None` serves; the name is refused in one line."""

    def attend(query, key, value, **options):
        if says_so_when == "traced":
            raise RuntimeError("cuDNN is not detected.\nMore lines")
        return query

    def compiler(**options):
        raise jax.errors.JaxRuntimeError("cuDNN is not detected.\nMore lines")

    monkeypatch.setattr(cudnn, "LIBRARY", says_so_when)  # nobody has asked for it yet
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(cudnn, "nvidia_generation", lambda: 9.0)
    monkeypatch.setattr(jax, "local_devices", compiler)
    score, arrays, _ = draw("scaled")
    inputs = inputs_of(score, *arrays)
    for name in (None, "reference"):
        chosen, _ = choice.choose(name, None, Options(score, BlockSizes()), inputs, "gpu")
        assert chosen == "reference"
    refusal = r"^implementation 'cudnn' cannot run here: cuDNN is not detected: use"
    with pytest.raises(NotImplementedError, match=refusal):
        aj.attention(*arrays[:3], implementation="cudnn")


def test_statistics_are_captured_although_cudnn_has_none(interpreted):
    score, arrays, _ = draw("scaled")

    def captured(implementation):
        def call(query, key, value, params):
            return aj.attention(
                query, key, value, score=score, params=params, mask=MASKS["causal"],
                implementation=implementation,
            )  # fmt: skip

        return aj.analysis.capture(call, *arrays).attentions

    (got,), (expected,) = (captured(name).values() for name in ("cudnn", "reference"))
    np.testing.assert_allclose(list(got.statistics), list(expected.statistics), rtol=1e-6)
