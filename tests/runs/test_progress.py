"""What the user sees of a run, and that nobody sees it."""

import io
import sys
import types

import pytest

from attention_jax.runs import progress as progress_module
from attention_jax.runs.progress import Progress, end_of_output, say, warn


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    clock = types.SimpleNamespace(now=100.0)
    fake = types.SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(progress_module, "time", fake)
    return clock


def test_rate_and_time_left_leave_the_compiling_call_out(clock, capsys):
    progress = Progress("dot", start=0, total=100, seeds=3, peak=30.0)
    clock.now += 50  # compiles, and makes 10 steps
    assert progress.update(10, [2.0, 4.0, 3.0], 7e5) == {}
    assert progress.speed == {}
    assert capsys.readouterr().out == "dot: step 10/100, loss 3.0000\n"
    clock.now += 28  # a validation
    progress.begin()
    clock.now += 12
    of_seed = progress.update(40, [1.0, 2.0, 1.5], 3e4)
    assert of_seed == pytest.approx({"steps_per_second": 2.5, "tokens_per_second": 2500})
    # 60 steps are left; 30 have taken 40 s with the validation, and 12 s without.
    speed = {"steps_per_second": 7.5, "tokens_per_second": 7500, "flops_utilization": 0.25}
    assert progress.speed == pytest.approx(speed)
    out = capsys.readouterr().out
    assert out.startswith("dot: step 40/100, loss 1.5000, 7.5 steps/s, 7,500 tokens/s, 25.0%")
    assert out.endswith(" 80 s left\n")
    assert progress.seconds == pytest.approx(90)


def test_lines_are_seconds_apart_and_notes_and_the_last_always_come(clock, capsys):
    progress = Progress("dot", start=0, total=100, seeds=1)
    for step in range(10, 110, 10):
        clock.now += 3
        progress.update(step, [1.0])
        if step == 50:
            progress.note("bleu [red]31.4[/red]")
    lines = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "dot: step 40/100",
        "dot: bleu [red]31.4[/red]",
        "dot: step 80/100",
        "dot: step 100/100",
    ]


def test_seeds_that_diverge_are_reported_once(clock, capsys):
    progress = Progress("dot", start=0, total=9, seeds=3)
    for step, second in ((3, 2.0), (6, float("nan")), (9, float("nan"))):
        clock.now += 1
        progress.update(step, [1.0, second, 3.0])
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "dot: warning: at step 6 the loss of 1 of 3 seeds is not finite; a smaller learning"
        " rate may help",
        "dot: step 9/9, loss nan, 9 steps/s, 0 s left",
    ]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_lines_that_cannot_be_printed_are_lost_and_the_first_error_is_told_at_the_end(
    monkeypatch, name
):
    errors = [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")]

    class Full(io.StringIO):
        def write(self, text):
            raise next(left)

    left = iter(errors)
    monkeypatch.setattr(sys, name, Full())
    if name == "stdout":
        Progress("dot", start=0, total=1, seeds=1).update(1, [1.0])
        say("more")
        assert end_of_output() is errors[0]
    else:
        warn("full")
        say("more", error=True)
    assert next(left, None) is None
    assert end_of_output() is None


def test_an_output_that_is_closed_lacks_a_letter_or_only_writes_loses_nothing_else(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    say("0.5 ± 0.1 [red]")
    assert out.buffer.getvalue() == b"0.5 ? 0.1 [red]\n"
    for closed in (out, None):
        out.close()
        monkeypatch.setattr(sys, "stdout", closed)
        say("more")
    lines: list[str] = []
    only_writes = types.SimpleNamespace(write=lines.append, flush=lambda: None)  # as loggers do
    monkeypatch.setattr(sys, "stdout", only_writes)
    say("more")
    assert "".join(lines) == "more\n"
