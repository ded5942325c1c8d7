"""Captured attention becomes the attentions of a page: heads, labels, entropy and rollout."""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from attention_jax.analysis.attention_page import page_data
from attention_jax.analysis.capture import Captured, capture, computation_order
from attention_jax.analysis.capture_point import CapturedAttention
from attention_jax.analysis.gradients import CapturedGradients, OutputGradient
from attention_jax.analysis.rollout import attention_rollout, cross_rollout, wrong_sums
from attention_jax.analysis.statistics import weight_entropy

JSON = dict[str, Any]
Matrices = dict[str, np.ndarray]  # of one attention: quantities [*B, T, S] and a mask
Labels = tuple[Sequence[str], Sequence[str]]  # of queries, of keys
Tokens = Sequence[str] | Mapping[str, Labels] | None

_CAPTURED = ("weights", "logits", "dlogits")
# A page with more numbers than this has them in 16 bits. Twelve heads of 64 tokens, with three
# matrices, still have 32 bits, in less than 1 MB.
_MOST_WIDE_NUMBERS = 160_000


def attention_entries(
    attentions: Any,
    tokens: Tokens,
    inputs: Sequence[Any] | None,
    example: int | tuple[int | slice, ...],
    precision: str | None,
) -> list[JSON]:
    """The attentions in the data of a page; arguments as for `view`."""
    heads = {
        name: _heads_of(name, arrays, example)
        for name, arrays in _arrays_of(attentions, inputs).items()
    }
    _add_rollout(heads)
    names = sorted(heads, key=computation_order)
    labels = {name: _token_labels(name, heads[name], tokens) for name in names}
    shown = {name: _labelled(heads[name], labels[name]) for name in names}
    count = sum(a.size for arrays in shown.values() for key, a in arrays.items() if key != "mask")
    dtype = precision or ("float32" if count <= _MOST_WIDE_NUMBERS else "float16")
    return [_entry(name, labels[name], shown[name], dtype) for name in names]


def _arrays_of(attentions: Any, inputs: Sequence[Any] | None) -> dict[str, Matrices]:
    if inputs is not None:
        attentions = capture(attentions, *inputs)
    gradients = getattr(attentions, "gradients", {})
    if isinstance(attentions, Captured | CapturedGradients):
        attentions = attentions.attentions
    if not isinstance(attentions, Mapping) or not attentions:
        raise ValueError(
            "attentions must be what capture or capture_gradients returned, a function or module"
            f" with its inputs, or arrays by name; got {type(attentions).__name__}"
        )
    return {
        str(name): _arrays(str(name), arrays, gradients.get(name))
        for name, arrays in attentions.items()
    }


def _arrays(name: str, arrays: Any, gradient: OutputGradient | None) -> Matrices:
    """The quantities and the mask that are there, as NumPy arrays."""
    if isinstance(arrays, CapturedAttention):
        arrays = {
            "weights": arrays.weights,
            "logits": arrays.logits,
            "dlogits": gradient and gradient.dlogits,
            "mask": arrays.mask,
        }
    present = {key: np.asarray(array) for key, array in arrays.items() if array is not None}
    if not set(present) & set(_CAPTURED) or not set(present) <= {*_CAPTURED, "mask"}:
        raise ValueError(
            f"attentions[{name!r}] must have weights, logits or dlogits, captured with"
            f" matrices=True, and perhaps a mask; got {sorted(present)}"
        )
    return {
        key: array.astype(bool if key == "mask" else np.float32) for key, array in present.items()
    }


def _heads_of(name: str, arrays: Matrices, example: int | tuple[int | slice, ...]) -> Matrices:
    """Each array [*B, T, S] as [N, T, S], with the entropy [N, T]."""
    shapes = {quantity: array.shape for quantity, array in arrays.items()}
    heads = {}
    for quantity, array in arrays.items():
        try:
            np.broadcast_to(0, array.shape[:-2])[example]  # not an index into T or S
        except IndexError as error:
            raise ValueError(
                f"example must be in the batch axes of {name!r}, whose arrays are {shapes};"
                f" got {example!r}; give example=() for arrays without batch axes"
            ) from error
        chosen = array[example]
        heads[quantity] = chosen.reshape(math.prod(chosen.shape[:-2]), *chosen.shape[-2:])
    if len({array.shape for array in heads.values()}) > 1 or 0 in next(iter(shapes.values())):
        raise ValueError(
            f"attentions[{name!r}] must have arrays of one shape [*B, T, S] without an axis of 0;"
            f" got {shapes}"
        )
    if "weights" in heads:
        heads["entropy"] = np.asarray(weight_entropy(jnp.asarray(heads["weights"])))
    return heads


def _add_rollout(heads: dict[str, Matrices]) -> None:
    """Adds "rollout" [1, T, S] where it is defined."""
    with_weights = {
        name: arrays["weights"] for name, arrays in heads.items() if "weights" in arrays
    }
    stacks: dict[tuple, list[str]] = {}
    for name in sorted(with_weights, key=computation_order):
        block = name.rpartition("/")[0]
        alone = not block or sum(other.startswith(f"{block}/") for other in heads) == 1
        shape = with_weights[name].shape
        if alone and re.search(r"\d", name) and shape[1] == shape[2]:
            stacks.setdefault((re.sub(r"\d+", "*", name), shape), []).append(name)
    encoders = []
    for names in stacks.values():
        stack = jnp.stack([with_weights[name] for name in names])
        if wrong_sums(stack).size:
            continue
        layers = attention_rollout(stack, return_layers=True)
        for name, rollout in zip(names, layers, strict=True):
            heads[name]["rollout"] = np.asarray(rollout)[None]
        if names[0].startswith("encoder"):
            encoders.append(layers[-1])
    if len(encoders) != 1:
        return
    for name, weights in with_weights.items():
        cross = jnp.asarray(weights)
        fits = "cross_attention" in name and cross.shape[-1] == len(encoders[0])
        if fits and not wrong_sums(cross).size:
            heads[name]["rollout"] = np.asarray(cross_rollout(cross, encoders[0]))[None]


# --- labels ---


def _token_labels(name: str, arrays: Matrices, tokens: Tokens) -> tuple[list[str], list[str]]:
    *_, rows, columns = next(array for key, array in arrays.items() if key != "entropy").shape
    pair: Any = (tokens, tokens)
    if isinstance(tokens, Mapping):
        pair = next((tokens[key] for key in tokens if fnmatch.fnmatchcase(name, key)), None)
        if pair is None:
            raise ValueError(f"tokens must have a pattern that fits {name!r}; got {list(tokens)}")
    sides = []
    for side, size, labels in zip(("queries", "keys"), (rows, columns), pair, strict=True):
        labels = range(size) if labels is None else labels
        if isinstance(labels, str) or not 1 <= len(labels) <= size:
            raise ValueError(
                f"tokens must be 1 to {size} labels for the {side} of {name!r}; got {labels!r}"
            )
        sides.append([str(label) for label in labels])
    return sides[0], sides[1]


def _labelled(arrays: Matrices, labels: tuple[list[str], list[str]]) -> Matrices:
    """The rows and columns that have a label."""
    kept = (slice(None), *(slice(len(side)) for side in labels))
    return {key: array[kept[: array.ndim]] for key, array in arrays.items()}


def _entry(name: str, labels: tuple[list[str], list[str]], arrays: Matrices, dtype: str) -> JSON:
    mask = arrays.get("mask")
    if mask is not None and np.all(mask == mask[:1]):
        mask = mask[:1]
    return {
        "name": name,
        "query_tokens": labels[0],
        "key_tokens": labels[1],
        "mask": None if mask is None or mask.all() else page_data.encoded_mask(mask),
        "arrays": {
            key: page_data.encoded_numbers(arrays[key], dtype)
            for key in page_data.QUANTITIES
            if key in arrays
        },
    }
