"""The order of a model's attentions, from their names."""

from __future__ import annotations

import re


def computation_order(attention: str) -> tuple[bool, list[str], bool]:
    """A sort key: encoder before decoder, layer by layer, self before cross attention."""
    numbers = [number.zfill(4) for number in re.findall(r"\d+", attention)]
    return (not attention.startswith("encoder"), numbers, "cross_attention" in attention)
