"""What config.json stores of a part, and whether a part is still what was stored."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

from attention_jax.core.names import module_of
from attention_jax.parts.digests import ADDRESS
from attention_jax.parts.programs import Known
from attention_jax.parts.samples import Numbers, same_numbers

JSON = dict[str, Any]


def identity(part: Any) -> str:
    """What identifies a part of a run: its class and fields, or its program and its `init`."""
    return f"{part.digest} {part.contract.trace_init()}" if type(part) is Known else repr(part)


def known_settings(settings: Any, parts: Iterable[Any]) -> Known:
    """Settings as a static argument, equal to others only if all of these parts are."""
    digest = " ".join(map(identity, parts))
    return Known(settings, (digest, type(settings), settings), digest)


def describe(part: Any) -> JSON:
    """The class and fields of a score or normaliser; of a user's, also its program.

    The program is a digest, which knows it exactly, that of `init`, and numbers that it gives, by
    which a program that was written anew is compared.

    Args:
        part: a part of this library, or a user's that is `Known`.

    >>> from attention_jax.scores import get_score
    >>> describe(get_score("scaled(scale=0.5)"))
    {'class': 'attention_jax.scores.ScaledDot', 'fields': 'ScaledDot(scale=0.5)'}
    """
    return _description(part) | ({"numbers": part.contract.sample()} if type(part) is Known else {})


def _description(part: Any) -> JSON:
    cls = part.__class__
    fields = ADDRESS.sub("", repr(part))
    description = {"class": f"{module_of(cls)}.{cls.__qualname__}", "fields": fields}
    if type(part) is Known:
        digests = {"program": part.digest, "init": part.contract.trace_init()}
        description |= digests | {"jax": jax.__version__}
    return description


def check_description(setting: str, part: Any, stored: JSON) -> None:
    """Raises ValueError unless `part` is what `describe` made `stored` of.

    A part of a user is the same if its program is, whatever its class and fields are called. If its
    program is another and gives the same numbers, it counts as the same, with a warning. Earlier
    versions of this library stored neither numbers nor `init`: there another program is refused, or
    a warning if it may be because of the version of JAX.

    Args:
        setting: how the part was named, for the error.
        part: as in `describe`.
        stored: from config.json.
    """
    now = _description(part)
    changed = {name for name in now if stored.get(name) != now[name]}
    if "numbers" not in stored:
        changed -= {"init"}
    if not changed or ("program" in now and changed.isdisjoint(("program", "init"))):
        return
    text = f"{setting} was {_words(stored)} when this run was trained, and is {_words(now)} now"
    numbers = stored.get("numbers") if "program" in now else None
    # Without numbers, the version of JAX may be why another program has the same class and fields.
    jax_then = str(stored.get("jax")) if changed == {"program", "jax"} else ""
    check_same(text, numbers, lambda: part.contract.sample(), jax_then)


def check_same(
    text: str,
    stored: Numbers | None,
    sample: Callable[[], Numbers],
    jax_then: str,
    same: Callable[[Numbers, Numbers], bool] = same_numbers,
) -> None:
    """Raises ValueError for a program that has changed; warns if it gives the same numbers.

    Args:
        text: what it was, and what it is now.
        stored: its numbers of before; None for a run of a version that stored none.
        sample: gives its numbers of now.
        jax_then: the version of JAX that may be why another program does the same; "" for none.
        same: compares the numbers.
    """
    if stored and same(stored, sample()):
        warnings.warn(f"{text}, which gives the same numbers", stacklevel=3)
    elif jax_then and not stored:
        versions = f"jax was {jax_then} then, and is {jax.__version__} now"
        warnings.warn(f"{text}; this may be because {versions}", stacklevel=3)
    else:
        text += ", which gives other numbers" if stored else ""
        cure = "restore what the run was trained with, or train a new run in another folder"
        raise ValueError(f"{text}; {cure}")


def _words(description: JSON) -> str:
    program = f", program {str(description['program'])[:12]}" if "program" in description else ""
    return f"{description.get('fields')} (class {description.get('class')}{program})"
