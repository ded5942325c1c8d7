"""Fuzz tests of the functions: a few cases of each kind; `python tests/fuzz` runs all."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from kinds import FUNCTIONS
from outcomes import ERROR, RESULT, Kind, Refused, check

import attention_jax as aj


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FUNCTIONS, ids=lambda kind: kind.name)
def test_a_result_is_right_or_refused(kind, quick):
    count = kind.count(quick)
    endings = check(kind, count)
    assert sum(endings.values()) >= min(count, 3)


# --- the judge: it must notice each of these failures ---


def _refusal(case):
    raise Refused("size")


def _raise(error):
    raise error


def _same(case, got, expected):
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("call", "expect", "message"),
    [
        (lambda case: case + 1, lambda case: case, "assert"),
        (lambda case: _raise(ValueError("size must be 3")), lambda case: case, "size must be 3"),
        (lambda case: case, _refusal, "should have been refused"),
        (lambda case: jnp.reshape(jnp.ones(3), (2, 2)), _refusal, "reshape"),
        (lambda case: _raise(ValueError("size must be 3")), _refusal, "not our error"),
        (lambda case: aj.causal_mask("x"), _refusal, "names none of"),
    ],
)
def test_the_judge_notices_failures(call, expect, message):
    kind = Kind("own", st.just(1), call, expect, _same, 1, 1)
    with pytest.raises(AssertionError) as caught:
        check(kind, 1)
    assert message in f"{caught.value} {caught.value.__cause__!r}"


def test_a_few_cases_go_without_the_simplest():
    cases = []
    kind = Kind("own", st.integers(), cases.append, lambda case: None, _same, 1, few=5)
    check(kind, 3)
    assert len(cases) == 3
    assert 0 not in cases
    check(kind, 5)
    assert cases[3] == 0


def test_the_judge_accepts_right_outcomes():
    good = Kind("own", st.just(1), lambda case: case, lambda case: case, _same, 1, 1)
    assert check(good, 1) == {RESULT: 1}
    bad = Kind("own", st.just(1), lambda case: aj.BlockSizes(0), _refusal, _same, 1, 1)
    with pytest.raises(AssertionError):  # it names "query"
        check(bad, 1)
    named = Kind("own", st.just(1), bad.call, lambda case: _raise(Refused("query")), _same, 1, 1)
    assert check(named, 1) == {ERROR: 1}
