"""Signals: the first asks to stop, the second ends the process."""

import concurrent.futures
import os
import signal
import sys

import pytest
from toy_task import toy, train_toy

from attention_jax.runs.interruption import Interruption

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _without_nohup():
    """The tests themselves may run under it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ASKING)
def test_the_first_signal_asks_in_one_line(number, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdout", object())  # a user's stream need not have a file
    before = {number: signal.getsignal(number) for number in ASKING}
    with Interruption() as interruption:
        assert interruption.exit_status == 0
        os.kill(os.getpid(), number)
        assert interruption.exit_status == 128 + number
    for either, handler in before.items():
        assert signal.getsignal(either) is handler
    out, err = capfd.readouterr()
    assert out.startswith(f"{number.name}: stopping after the steps, validation or save")
    assert (out.count("\n"), err) == (1, "")


def test_a_second_signal_ends_the_process_although_nobody_read_the_answer_to_the_first(monkeypatch):
    """A shell repeats the SIGHUP of its terminal: the second one ends nothing."""

    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", broken)
    with Interruption():
        os.kill(os.getpid(), signal.SIGTERM)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert signal.getsignal(number) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_under_nohup_a_hang_up_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.exit_status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_trains_without_signals(tmp_path):
    task = toy(steps=2, log_every=1, checkpoint_every=2)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(train_toy, task, tmp_path).result().step == 2
