"""The data of a page: one JSON document, which README.md describes.

Arrays are base64 of little-endian numbers, of 32 bits, or of 16 bits and one factor. A writer in
another language may write them as plain lists instead.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

JSON = dict[str, Any]
Precision = Literal["float32", "float16"]

# The format that a page can read, and its version.
SCHEMA = "attention_jax attention page"
VERSION = 1
# The quantities that a page can show, in its order.
QUANTITIES = ("weights", "logits", "entropy", "dlogits", "rollout")
_DTYPES: dict[str, np.dtype] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}


def encoded_numbers(array: np.ndarray, dtype: str) -> JSON:
    """An array as JSON.

    Args:
        array: float [...].
        dtype: "float32", or "float16": then the largest magnitude becomes 1, and numbers keep three
            significant digits down to 6e-5 of it.
    """
    array = np.asarray(array, np.float32)
    scale = 1.0
    if dtype == "float16":
        finite = np.abs(array[np.isfinite(array)])
        scale = float(np.max(finite, initial=0)) or 1.0
        array = array / np.float32(scale)
    data = base64.b64encode(array.astype(_DTYPES[dtype]).tobytes()).decode()
    return {"shape": list(array.shape), "dtype": dtype, "scale": scale, "data": data}


def decoded_numbers(array: JSON) -> np.ndarray:
    """The numbers of an array in JSON, float32, in its shape."""
    if "values" in array:
        values = [np.nan if value is None else value for value in array["values"]]
        return np.array(values, np.float32).reshape(array["shape"])
    numbers = np.frombuffer(base64.b64decode(array["data"]), _DTYPES[array["dtype"]])
    scale = np.float32(array.get("scale", 1.0))
    return (numbers.astype(np.float32) * scale).reshape(array["shape"])


def encoded_mask(mask: np.ndarray) -> JSON:
    """A boolean array as JSON: one bit per pair, the first in the lowest bit of its byte."""
    bits = np.packbits(np.ravel(mask), bitorder="little")
    return {"shape": list(mask.shape), "data": base64.b64encode(bits.tobytes()).decode()}


def decoded_mask(mask: JSON) -> np.ndarray:
    """The booleans of a mask in JSON, in its shape."""
    bits = np.frombuffer(base64.b64decode(mask["data"]), np.uint8)
    count = math.prod(mask["shape"])
    return np.unpackbits(bits, count=count, bitorder="little").astype(bool).reshape(mask["shape"])


def check_page_data(data: Any) -> None:
    """Raises ValueError, which names the place, unless a page can show this data."""
    _check_object("data", data, ("schema", "version", "title", "captures"))
    if (data["schema"], data["version"]) != (SCHEMA, VERSION):
        raise ValueError(
            f"data must have schema {SCHEMA!r} and version {VERSION}; got {data['schema']!r} and"
            f" {data['version']!r}"
        )
    _check_text("title", data["title"])
    places = set()
    for index, capture in enumerate(_checked_list("captures", data["captures"])):
        where = f"captures[{index}]"
        _check_object(where, capture, ("panel", "step", "example", "attentions"))
        for name in ("panel", "step", "example"):
            _check_text(f"{where}.{name}", capture[name])
        place = tuple(capture[name] for name in ("panel", "step", "example"))
        if place in places:
            raise ValueError(f"{where} must differ from all others in panel, step or example")
        places.add(place)
        names = []
        for number, attention in enumerate(
            _checked_list(f"{where}.attentions", capture["attentions"])
        ):
            _check_attention(f"{where}.attentions[{number}]", attention)
            names.append(attention["name"])
        if len(set(names)) < len(names):
            raise ValueError(f"{where}.attentions must have different names; got {names}")


def _check_attention(where: str, attention: Any) -> None:
    fields = ("name", "query_tokens", "key_tokens", "mask", "arrays")
    _check_object(where, attention, fields)
    _check_text(f"{where}.name", attention["name"])
    for name in ("query_tokens", "key_tokens"):
        for index, token in enumerate(_checked_list(f"{where}.{name}", attention[name])):
            _check_text(f"{where}.{name}[{index}]", token)
    pairs = [len(attention["query_tokens"]), len(attention["key_tokens"])]
    arrays = attention["arrays"]
    if not isinstance(arrays, Mapping) or not arrays or not set(arrays) <= set(QUANTITIES):
        got = sorted(arrays) if isinstance(arrays, Mapping) else arrays
        raise ValueError(f"{where}.arrays must have some of {', '.join(QUANTITIES)}; got {got!r}")
    heads = set()
    for name, array in arrays.items():
        expected = pairs[:1] if name == "entropy" else pairs
        _check_array(f"{where}.arrays.{name}", array, expected)
        heads.add(array["shape"][0])
    if len(heads - {1}) > 1:
        raise ValueError(f"{where}.arrays must have the same number of heads, or 1; got {heads}")
    mask = attention["mask"]
    if mask is None:
        return
    _check_object(f"{where}.mask", mask, ("shape", "data"))
    _check_shape(f"{where}.mask", mask, pairs)
    if mask["shape"][0] not in {1, max(heads)}:
        raise ValueError(f"{where}.mask must have 1 or {max(heads)} heads; got {mask['shape'][0]}")
    _check_bytes(f"{where}.mask", mask["data"], -(-math.prod(mask["shape"]) // 8))


def _check_array(where: str, array: Any, expected: list[int]) -> None:
    _check_object(where, array, ("shape",))
    _check_shape(where, array, expected)
    count = math.prod(array["shape"])
    if "values" in array:
        values = array["values"]
        numbers = isinstance(values, Sequence) and all(
            value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            for value in values
        )
        if not numbers or len(values) != count:
            raise ValueError(f"{where}.values must be {count} numbers, null for NaN")
        return
    _check_object(where, array, ("dtype", "data"))
    if array["dtype"] not in _DTYPES:
        raise ValueError(f"{where}.dtype must be {' or '.join(_DTYPES)}; got {array['dtype']!r}")
    scale = array.get("scale", 1.0)
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"{where}.scale must be a positive number; got {scale!r}")
    _check_bytes(where, array["data"], count * _DTYPES[array["dtype"]].itemsize)


def _check_shape(where: str, array: JSON, expected: list[int]) -> None:
    shape = array["shape"]
    whole = isinstance(shape, list) and all(type(size) is int for size in shape)
    if not whole or shape[1:] != expected or shape[0] < 1:
        raise ValueError(
            f"{where}.shape must be [heads, {', '.join(map(str, expected))}]; got {shape}"
        )


def _check_bytes(where: str, text: Any, count: int) -> None:
    _check_text(f"{where}.data", text)
    try:
        size = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where}.data must be base64: {error}") from error
    if size != count:
        raise ValueError(f"{where}.data must be {count} bytes in base64; got {size}")


def _check_object(where: str, value: Any, fields: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object; got {type(value).__name__}")
    for field in fields:
        if field not in value:
            raise ValueError(f"{where} must have {field}; it has {', '.join(map(str, value))}")


def _check_text(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text; got {value!r}")


def _checked_list(where: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a list that is not empty; got {value!r}")
    return value
