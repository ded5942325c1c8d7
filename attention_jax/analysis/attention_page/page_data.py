"""The data of a page: one JSON document, which README.md describes.

Arrays are base64 of little-endian numbers, of 32 bits, or of 16 bits with one factor and
compressed. A writer in another language may write them as plain lists instead.
"""

import base64
import zlib
from typing import Any, Literal

import numpy as np

JSON = dict[str, Any]
Precision = Literal["float32", "float16"]

# The format that a page can read, and its version.
SCHEMA = "attention_jax attention page"
VERSION = 1
# The quantities that a page can show, in its order.
QUANTITIES = ("weights", "logits", "entropy", "dlogits", "rollout")


def encoded_numbers(array: np.ndarray, dtype: str) -> JSON:
    """An array as JSON.

    Args:
        array: float [...].
        dtype: "float32", or "float16": then the largest magnitude becomes 1, and numbers keep three
            significant digits down to 6e-5 of it.
    """
    encoding: JSON = {"dtype": dtype}
    array = np.asarray(array, "<f4")
    data = array.tobytes()
    if dtype == "float16":
        finite = np.abs(array[np.isfinite(array)])
        scale = float(np.max(finite, initial=0)) or 1.0
        data = zlib.compress((array / np.float32(scale)).astype("<f2").tobytes())
        encoding |= {"scale": scale, "compression": "deflate"}
    return {"shape": list(array.shape), **encoding, "data": base64.b64encode(data).decode()}


def encoded_mask(mask: np.ndarray) -> JSON:
    """A boolean array as JSON: one bit per pair, the first in the lowest bit of its byte."""
    bits = np.packbits(np.ravel(mask), bitorder="little")
    return {"shape": list(mask.shape), "data": base64.b64encode(bits.tobytes()).decode()}
