"""A batch of any sequence-to-sequence task."""

from __future__ import annotations

from typing import NamedTuple

import jax

Array = jax.Array


class Batch(NamedTuple):
    """Padded pairs of sequences; S is the longest source, T the longest target with its EOS."""

    source: Array  # int32 [B, S], then PAD
    source_lengths: Array  # int32 [B]
    target_inputs: Array  # int32 [B, T]: SOS, then the target, then PAD
    targets: Array  # int32 [B, T]: the target, then EOS, then PAD
    target_lengths: Array  # int32 [B], EOS included
