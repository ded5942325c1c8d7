"""The masking and the derivatives around cuDNN; XLA's own product attention stands in for cuDNN."""

import importlib.util

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
from kernel_cases import check
from score_cases import slow_unless

import attention_jax as aj
from attention_jax.implementations import BlockSizes, Inputs, Options
from attention_jax.kernels import choice

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


def attend(score, query, key, value, params):
    return aj.attention(query, key, value, score=score, params=params, implementation="cudnn")


CASES = [("scaled", mask) for mask in MASKS] + [
    (score, "causal padding") for score in SCORES if score != "scaled"
]
FAST = [("scaled", "window"), ("general", "causal padding")]


@pytest.mark.parametrize(("score_name", "mask_name"), slow_unless(FAST, CASES))
def test_output_and_gradients_are_those_of_float64(interpreted, score_name, mask_name):
    """XLA's own attention does not multiply float16 on every CPU."""
    score, arrays, doutput = draw(score_name)
    check("cudnn", score, MASKS[mask_name], arrays, doutput, BOUNDS, statistics=False)


REFUSED = {
    "a score": ({"score": "additive"}, "dot product of features; got Additive"),
    "a wrapped score": ({"score": "softcap"}, "dot product of features; got SoftCap"),
    "float32": ({"query": jnp.ones((2, T, D))}, "got bfloat16, float32"),
    "statistics": ({"return_statistics": True}, "max_logit"),
    "a later window": ({"mask": aj.local_mask(2, 1)}, "left 2, right 1"),
    "an offset": ({"mask": aj.causal_mask(-1)}, "left None, right -1"),
    "a padded window": ({"mask": aj.local_mask(2, 0) & aj.padding_mask(KEY_LENGTHS)}, "no padding"),
    "no keys": ({"query": jnp.ones((2, 9, D), jnp.bfloat16), "mask": aj.local_mask(1, 0)}, "NaN"),
    "wide heads": ({"value": jnp.ones((2, S, 129), jnp.bfloat16)}, r"got \(11, 129\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused(case):
    changes, expected = REFUSED[case]
    _, (query, key, value, _), _ = draw("scaled")
    arguments = {"query": query, "key": key, "value": value, **changes}
    if arguments.get("score") == "additive":
        arguments["params"] = aj.Additive().init(jax.random.key(0), D, D)
    with pytest.raises(NotImplementedError, match=f"implementation 'cudnn' .*{expected}"):
        aj.attention(**arguments, implementation="cudnn")


def test_float16_squares_are_refused():
    score, arrays, _ = draw("distance", jnp.float16)
    with pytest.raises(NotImplementedError, match="features in 16 bits"):
        attend(score, *arrays)


def test_without_the_plugin_it_says_so():
    score, (query, *others), _ = draw("scaled")
    if importlib.util.find_spec("jax_cuda12_plugin"):
        pytest.skip("the CUDA plugin is installed")
    with pytest.raises(NotImplementedError, match="needs the CUDA plugin of JAX"):
        attend(score, query[:, :4], *others)  # a shape of its own: XLA's are compiled already


def test_none_chooses_it_on_a_gpu_that_has_it(monkeypatch):
    score, (query, key, value, params), _ = draw("scaled")
    inputs = Inputs(query, key, value, params, aj.causal_mask(), None, None, {})
    shared = inputs._replace(key=key[:1])  # cuDNN's keys would be copies
    options = Options(score, BlockSizes())
    statistics = Options(score, BlockSizes(), return_statistics=True)
    for generation, backend, call, chosen in (
        (None, "gpu", (options, inputs), True),
        (9.0, "gpu", (options, inputs), True),
        (7.5, "gpu", (options, inputs), False),
        (None, "cpu", (options, inputs), False),
        (None, "tpu", (options, inputs), False),
        (None, "gpu", (options, shared), False),
        (None, "gpu", (statistics, inputs), False),
    ):
        monkeypatch.setattr(choice, "nvidia_generation", lambda generation=generation: generation)
        name, _ = choice.choose(None, None, *call, backend)
        assert (name == "cudnn") is chosen, (generation, backend)


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
