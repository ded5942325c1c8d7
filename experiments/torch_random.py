"""PyTorch's random numbers in NumPy, to reproduce the numbers that a source prints.

`torch.manual_seed` seeds the Mersenne Twister as NumPy's legacy `RandomState` does. For 16 numbers
or more, `torch.randn` on the CPU turns blocks of 16 uniform float32 numbers of 24 bits into normal
numbers (Box and Muller, the first eight with the last eight); for fewer, pairs of doubles of 53
bits.
"""

from __future__ import annotations

import math

import numpy as np

_BLOCK = 16


class TorchRandom:
    """`torch.randn` on the CPU after `torch.manual_seed(seed)`, up to float32 rounding.

    >>> TorchRandom(0).randn(2).round(4)
    array([ 1.541 , -0.2934], dtype=float32)
    """

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed)
        self._left_over: list[float] = []  # numbers of the last pair that are not yet used

    def randn(self, *shape: int) -> np.ndarray:
        """Returns the next normal numbers, float32 of the given shape."""
        count = math.prod(shape)
        if count < _BLOCK:
            return np.array([self._next() for _ in range(count)], np.float32).reshape(shape)
        normal, remainder = self._uniform(count), count % _BLOCK
        normal[: count - remainder] = _box_muller(normal[: count - remainder])
        if remainder:  # the last 16 are drawn again, as one block
            normal[-_BLOCK:] = _box_muller(self._uniform(_BLOCK))
        return normal.reshape(shape)

    def _bits(self, count: int) -> np.ndarray:
        return self._state.randint(0, 2**32, size=count, dtype=np.uint32)

    def _uniform(self, count: int) -> np.ndarray:
        return (self._bits(count) & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2**-24)

    def _next(self) -> float:
        if not self._left_over:
            high, low = self._bits(4).astype(np.uint64).reshape(2, 2).T
            bits = ((high << np.uint64(32)) | low) & np.uint64(2**53 - 1)
            angle, radius = bits.astype(np.float64) * 2.0**-53
            radius, angle = math.sqrt(-2 * math.log1p(-radius)), 2 * math.pi * angle
            self._left_over = [radius * math.sin(angle), radius * math.cos(angle)]
        return self._left_over.pop()


def _box_muller(uniform: np.ndarray) -> np.ndarray:
    first, second = np.moveaxis(uniform.reshape(-1, 2, _BLOCK // 2), 1, 0)
    radius, angle = np.sqrt(-2 * np.log(1 - first)), np.float32(2 * np.pi) * second
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
