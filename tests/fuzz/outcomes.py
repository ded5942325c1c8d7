"""Outcomes of a fuzz case: the right result, or the error that the documentation promises.

A `Kind` is a public function with a strategy that draws good and bad arguments, and an independent
NumPy side that determines what the function must do: return a result, or raise an error that names
the argument. Everything else is a failure: a bare error from inside JAX, a NaN where none may be,
or a mistake that is accepted silently.
"""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

import attention_jax

LIBRARY = Path(attention_jax.__file__).parent
LONGEST_MESSAGE = 600  # characters; the longest messages list all scores or parameters

RESULT, ERROR = "right result", "documented error"


class Refused(Exception):  # noqa: N818 -- a refusal is an expected outcome, not an error
    """The independent side raises it for arguments that the library must refuse.

    Args:
        names: names of arguments; the library's error must contain one of them.
    """

    def __init__(self, *names: str):
        super().__init__(*names)
        self.names = names


@dataclasses.dataclass(frozen=True)
class Kind:
    """A function or a command to fuzz.

    Attributes:
        name: name of the function or the command.
        cases: strategy that draws arguments.
        call: calls the library with a case.
        expect: computes the expected result without the library, or raises `Refused`.
        compare: (case, got, expected); raises AssertionError unless the results agree.
        many: number of cases in the long run.
        few: number of cases in the slow tests; the fast ones have a quarter of them.
    """

    name: str
    cases: st.SearchStrategy
    call: Callable[[Any], Any]
    expect: Callable[[Any], Any]
    compare: Callable[[Any, Any, Any], None]
    many: int
    few: int = 10

    def count(self, quick: bool) -> int:
        """Returns the number of cases of a slow test, `few`, or of a quick one, a quarter of them.

        Cases that must all be refused compile nothing, so that a quick test has all of them too.
        """
        return self.few if not quick or self.compare is never else max(self.few // 4, 1)

    def judge(self, case: Any) -> str:
        """Runs one case; returns `RESULT` or `ERROR`, or raises what is wrong."""
        try:
            expected = self.expect(case)
        except Refused as refused:
            check_refusal(lambda: self.call(case), refused.names)
            return ERROR
        self.compare(case, self.call(case), expected)
        return RESULT


def check_refusal(call: Callable[[], Any], names: tuple[str, ...]) -> None:
    """Asserts that the call raises our ValueError: one line that contains one of the names.

    An error that JAX or NumPy raises would describe their internals, not the user's argument.
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
    """Returns a kind of calls that must be refused; each ends with the names for the error."""

    def refuse(case: tuple) -> Any:
        names = case[-1]
        raise Refused(*([names] if isinstance(names, str) else names))

    few = min(len(calls), 60)
    return Kind(name, st.sampled_from(calls), call, refuse, never, len(calls), few)


def never(*_: Any) -> None:
    raise AssertionError("every case must be refused; there is nothing to compare")


def run(
    kind: Kind, count: int, note: Callable[[Any, str | Exception], None], skipped: int = 0
) -> None:
    """Draws `count` cases, the same in every run, and calls `note` with each outcome.

    The first `skipped` cases are drawn too, but not judged.
    """
    drawn = itertools.count()

    @hypothesis.settings(
        max_examples=skipped + count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(kind.cases)
    def judge(case: Any) -> None:
        if next(drawn) < skipped:
            return
        try:
            ending: str | Exception = kind.judge(case)
        except Exception as error:
            ending = error
        note(case, ending)

    judge()


def check(kind: Kind, count: int) -> Counter:
    """Runs `count` cases, and raises the first defect; returns the number of each outcome.

    Hypothesis draws the simplest case first: one example, without a mask and a bias. A test of
    fewer cases than `few`, often a single one, leaves it out.
    """
    endings: Counter = Counter()

    def note(case: Any, ending: str | Exception) -> None:
        if isinstance(ending, Exception):
            raise AssertionError(f"{kind.name}: {case!r}") from ending
        endings[ending] += 1

    run(kind, count, note, skipped=int(count < kind.few))
    return endings
