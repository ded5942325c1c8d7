"""Trained weights of `torch.nn.MultiheadAttention` in `nn.MultiHeadAttention`, and back.

Both functions take and return arrays by torch's names; neither imports torch.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention_jax.core.arrays import float_array
from attention_jax.core.checks import check_integer
from attention_jax.functional.checks import check_axes
from attention_jax.nn import MultiHeadAttention
from attention_jax.normalizers import Softmax
from attention_jax.scores import ScaledDot, Score

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
PACKED, PACKED_BIAS = "in_proj_weight", "in_proj_bias"
OUTPUT, OUTPUT_BIAS = "out_proj.weight", "out_proj.bias"


def from_torch(
    state: Mapping[str, Any],
    *,
    num_heads: int,
    score: str | Score = "scaled",
    rngs: nnx.Rngs | None = None,
    **options: Any,
) -> MultiHeadAttention:
    """A layer with the weights of a `torch.nn.MultiheadAttention`, and with its outputs.

        W_q,n = rows n H to (n + 1) H of torch's weight of queries, transposed;  H = qkv_dim / N

    With score "scaled" the layer computes what torch's does. With another score it starts from
    the trained projections, each head's parameters of the score are drawn from `rngs`, and the
    outputs are no longer the trained ones.

    Args:
        state: the layer's `state_dict()`, or the same names with NumPy or JAX arrays, all float:
            "in_proj_weight" [3 qkv_dim, query_dim], or "q_proj_weight" [qkv_dim, query_dim],
            "k_proj_weight" [qkv_dim, key_dim] and "v_proj_weight" [qkv_dim, value_dim];
            "out_proj.weight" [output_dim, qkv_dim]; "in_proj_bias" [3 qkv_dim] and "out_proj.bias"
            [output_dim], or neither. (With one of them, the other bias is 0.)
        num_heads: N, a divisor of qkv_dim; no array of the state depends on it.
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        rngs: streams of what the state does not hold, and of dropout; None for `nnx.Rngs(0)`, with
            which all layers get the same parameters of the score: for several layers make one
            `nnx.Rngs` outside of the loop.
        options: other options of `nn.MultiHeadAttention`, for instance `dropout_rate`. Without
            `param_dtype` the parameters have the dtype of the arrays.

    Returns:
        the layer. For a torch layer with `add_zero_attn`, give `normalizer=Softmax(sink=True)`.

    Raises:
        ValueError: a name is missing or unknown ("bias_k" and "bias_v" of `add_bias_kv` have no
            counterpart), NumPy cannot read a tensor, shapes do not fit, `num_heads` does not divide
            qkv_dim, or `options` has what the state says.

    >>> draw = np.random.default_rng(0).normal
    >>> state = {"in_proj_weight": draw(size=(24, 8)), "out_proj.weight": draw(size=(8, 8))}
    >>> layer = from_torch(state, num_heads=2)
    >>> layer(jnp.ones((1, 5, 8))).shape, np.allclose(to_torch(layer)[OUTPUT], state[OUTPUT])
    ((1, 5, 8), True)
    >>> from_torch(state, num_heads=2, score="additive").params_of_score["v"].shape
    (2, 4)

    Source: the parameters of `torch.nn.MultiheadAttention`, PyTorch 2.13.
    """
    if not isinstance(state, Mapping):
        got = type(state).__name__
        raise ValueError(f"state must map names to arrays, as layer.state_dict() does; got {got}")
    weights = SEPARATE if {*SEPARATE} & {*state} else (PACKED,)
    expected = {*weights, OUTPUT, PACKED_BIAS, OUTPUT_BIAS}
    missing, unknown = {*weights, OUTPUT} - {*state}, {*state} - expected
    if missing or unknown:
        wrong = {"no": missing, "an unknown": unknown}
        got = [f"{kind} {min(names)}" for kind, names in wrong.items() if names]
        raise ValueError(
            f"state must have the names {', '.join([*weights, OUTPUT])}, and may have"
            f" {PACKED_BIAS} and {OUTPUT_BIAS} (select one layer's names by its prefix); got"
            f" {' and '.join(got)}"
        )
    sizes = {"query_dim", "key_dim", "value_dim", "qkv_dim", "output_dim", "num_key_heads"}
    if given := {*sizes, "use_bias"} & {*options}:
        raise ValueError(f"{min(given)} must be left out: state and num_heads determine it")
    arrays = {name: float_array(f"state[{name!r}]", array) for name, array in state.items()}
    dtype = jnp.result_type(*arrays.values())

    def checked(name: str, *shape: int | str) -> jax.Array:
        return check_axes(f"state[{name!r}]", arrays[name], shape, ())

    rows = checked(weights[0], "rows", "query_dim").shape[0] // (3 if PACKED in state else 1)
    check_integer("num_heads", num_heads)
    if rows % num_heads:
        raise ValueError(f"num_heads must divide qkv_dim {rows} of the state; got {num_heads}")
    if PACKED in state:
        inputs = jnp.split(checked(PACKED, 3 * rows, "query_dim"), 3)
    else:
        inputs = [checked(name, rows, "features") for name in SEPARATE]
    output = checked(OUTPUT, "output_dim", rows)
    biases = []
    for name, size in ((PACKED_BIAS, 3 * rows), (OUTPUT_BIAS, len(output))):
        arrays.setdefault(name, jnp.zeros(size, dtype))
        biases += jnp.split(checked(name, size), 3 if name == PACKED_BIAS else 1)
    query_dim, key_dim, value_dim = (weight.shape[1] for weight in inputs)
    layer = MultiHeadAttention(
        score,
        query_dim,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        qkv_dim=rows,
        output_dim=len(output),
        use_bias=PACKED_BIAS in state or OUTPUT_BIAS in state,
        rngs=nnx.Rngs(0) if rngs is None else rngs,
        **{"param_dtype": dtype, **options},
    )
    projections = (layer.query, layer.key, layer.value, layer.output)
    for projection, weight, bias in zip(projections, (*inputs, output), biases, strict=True):
        for param, array in ((projection.kernel, weight.T), (projection.bias, bias)):
            if param is not None:
                param[...] = array.reshape(param.shape).astype(param.dtype)
    return layer


def to_torch(layer: MultiHeadAttention) -> dict[str, np.ndarray]:
    """The state dict of the `torch.nn.MultiheadAttention` that computes what the layer does.

    Torch's layer is made with `embed_dim=query_dim`, `num_heads`, `bias=use_bias`, and `kdim` and
    `vdim` where keys and values have other sizes; dropout is not in the state.

    Args:
        layer: score "scaled" and normaliser "softmax", with one size of queries, heads and outputs.

    Returns:
        NumPy arrays by torch's names, in torch's order; for `load_state_dict`, map
        `torch.from_numpy` over them, which reads bfloat16 only after `array.astype("float32")`.

    Raises:
        ValueError: the layer has an option that torch's layer does not have, or its parameters are
            those of several layers.

    >>> layer = MultiHeadAttention("scaled", 8, num_heads=2, key_dim=6, rngs=nnx.Rngs(0))
    >>> {name: array.shape for name, array in to_torch(layer).items()}  # doctest: +ELLIPSIS
    {'q_proj_weight': (8, 8), 'k_proj_weight': (8, 6), 'v_proj_weight': (8, 6), 'out_proj...

    Source: the parameters of `torch.nn.MultiheadAttention`, PyTorch 2.13.
    """
    if not isinstance(layer, MultiHeadAttention):
        raise ValueError(f"layer must be an nn.MultiHeadAttention; got {type(layer).__name__}")
    inputs = (layer.query, layer.key, layer.value)
    rows = layer.num_heads * layer.head_dim
    (query_dim,) = layer.query.in_features
    (output_dim,) = layer.output.out_features
    differs = {
        f"score {layer.score}": layer.score != ScaledDot(),
        f"normalizer {layer.normalizer}": layer.normalizer != Softmax(),
        f"qkv_dim {rows}": rows != query_dim,
        f"output_dim {output_dim}": output_dim != query_dim,
        "num_key_heads": layer.num_key_heads != layer.num_heads,
        "normalize_qk": layer.query_norm is not None,
        "output_gate": layer.gate is not None,
        "output_mod": layer.output_mod is not None,
        "rotary_wavelength": layer.rotary_wavelength is not None,
        "the stacked parameters of several layers": len(layer.query.kernel.shape) > 3,
    }
    if any(differs.values()):
        raise ValueError(
            "layer must have score 'scaled', normalizer 'softmax' and one size of queries, heads"
            " and outputs, as torch's has; got"
            f" {', '.join(name for name, is_so in differs.items() if is_so)}"
        )
    weights = [np.asarray(each.kernel[...]).reshape(-1, rows).T for each in inputs]
    if all(weight.shape[1] == rows for weight in weights):
        state = {PACKED: np.concatenate(weights)}
    else:
        state = dict(zip(SEPARATE, weights, strict=True))
    biases = [each.bias[...] for each in (*inputs, layer.output) if each.bias is not None]
    if biases:
        state[PACKED_BIAS] = np.concatenate([np.ravel(bias) for bias in biases[:3]])
    state[OUTPUT] = np.asarray(layer.output.kernel[...]).reshape(rows, -1).T
    if biases:
        state[OUTPUT_BIAS] = np.asarray(biases[3])
    return {name: np.array(array, order="C") for name, array in state.items()}
