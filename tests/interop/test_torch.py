"""`from_torch` and `to_torch` against numbers of torch 2.13, and against torch if installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import multi_head
from quick_compilation import quick_jit
from torch_layers import CASES, NUMBERS, B, E, N, S, T, arrays_of, as_vector, torch_results

from attention_jax import Softmax, nn, token_mask
from attention_jax.interop import from_torch, to_torch

NORMALIZER = {True: Softmax(sink=True), False: Softmax()}  # by add_zero_attn


def arguments_of(call, num_heads):
    """Our mask and bias for torch's arguments, as the guide's table has it."""
    mask, bias = True, 0.0
    for name, given in call.items():
        if isinstance(given, np.ndarray):
            if name == "key_padding_mask":
                given = given[:, None, None]
            elif given.ndim == 3:
                given = given.reshape(B, num_heads, T, S)
            if given.dtype == bool:
                mask = mask & ~given
            else:
                bias = bias + given.astype(np.float32)
    mask = None if mask is True else np.broadcast_to(mask, (B, num_heads, T, S))
    return {"mask": mask, "bias": None if np.ndim(bias) == 0 else bias}


def our_results(name):
    num_heads, options, call = CASES[name]
    state, tokens = arrays_of(name)
    arguments = arguments_of(call, num_heads)
    normalizer = NORMALIZER[options.get("add_zero_attn", False)]
    tokens = tokens[:1] if tokens[0] is tokens[1] else tokens

    def loss(tokens, state):
        layer = from_torch(state, num_heads=num_heads, normalizer=normalizer)
        output, weights = layer(*tokens, **arguments, return_weights=True)
        loss = (output * jnp.cos(jnp.arange(output.size)).reshape(output.shape)).sum()
        return loss, (output, weights)[: 1 + call.get("need_weights", True)]

    gradients, outputs = jax.grad(loss, (0, 1), has_aux=True)(tokens, state)
    return outputs, gradients


@pytest.fixture(scope="module")
def ours():
    """All cases, in one compiled program."""
    results = jax.device_get(quick_jit(lambda: {name: our_results(name) for name in CASES})())
    return {name: (sum(map(np.size, x[0])), as_vector(*x)) for name, x in results.items()}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_torch(name, ours):
    (outputs, got), expected = ours[name], np.load(NUMBERS)[name]
    np.testing.assert_allclose(got[:outputs], expected[:outputs], rtol=0, atol=1e-6)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert np.ptp(got) > 1


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_torchs(name, ours):
    pytest.importorskip("torch")
    np.testing.assert_allclose(torch_results(name), np.load(NUMBERS)[name], rtol=0, atol=1e-5)
    in_evaluation = torch_results(name, grad=False)
    got = ours[name][1][: in_evaluation.size]
    np.testing.assert_allclose(got, in_evaluation, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("self", "float32"),
        ("no bias", "float16"),
        ("sizes", "bfloat16"),
        ("sizes, no bias", "float32"),
    ],
)
def test_there_and_back_changes_no_bit(name, dtype):
    state = {key: jnp.asarray(x, dtype) for key, x in arrays_of(name)[0].items()}
    back = to_torch(from_torch(state, num_heads=CASES[name][0]))
    assert back.keys() == state.keys()
    for key, array in state.items():
        np.testing.assert_array_equal(back[key], array, strict=True)


def test_another_score_keeps_the_projections():
    state, tokens = arrays_of("sizes")
    options = {"num_heads": N, "dropout_rate": 0.5, "rngs": nnx.Rngs(3)}
    layer = from_torch(state, score="additive", **options)
    layer.eval()
    params = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    x, y, values = (np.float64(each[0]) for each in tokens)
    expected, _ = multi_head("additive", params, x, y, np.ones(S, bool), values=values)
    np.testing.assert_allclose(layer(*tokens)[0], expected, atol=2e-5)
    plain = from_torch(state, num_heads=N)
    for name in ("query", "key", "value", "output"):
        np.testing.assert_array_equal(getattr(layer, name).kernel, getattr(plain, name).kernel)


def test_one_bias_alone_and_rows_without_keys():
    """Torch's output is NaN, or the bias, as here."""
    state, (x, *_) = arrays_of("self")
    del state["in_proj_bias"]
    layer = from_torch(state, num_heads=N)
    assert not to_torch(layer)["in_proj_bias"].any()
    output = layer(x, mask=token_mask(jnp.zeros((B, T), bool)))
    np.testing.assert_array_equal(output, np.broadcast_to(state["out_proj.bias"], (B, T, E)))


class Unreadable:
    """A tensor that requires gradients: NumPy cannot read it."""

    def detach(self):
        """Marks a tensor."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


STATE, SIZES = (arrays_of(name)[0] for name in ("self", "sizes"))
LAYER = {"score": "scaled", "query_dim": 8, "num_heads": 2}
STATES = (  # words of the error, a wrong state for two heads
    ("got an unknown bias_k$", STATE | {"bias_k": np.ones((1, 1, E))}),
    ("state must map names to arrays.*got list", [*STATE]),
    ("prefix.*got no in_proj_weight and an unknown a.in_proj_bias$",
     {f"a.{key}": x for key, x in STATE.items()}),
    (r"state\['in_proj_weight'\] must be an array.*detach\(\)",
     STATE | {"in_proj_weight": Unreadable()}),
    ("q_proj_weight.*got no k_proj_weight$", {k: x for k, x in SIZES.items() if k[0] != "k"}),
    (r"state\['in_proj_weight'\] must be \[24, query_dim\]; got \[25, 8\]",
     STATE | {"in_proj_weight": np.ones((25, E))}),
    (r"state\['v_proj_weight'\] must be \[8, features\]; got \[6, 3\]",
     SIZES | {"v_proj_weight": np.ones((6, 3))}),
    (r"state\['in_proj_bias'\] must be \[24\]; got \[8\]", STATE | {"in_proj_bias": np.ones(8)}),
    (r"state\['out_proj.weight'\] must be floating",
     STATE | {"out_proj.weight": np.ones((8, 8), int)}),
)  # fmt: skip
MISTAKES = {
    "num_heads must divide qkv_dim 8 .*got 3": lambda: from_torch(STATE, num_heads=3),
    "num_heads must be an integer; got 2.0": lambda: from_torch(STATE, num_heads=2.0),
    "num_key_heads must be left out": lambda: from_torch(STATE, num_heads=2, num_key_heads=1),
    "use_bias must be left out": lambda: from_torch(STATE, num_heads=2, use_bias=True),
    "layer must be an nn.MultiHeadAttention; got dict": lambda: to_torch(STATE),
    "got the stacked parameters of several layers": lambda: to_torch(
        jax.vmap(lambda x: nn.MultiHeadAttention(**LAYER, rngs=nnx.Rngs(x)))(
            jax.random.split(jax.random.key(0), 3)
        )
    ),
}
OTHERS = (
    ("Dot", {"score": "dot"}), ("sink=True", {"normalizer": Softmax(sink=True)}),
    ("qkv_dim 4", {"qkv_dim": 4}), ("output_dim 3", {"output_dim": 3}),
    ("num_key_heads", {"num_key_heads": 1}), ("normalize_qk", {"normalize_qk": True}),
    ("output_gate", {"output_gate": True}), ("output_mod", {"output_mod": lambda x, value: x}),
    ("rotary_wavelength", {"rotary_wavelength": 10.0}),
)  # fmt: skip
for words, state in STATES:
    MISTAKES[words] = lambda state=state: from_torch(state, num_heads=2)
for words, options in OTHERS:
    MISTAKES[f"layer must .*got .*{words}"] = lambda options=options: to_torch(
        nn.MultiHeadAttention(**LAYER | options, rngs=nnx.Rngs(0))
    )


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_refused_in_one_line(words):
    with pytest.raises(ValueError, match=words) as caught:
        MISTAKES[words]()
    assert "\n" not in str(caught.value)
