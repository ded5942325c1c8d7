"""N-gram models of bytes with interpolated Kneser-Ney smoothing: a baseline of language models.

After the n - 1 bytes h, whose last n - 2 are h', a model of order n gives the byte w the
probability

    P_n(w | h) = (max(c(h w) - D, 0) + D N(h) P_{n-1}(w | h')) / C(h),    P_0(w) = 1 / 256,

and P_{n-1}(w | h') where it has not read h. c(h w) is the count of the n-gram in the highest order,
and in a lower order the number of different bytes before it. C(h) is the sum of c(h w) over w; N(h)
is the number of different w after h; D = 0.75. The probabilities of the 256 bytes sum to 1.

Source: Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling",
section 2.7; there D is estimated from the counts.
"""

from typing import Any

import numpy as np

DISCOUNT = 0.75


def probabilities(read: bytes, text: bytes, order: int) -> tuple[np.ndarray, int]:
    """Returns P(byte | the order - 1 bytes before it) for the bytes of a text, and a size.

    Args:
        read: the text from which the model counts.
        text: T bytes; the first order - 1 have no probability, as their context is not complete.
        order: n, at least 1.

    Returns:
        probabilities [T - n + 1]; and the number of n-grams of all orders, the model's parameters.
    """
    found, size = np.full(len(text) - order + 1, 1 / 256), 0
    for n in range(1, order + 1):
        if n == order:
            grams, counts = np.unique(_codes(read, n), return_counts=True)
        else:
            longer = np.unique(_codes(read, n + 1))
            grams, counts = np.unique(longer % 256**n, return_counts=True)
        contexts, first = np.unique(grams // 256, return_index=True)
        asked = _codes(text, n)[order - n :]
        count = _at(grams, counts, asked)
        total = _at(contexts, np.add.reduceat(counts, first), asked // 256)
        different = _at(contexts, np.diff(np.append(first, len(grams))), asked // 256)
        more = np.maximum(count - DISCOUNT, 0) + DISCOUNT * different * found
        found, size = np.where(total > 0, more / np.maximum(total, 1), found), size + len(grams)
    return found, size


def rows_of(read: bytes, text: bytes, orders: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each order: bits per character of a text, and the number of n-grams."""
    rows = []
    for order in orders:
        found, size = probabilities(read, text, order)
        bits = -np.log2(found).sum() / len(text[order - 1 :].decode(errors="ignore"))
        rows.append({"order": order, "bits": round(float(bits), 4), "parameters": size})
    return rows


def _codes(text: bytes, n: int) -> np.ndarray:
    """Each n-gram of a text as a number in base 256, [T - n + 1]."""
    letters = np.frombuffer(text, np.uint8).astype(np.int64)
    return sum(letters[i : len(text) - n + 1 + i] * 256 ** (n - 1 - i) for i in range(n))


def _at(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The value of each asked key, 0 for a key that is not there; `keys` are sorted."""
    index = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[index] == asked, values[index], 0)
