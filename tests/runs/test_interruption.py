"""Signals: the first asks to stop, the second ends the process."""

import os
import signal
import time

import pytest

from attention_jax.runs.interruption import Interruption


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_would_end_the_process(number, status):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Interruption() as interruption:
        assert interruption.requested is None
        assert interruption.exit_status == 0
        os.kill(os.getpid(), number)
        assert interruption.requested == number
        assert interruption.exit_status == status
        for either in before:
            assert signal.getsignal(either) == signal.SIG_DFL
    for either, handler in before.items():
        assert signal.getsignal(either) is handler


def test_a_signal_is_answered_at_once_although_the_work_goes_on(capfd):
    printed = ""
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        while not printed:  # a test that hangs here has failed
            time.sleep(0.01)
            printed += capfd.readouterr().out
        assert printed.startswith("SIGTERM: stopping after the steps, validation or save")
        assert printed.count("\n") == 1
        assert interruption.requested == signal.SIGTERM
    assert capfd.readouterr() == ("", "")


def test_output_that_nobody_reads_does_not_stop_the_watch(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert interruption._watching.is_alive()
