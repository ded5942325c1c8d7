"""Fuzz tests of the command lines: a few cases of each kind; `python tests/fuzz` runs all."""

import pytest
from command_line_kinds import Run, check_begins, check_mistake
from kinds import COMMANDS
from outcomes import check


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.name)
def test_a_command_begins_or_exits_with_2(kind, quick):
    count = kind.count(quick)
    endings = check(kind, count)
    assert sum(endings.values()) == count


@pytest.mark.parametrize(
    "ended",
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
def test_check_mistake_refuses_other_endings(ended):
    with pytest.raises(AssertionError):
        check_mistake(ended)


@pytest.mark.parametrize("ended", [Run(2, "error", [], {}), Run(0, "Traceback", [], {})])
def test_check_begins_refuses_other_endings(ended):
    with pytest.raises(AssertionError):
        check_begins(ended)
