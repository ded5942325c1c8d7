"""Signals: the first asks to stop, the second ends the process."""

import os
import signal
import subprocess
import sys

import pytest

from attention_jax.runs.interruption import Interruption


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_in_one_line(number, status, capfd):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Interruption() as interruption:
        assert interruption.requested is None
        assert interruption.exit_status == 0
        assert not interruption.agreed()
        os.kill(os.getpid(), number)
        assert interruption.requested == number
        assert interruption.exit_status == status
        assert interruption.agreed()
    for either, handler in before.items():
        assert signal.getsignal(either) is handler
    out, err = capfd.readouterr()
    assert out.startswith(f"{number.name}: stopping after the steps, validation or save")
    assert (out.count("\n"), err) == (1, "")


SECOND = """
import os, signal
from attention_jax.runs.interruption import Interruption
with Interruption():
    os.close(1)  # nobody reads the answer
    os.kill(os.getpid(), signal.SIGTERM)
    os.write(2, b"went on")
    os.kill(os.getpid(), signal.SIGINT)
    os.write(2, b"and on")
"""


def test_the_second_signal_ends_the_process():
    ended = subprocess.run(
        [sys.executable, "-c", SECOND], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "went on")
