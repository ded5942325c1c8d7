"""How a case of the fuzzing ends: in the right result, or in the error that the docs promise.

A `Kind` is a public function with a strategy of arguments, good and bad, and an independent side
that says in NumPy what must come of them: a result, or a refusal that names the argument. There is
no third way out, so that a bare error from within JAX, a NaN that nobody may see and a mistake that
passes in silence all are failures.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

import attention_jax

LIBRARY = Path(attention_jax.__file__).parent
LONGEST_MESSAGE = 600  # characters; those that list all scores or parameters are the longest

RESULT, ERROR = "right result", "documented error"


class Refused(Exception):  # noqa: N818 -- it is no error that a mistake is refused
    """What the independent side raises for arguments that must not be served.

    Args:
        names: of arguments; the error must name one of them.
    """

    def __init__(self, *names: str):
        super().__init__(*names)
        self.names = names


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is fuzzed.

    Attributes:
        name: of the function or the command.
        cases: draws arguments.
        call: what the library makes of a case.
        expect: what must come of it, without the library; or `Refused`.
        compare: (case, got, expected) -> AssertionError unless they agree.
        many: how many cases the long run draws.
        few: how many the ordinary tests draw.
    """

    name: str
    cases: st.SearchStrategy
    call: Callable[[Any], Any]
    expect: Callable[[Any], Any]
    compare: Callable[[Any, Any, Any], None]
    many: int
    few: int = 10

    def judge(self, case: Any) -> str:
        """Runs one case; which way it ended, or an exception that says what is wrong."""
        try:
            expected = self.expect(case)
        except Refused as refused:
            check_refusal(lambda: self.call(case), refused.names)
            return ERROR
        self.compare(case, self.call(case), expected)
        return RESULT


def check_refusal(call: Callable[[], Any], names: tuple[str, ...]) -> None:
    """AssertionError unless the call raises a ValueError of ours, one line that names one of these.

    Raised by JAX or NumPy it would tell of their innards, not of the user's argument.
    """
    try:
        got = call()
    except ValueError as raised:
        error = raised
    else:
        raise AssertionError(f"{' or '.join(names)} should have been refused; got {got!r:.200}")
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    assert LIBRARY in raised_in.parents, f"not our error but {raised_in}'s: {error!r}"
    message = str(error)
    assert "\n" not in message, f"more than one line: {message}"
    assert len(message) <= LONGEST_MESSAGE, f"{len(message)} characters: {message}"
    assert any(name in message for name in names), f"names none of {names}: {message}"


def mistakes(name: str, calls: list[tuple], call: Callable[[Any], Any]) -> Kind:
    """Each of a list of calls that must be refused, whose last entry is what the error names."""

    def refuse(case: tuple) -> Any:
        names = case[-1]
        raise Refused(*([names] if isinstance(names, str) else names))

    few = min(len(calls), 60)
    return Kind(name, st.sampled_from(calls), call, refuse, _never, len(calls), few)


def _never(*_: Any) -> None:
    raise AssertionError("nothing is served, and nothing compared")


def run(kind: Kind, count: int, note: Callable[[Any, str | Exception], None]) -> None:
    """Draws `count` cases, the same ones each time, and tells `note` how each ended."""

    @hypothesis.settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(kind.cases)
    def judge(case: Any) -> None:
        try:
            ending: str | Exception = kind.judge(case)
        except Exception as error:
            ending = error
        note(case, ending)

    judge()


def check(kind: Kind, count: int) -> Counter:
    """Runs so many cases, and raises what is wrong with the first that ends neither way."""
    endings: Counter = Counter()

    def note(case: Any, ending: str | Exception) -> None:
        if isinstance(ending, Exception):
            raise AssertionError(f"{kind.name}: {case!r}") from ending
        endings[ending] += 1

    run(kind, count, note)
    return endings
