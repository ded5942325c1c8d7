"""The masking and the derivatives around cuDNN; XLA's own product attention stands in for cuDNN."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
from kernel_cases import assert_within, check, in_float64
from score_cases import slow_unless

import attention_jax as aj
from attention_jax.kernels import choice, cudnn
from attention_jax.tiles import Inputs, Options

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


@pytest.fixture(autouse=True)
def _even_lengths_in_gradients(monkeypatch):
    """JAX's call of cuDNN raises for odd lengths in a gradient; its stand-in does so, too.

    An example without keys gives NaN, and so do its gradients.
    """
    attend = jax.nn.dot_product_attention

    def even_in_gradients(*tokens, **options):
        def of_examples_with_keys(tree, lengths):
            counts = lengths.get("key_value_seq_lengths")
            if counts is None:
                return tree
            empty = (counts == 0)[:, None, None, None]
            return jax.tree.map(lambda leaf: jnp.where(empty, jnp.nan, leaf), tree)

        @jax.custom_vjp
        def call(tokens, lengths):
            return of_examples_with_keys(attend(*tokens, **options, **lengths), lengths)

        def forward(tokens, lengths):
            assert all(x.shape[1] % 2 == 0 for x in tokens), "Unsupported sequence length"
            output, pull_back = jax.vjp(
                lambda *tokens: attend(*tokens, **options, **lengths), *tokens
            )
            return of_examples_with_keys(output, lengths), (pull_back, lengths)

        def backward(residuals, doutput):
            pull_back, lengths = residuals
            return of_examples_with_keys(pull_back(doutput), lengths), None

        names = ("query_seq_lengths", "key_value_seq_lengths")
        lengths = {name: options.pop(name) for name in names if name in options}
        call.defvjp(forward, backward)
        return call(tokens, lengths)

    monkeypatch.setattr(jax.nn, "dot_product_attention", even_in_gradients)


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


class Renamed(aj.Dot):
    """A subclass that changes nothing."""


class Form(NamedTuple):
    """Batch axes, and what the library is called with."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    heads: tuple[int, int, int]  # B, N, K
    value: tuple[int, ...] | None = None  # those of the key
    params: tuple[int, ...] = ()
    mask: Any = None
    score: Any = "general"


LENGTHS = jnp.array([4, 0])
FORMS = {
    "no axes": Form((), (), (1, 1, 1)),
    "one axis": Form((3,), (3,), (3, 1, 1), mask=aj.causal_mask()),
    "heads": Form((2, 3), (2, 3), (2, 3, 3), params=(3,), mask=aj.padding_mask(LENGTHS[:, None])),
    "heads of one example": Form((1, 3), (1, 3), (1, 3, 3), params=(3,)),
    "grouped": Form((2, 3, 2), (2, 3, 1), (2, 6, 3), params=(3, 2),
                    mask=aj.padding_mask(LENGTHS[:, None, None]) & aj.causal_mask()),
    "grouped, keys with params": Form((2, 3, 2), (2, 3, 1), (2, 6, 3), params=(3, 1), score="ngpt"),
    "multi-query": Form((2, 3), (2, 1), (2, 3, 1), params=(3,), mask=aj.local_mask(2, 0)),
    "keys with params of each head": Form((2, 3), (2, 1), (2, 3, 3), params=(3,), score="ngpt"),
    "keys of all": Form((2, 3), (), (1, 6, 1), mask=aj.causal_mask()),
    "keys of all, lengths of each": Form((2, 3), (), (2, 3, 1),
                                         mask=aj.padding_mask(LENGTHS[:, None])),
    "examples share keys": Form((2, 3), (1, 3), (1, 6, 3), params=(2, 1)),
    "values of each head": Form((2, 3), (2, 1), (2, 3, 3), value=(2, 3)),
    "lengths of each head": Form((2, 2), (2, 1), (4, 1, 1),
                                 mask=aj.padding_mask(jnp.array([[4, 0], [7, 2]]))),
    "lengths of queries": Form((2, 3), (2, 3), (2, 3, 3), mask=aj.padding_mask(
        LENGTHS[:, None], jnp.array([[3], [5]]))),
    "many axes": Form((2, 1, 3, 2), (2, 1, 3, 1), (2, 6, 3)),
    "score of a user": Form((2, 3), (2, 1), (2, 3, 1), score=Renamed()),
    "negative scale": Form((2, 3), (2, 1), (2, 3, 1), score=aj.ScaledDot(scale=-0.25)),
    "layers": Form((2, 2, 3), (2, 2, 3), (4, 3, 3)),
    "keys of one origin": Form((2, 3, 2), (2, 3, 1), (2, 6, 3), score="l2",
                               mask=aj.padding_mask(LENGTHS[:, None, None])),
}  # fmt: skip


def of_form(form):
    """(score, (query, key, value, params), cotangent of the output)"""
    score, rng = aj.get_score(form.score), np.random.default_rng(5)
    sizes = (*form.query, T, D), (*form.key, S, D), (*(form.value or form.key), S, DV)
    arrays = [rng.normal(size=shape) for shape in sizes]
    if score.translation_invariant:
        arrays[:2] = (array + 50 for array in arrays[:2])
    params = score.init(jax.random.key(2), D, D)
    arrays.append(
        {
            k: np.asarray(p) + 0.3 * rng.normal(size=(*form.params, *p.shape))
            for k, p in params.items()
        }
    )
    arrays.append(rng.normal(size=(*form.query, T, DV)))
    *arrays, doutput = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), arrays)
    return score, tuple(arrays), doutput


@pytest.mark.parametrize("name", FORMS)
def test_batch_axes_are_examples_and_heads(interpreted, name, monkeypatch):
    """Keys that heads share are not copied."""
    form, shapes = FORMS[name], []
    attend = jax.nn.dot_product_attention

    def recorded(query, key, value, **options):
        shapes.append((query.shape[0], query.shape[2], key.shape[2]))
        return attend(query, key, value, **options)

    score, arrays, doutput = of_form(form)
    monkeypatch.setattr(cudnn, "_refusal", lambda *_: None)  # its call is of one head
    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    check("cudnn", score, form.mask, arrays, doutput, BOUNDS, statistics=False)
    assert set(shapes) == {form.heads}


TRANSFORMS = {
    "vmap": lambda f: jax.vmap(f, in_axes=0),
    "vmap of queries": lambda f: lambda q, k, v, p: jax.vmap(f, in_axes=(0, None, None, None))(
        q, k[0], v[0], jax.tree.map(lambda leaf: leaf[0], p)),
    "vmap of keys and params": lambda f: lambda q, k, v, p: jax.vmap(f, in_axes=(None, 0, None, 0))(
        q[0], k, v[0], p),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f), in_axes=1, out_axes=1),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("mask_name", ["none", "padding"])
def test_transformations_of_grouped_queries(interpreted, name, mask_name):
    mask = aj.padding_mask(LENGTHS[:, None, None]) if mask_name == "padding" else None
    form = Form((2, 3, 2, 3, 2), (2, 3, 2, 3, 1), (0, 0, 0), params=(2, 3, 2, 3, 1))
    drop = 0 if name == "vmap of vmap" else 1
    form = form._replace(query=form.query[drop:], key=form.key[drop:], params=form.params[drop:])
    score, arrays, doutput = of_form(form)

    def gradients(implementation, *arrays):
        def attend(query, key, value, params):
            return aj.attention(
                query, key, value, score=score, params=params, mask=mask,
                implementation=implementation,
            )  # fmt: skip

        output, pull_back = jax.vjp(TRANSFORMS[name](attend), *arrays)
        return output, None, pull_back(doutput.astype(output.dtype))

    expected = in_float64(functools.partial(gradients, "reference"), *arrays)
    assert_within(gradients("cudnn", *arrays), expected, BOUNDS)


def inputs_of(score, query, key, value, params):
    return Inputs(query, key, value, params, aj.causal_mask(), None, None, {})


@pytest.mark.parametrize(("generation", "chosen"), [(None, "cudnn"), (7.5, "reference")])
def test_none_chooses_it_on_a_gpu_that_has_it(interpreted, monkeypatch, generation, chosen):
    score, arrays, _ = draw("scaled")
    monkeypatch.setattr(cudnn, "nvidia_generation", lambda: generation)
    call = Options(score), inputs_of(score, *arrays), "gpu"
    assert choice.choose(None, *call)[0] == chosen


def test_of_several_devices_none_may_hold_some_of_the_examples_that_share_keys(
    interpreted, monkeypatch
):
    """JAX cannot divide such a call."""
    chosen = {}
    for name in ("heads", "grouped", "multi-query", "keys of all", "examples share keys"):
        score, arrays, _ = of_form(FORMS[name])
        inputs = inputs_of(score, *arrays)
        for devices in (1, 2):
            monkeypatch.setattr(jax, "device_count", lambda devices=devices: devices)
            call = Options(score), inputs, "gpu"
            chosen[name, devices] = choice.choose(None, *call)[0] == "cudnn"
    assert all(chosen[name, 1] for name, _ in chosen)
    assert [name for name, devices in chosen if not chosen[name, devices]] == [
        "keys of all", "examples share keys"
    ]  # fmt: skip


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
    chosen, _ = choice.choose(None, Options(score), inputs, "gpu")
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
