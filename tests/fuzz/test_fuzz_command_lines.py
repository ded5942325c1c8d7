"""The first cases of every command line that is fuzzed; `python tests/fuzz` runs all of them."""

import pytest
from command_line_kinds import Run, begins, check_mistake
from kinds import COMMANDS
from outcomes import ERROR, RESULT, check


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.name)
def test_begins_or_status_2(kind):
    endings = check(kind, kind.few)
    assert sum(endings.values()) == kind.few
    assert set(endings) <= {RESULT, ERROR}


@pytest.mark.parametrize(
    "found",
    [
        Run(1, "error", [], {}),
        Run(0, "fine", [], {}),
        Run("begun", "", [], {}),
        Run(2, "", [], {}),
        Run(2, "Traceback (most recent call last):", [], {}),
        Run(2, "error", ["run"], {}),
        Run(2, "error" * 1000, [], {}),
    ],
)
def test_what_is_no_proper_mistake(found):
    with pytest.raises(AssertionError):
        check_mistake(found)


@pytest.mark.parametrize("found", [Run(2, "error", [], {}), Run(0, "Traceback", [], {})])
def test_what_is_no_beginning(found):
    with pytest.raises(AssertionError):
        begins(found)
