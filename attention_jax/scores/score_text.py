"""The text that names a score, such as "additive" or "softcap(score=general, cap=20.0)"."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import io
import re
import tokenize
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ScoreText:
    """A score as it is written.

    Attributes:
        name: a key of `SCORES`, or "module:Name".
        arguments: field -> Python literal or `ScoreText`; None if the text has no parentheses.
    """

    name: str
    arguments: Mapping[str, Any] | None = None


def parse_score(text: str, noun: str = "score") -> ScoreText:
    """Reads a name, or a call of a name with keyword arguments; `noun` is the word in errors.

    The arguments are Python literals, names of scores, or such calls. Nothing is evaluated.

    Raises:
        ValueError: the text is neither a name nor such a call.

    >>> parse_score("softcap(score=my_scores:Distance, cap=20.0)").arguments
    {'score': ScoreText(name='my_scores:Distance', arguments=None), 'cap': 20.0}
    """
    if "(" not in text:
        return ScoreText(text)
    try:
        node = ast.parse(_with_operators(text.strip()), mode="eval").body
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
        raise _syntax_error(text, noun, "it is no Python call") from error
    score = _score_of(node, text, noun)
    if score is None or score.arguments is None:
        raise _syntax_error(text, noun, "it is no call of a name")
    return score


def score_folder(text: str) -> str:
    """A name for the folder of runs with the score of this text; other texts have other names.

    >>> score_folder("my_scores:Distance")
    'my_scores-Distance'
    >>> score_folder("additive(hidden_dim=32)")
    'additive-hidden_dim-32-e6cc57cc'
    """
    name = text.replace(":", "-")
    if re.fullmatch(r"[\w.-]+", name):
        return name
    # The words alone would be equal for cap=1 and cap=-1.
    words = re.sub(r"[^\w.]+", "-", name).strip("-")[:80]
    return f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _with_operators(text: str) -> str:
    """The text with "@" for each ":" between names: module @ Name is a Python expression."""
    columns = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string == "@":
            raise ValueError("@ stands for the colon below")
        if token.string == ":":
            columns.append(token.start)
    lines = [list(line) for line in text.splitlines()]
    for row, column in columns:
        lines[row - 1][column] = "@"
    return "\n".join("".join(line) for line in lines)


def _score_of(node: ast.expr, text: str, noun: str) -> ScoreText | None:
    """The score of an expression: [module @] Name[(field=value, ...)]; None if it is no score."""
    module = ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        module, node = f"{ast.unparse(node.left)}:", node.right
    call = node if isinstance(node, ast.Call) else None
    name = node if call is None else call.func
    if not isinstance(name, ast.Name) or not re.fullmatch(r"([\w.]+:)?", module):
        return None
    if call is None:
        return ScoreText(f"{module}{name.id}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise _syntax_error(text, noun, f"{module}{name.id} has an argument without a name")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        assert keyword.arg is not None
        if keyword.arg in arguments:
            raise _syntax_error(text, noun, f"{keyword.arg} is given twice")
        arguments[keyword.arg] = _value_of(keyword.arg, keyword.value, text, noun)
    return ScoreText(f"{module}{name.id}", arguments)


def _value_of(field: str, node: ast.expr, text: str, noun: str) -> Any:
    score = _score_of(node, text, noun)
    if score is not None:
        return score
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        written = ast.unparse(node).replace(" @ ", ":")
        raise ValueError(
            f"{noun} {text!r}: {field} must be a Python literal or a {noun}; got {written}"
        ) from None


def _syntax_error(text: str, noun: str, reason: str) -> ValueError:
    return ValueError(
        f"{noun} must be name(field=value, ...) or module:Name(field=value, ...), where values are"
        f" Python literals or {noun}s; got {text!r}: {reason}"
    )
