"""Signals: the first asks to stop, the second ends the process."""

import os
import signal

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
