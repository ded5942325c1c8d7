"""What protects parts that a user writes: scores, masks, biases, normalisers.

Each is traced and checked, and known by its program from then on. No room below this one knows that
there are users.
"""

from attention_jax.parts.descriptions import check_description, describe, identity
from attention_jax.parts.normalizers import known_normalizer
from attention_jax.parts.positions import known_positions
from attention_jax.parts.programs import Known
from attention_jax.parts.scores import known_score

__all__ = [
    "Known",
    "check_description",
    "describe",
    "identity",
    "known_normalizer",
    "known_positions",
    "known_score",
]
