"""A score or normaliser as config.json stores it, by which a run recognises its own."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax

from attention_jax.core.programs import Known

JSON = dict[str, Any]


def describe(part: Any) -> JSON:
    """The class and fields of a score or normaliser; of a user's, also the digest of its program.

    Args:
        part: a part of this library, or a user's from `known_score` or `known_normalizer`.

    >>> from attention_jax.scores import get_score
    >>> describe(get_score("scaled(scale=0.5)"))
    {'class': 'attention_jax.scores.ScaledDot', 'fields': 'ScaledDot(scale=0.5)'}
    """
    cls = part.__class__
    module = str(cls.__module__)
    for room in ("attention_jax.scores", "attention_jax.normalizers"):
        if module.startswith(f"{room}."):  # runs outlive a move within the library
            module = room
    # The address of an object differs between processes.
    fields = re.sub(r" at 0x[0-9a-f]+", "", repr(part))
    description = {"class": f"{module}.{cls.__qualname__}", "fields": fields}
    if type(part) is Known:
        description |= {"program": part.digest, "jax": jax.__version__}
    return description


def check_description(setting: str, part: Any, stored: JSON) -> None:
    """Raises ValueError unless `part` is what `describe` made `stored` of.

    A part of a user is the same if its program is, whatever its class and fields are called.
    Programs cannot be compared between versions of JAX: a difference is a warning then.

    Args:
        setting: how the part was named, for the error.
        part: as in `describe`.
        stored: from config.json.
    """
    now = describe(part)
    program = now.get("program")
    if program is not None and stored.get("program") == program:
        return
    restore = "; restore what the run was trained with, or train a new run in another folder"
    names = ("class", "fields")
    if any(stored.get(name) != now[name] for name in names):
        before, after = (str(each.get("fields")) for each in (stored, now))
        if before == after:
            before, after = (": ".join(str(each.get(n)) for n in names) for each in (stored, now))
        raise ValueError(
            f"{setting} was {before} when this run was trained, and is {after} now{restore}"
        )
    if program is None:
        return
    text = (
        f"{setting} has another formula than when this run was trained: its program is"
        f" {str(stored.get('program'))[:12]} in config.json, and {program[:12]} now"
    )
    if stored.get("jax") == now["jax"]:
        raise ValueError(text + restore)
    warnings.warn(
        f"{text}; this may be because jax was {stored.get('jax')} then, and is {now['jax']} now",
        stacklevel=2,
    )
