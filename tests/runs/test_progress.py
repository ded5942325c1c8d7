"""What the user sees of a run: lines in a pipe, a bar on a terminal."""

import types

import pytest

from attention_jax.runs import progress as progress_module
from attention_jax.runs.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    clock = types.SimpleNamespace(now=100.0)
    fake = types.SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(progress_module, "time", fake)
    return clock


@pytest.fixture
def pipe(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")


def test_rate_and_time_left_leave_the_compiling_call_out(clock, pipe, capsys):
    progress = Progress("dot", start=0, total=100, seeds=3)
    assert progress.rate is None
    with progress:
        clock.now += 50  # compiles, and makes 10 steps
        progress.update(10, {"loss": [2.0, 4.0]})
        assert progress.rate is None
        assert capsys.readouterr().out == "dot: step 10/100, loss 3.0000\n"
        clock.now += 12
        progress.update(40, {"loss": [1.0, 2.0]})
        assert progress.rate == pytest.approx(30 * 3 / 12)
        # 60 steps are left, at 2.5 steps of all seeds a second: 24 s.
        assert capsys.readouterr().out == (
            "dot: step 40/100, loss 1.5000, 7.5 steps/s, 24 s left\n"
        )
    assert progress.seconds == pytest.approx(62)


@pytest.mark.parametrize(("steps", "shown"), [(2997, "1498"), (211, "106"), (3, "1.5")])
def test_rates_have_three_digits_or_are_whole(clock, pipe, capsys, steps, shown):
    with Progress("dot", start=0, total=10 + steps, seeds=1) as progress:
        progress.update(10, {"loss": [1.0]})
        clock.now += 2
        progress.update(10 + steps, {"loss": [1.0]})
    assert f", {shown} steps/s, " in capsys.readouterr().out


def test_lines_are_seconds_apart_and_the_last_always_comes(clock, pipe, capsys):
    with Progress("dot", start=0, total=100, seeds=1) as progress:
        for step in range(10, 110, 10):
            clock.now += 3
            progress.update(step, {"loss": [1.0]})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "dot: step 40/100",
        "dot: step 80/100",
        "dot: step 100/100",
    ]
    assert lines[-1].endswith("0 s left")


def test_a_resumed_run_counts_its_own_steps(clock, pipe):
    progress = Progress("dot", start=60, total=100, seeds=1)
    clock.now += 5
    progress.update(70, {"loss": [1.0]})
    clock.now += 2
    progress.update(80, {"loss": [1.0]})
    assert progress.rate == pytest.approx(5)


def test_loss_that_is_not_finite(clock, pipe, capsys):
    with Progress("dot", start=0, total=5, seeds=1) as progress:
        progress.update(5, {"loss": [float("nan"), 1.0]})
    assert capsys.readouterr().out.endswith("\ndot: step 5/5, loss nan\n")


def test_no_control_characters_in_a_pipe(pipe, capsys):
    with Progress("dot", start=0, total=5, seeds=1) as progress:
        progress.update(5, {"loss": [1.0]})
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out
    assert captured.err == ""


def test_a_bar_on_a_terminal(terminal, capsys):
    with Progress("dot", start=2, total=7, seeds=1) as progress:
        progress.update(5, {"loss": [0.25]})
        progress.update(7, {"loss": [0.125]})
    out = capsys.readouterr().out
    assert "\x1b" in out
    assert "7/7" in out
    assert "loss 0.1250" in out
    assert "dot: step" not in out


def test_a_note_is_a_line_of_its_own(clock, pipe, capsys):
    with Progress("dot", start=0, total=100, seeds=1) as progress:
        progress.update(10, {"loss": [1.0]})  # too early for a line
        progress.note("step 10, validation: bleu 31.4")
    assert capsys.readouterr().out == "dot: step 10, validation: bleu 31.4\n"


def test_a_process_that_shows_nothing_notes_nothing(pipe, capsys):
    with Progress("dot", start=0, total=5, seeds=1, shown=False) as progress:
        progress.update(5, {"loss": [1.0]})
        progress.note("step 5")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_note_beside_the_bar_is_as_it_was_said(terminal, capsys):
    with Progress("dot", start=0, total=7, seeds=1) as progress:
        progress.note("step 2: [red]3.5[/red] [ms] :smile: bleu 2")
        progress.update(7, {"loss": [0.125]})
    out = capsys.readouterr().out
    assert "dot: step 2: [red]3.5[/red] [ms] :smile: bleu 2" in out  # neither colour nor picture
    assert "7/7" in out


def test_the_bar_lets_go_of_the_terminal_on_an_exception(terminal, capsys):
    def failing():
        with Progress("dot", start=0, total=7, seeds=1):
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        failing()
    assert capsys.readouterr().out.count("\x1b[?25h") == 1  # the cursor is shown again


def test_seeds_that_diverge_are_reported_once(clock, pipe, capsys):
    with Progress("dot", start=0, total=9, seeds=3) as progress:
        for step, losses in ((3, [1.0, 2.0, 3.0]), (6, [1.0, float("nan"), 3.0])):
            clock.now += 1
            progress.update(step, {"loss": losses})
        clock.now += 1
        progress.update(9, {"loss": [1.0, float("nan"), 3.0]})
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warnings == [
        "dot: warning: at step 6 the loss of 1 of 3 seeds is not finite; a smaller learning rate"
        " may help"
    ]
