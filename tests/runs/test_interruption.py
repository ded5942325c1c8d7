"""Signals: the first asks to stop, the second ends the process."""

import os
import signal

import pytest

from attention_jax.runs.interruption import Interruption


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_in_one_line(number, status, capfd):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Interruption() as interruption:
        assert interruption.requested is None
        assert interruption.exit_status == 0
        os.kill(os.getpid(), number)
        assert interruption.requested == number
        assert interruption.exit_status == status
    for either, handler in before.items():
        assert signal.getsignal(either) is handler
    out, err = capfd.readouterr()
    assert out.startswith(f"{number.name}: stopping after the steps, validation or save")
    assert (out.count("\n"), err) == (1, "")


def test_a_second_signal_ends_the_process_although_nobody_read_the_answer_to_the_first(monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", broken)
    with Interruption():
        os.kill(os.getpid(), signal.SIGTERM)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert signal.getsignal(number) is signal.SIG_DFL
