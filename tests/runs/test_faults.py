"""Runs that are killed, damaged, out of room or met by others end right, or say why they cannot."""

import pytest
from faults.findings import OTHER, TRACEBACK, UNCLEAR, WRONG, Ended, Findings, Result
from faults.processes import Place
from faults.rows import ROWS, conduct

REPEATS = {"two threads at one instant": 20, "a start that was cut off": 3}  # of others, 1


@pytest.fixture(scope="module")
def place():
    with Place() as made:
        yield made


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=row.name.replace(" ", "_"), marks=() if row.quick else pytest.mark.slow
        )
        for row in ROWS
    ],
)
def test_nothing_is_lost_and_everything_is_told(row, place):
    found = conduct(row, place, REPEATS.get(row.name, 1))
    assert found.endings, "no case came to an end"
    if found.times == 0:
        pytest.skip("; ".join(found.endings))
    assert found.defects == []


def test_wrong_values_and_unclear_messages_are_seen():
    """The judge itself: what a defect is, on made-up ends."""

    def kinds(judge):
        found = Findings()
        judge(found)
        return [kind for kind, _ in found.defects]

    good = Result({"a": "1", "b": "2"}, b"x")
    assert kinds(lambda f: f.same(Result({"b": "2", "a": "1"}, b"x"), good)) == []
    assert kinds(lambda f: f.same(Result({"a": "1", "b": "3"}, b"x"), good)) == [WRONG]
    assert kinds(lambda f: f.same(Result({"a": "1"}, b"y"), good)) == [WRONG, WRONG]
    assert kinds(lambda f: f.same(Result({**good.values, "c": "4"}, b"x"), good)) == [WRONG]
    assert kinds(lambda f: f.said(Ended(0, "well", ""), status=0)) == []
    assert kinds(lambda f: f.said(Ended(2, "", "error: a\n"), status=2, line="error: .")) == []
    assert kinds(lambda f: f.said(Ended(2, "", "error: a\nb\n"), status=2, line="error: .")) == [
        UNCLEAR
    ]
    assert kinds(lambda f: f.said(Ended(1, "", "error: a\n"), status=2, line="error: .")) == [OTHER]
    trace = "Traceback (most recent call last):\nerror: a\n"
    assert kinds(lambda f: f.said(Ended(2, "", trace), status=2, line="error: .")) == [TRACEBACK]
    assert kinds(lambda f: f.steps_lost(10, allowed=10)) == []
    assert kinds(lambda f: f.steps_lost(11, allowed=10)) == [OTHER]
