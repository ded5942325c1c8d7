"""Looks up what a kernel computes in place of a score's `pair`.

Each kernel has a `functools.singledispatch` function with an entry for each class of scores that it
knows.
"""

from typing import Any

from attention_jax.parts import Known
from attention_jax.scores import Score


def form_of(forms: Any, score: Score, *arguments: Any) -> Any:
    """`forms(score, *arguments)`, by the nearest base class with an entry and the score's own pair.

    A class that replaces the `pair` of a class with an entry does not inherit the entry; one that
    defines the `pair` which such a class leaves open does.

    Args:
        forms: a `functools.singledispatch` function.
        score: as the implementations get it; the function gets the part that a user wrote.
        arguments: further ones.
    """
    part = score.part if type(score) is Known else score
    for base in type(part).__mro__:
        own_pair = getattr(base, "pair", Score.pair) in (type(part).pair, Score.pair)
        if base in forms.registry and own_pair:
            return forms.registry[base](part, *arguments)
    raise TypeError(f"{forms.__name__} has no entry for object")  # singledispatch always has one
