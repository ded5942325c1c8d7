"""weak_scaling.py: bytes and seconds against numbers by hand."""

import dataclasses

import pytest

from experiments.costs import compiled_steps
from experiments.costs import weak_scaling as sketch

SMALL = sketch.Config(
    devices=(2, 12), parameters=100, layers=3, width=5, tokens=7, length=11, number_bytes=2,
    utilisation=0.5, hop_seconds=0.25,
)  # fmt: skip
MACHINE = sketch.Machine(
    operations=1000, island=8, collective=(10, 20), neighbour=(30, 40), source="made up"
)


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch):
    nothing = {"commit": "0", "steps": [], "missing": []}
    monkeypatch.setattr(compiled_steps, "read", lambda: nothing)


@pytest.mark.parametrize(
    ("arrangement", "count", "sent"),
    [
        ("data", 2, (200, 0)),  # half of the 200 bytes out, half of the sums
        ("data", 12, (2 * 200 * 11 / 12, 0)),
        ("fsdp", 12, (3 * 200 * 11 / 12, 0)),
        # 7 tokens of 5 numbers of 2 bytes are 70: keys and values go round forward, and with their
        # gradients backward, in three layers.
        ("context", 2, (200, 3 * (2 * 2 + 4 * 2) * 70)),
        ("context", 12, (2 * 200 * 11 / 12, 3 * (2 * 12 + 4 * 12) * 70)),
    ],
)
def test_bytes(arrangement, count, sent):
    assert sketch.sent_bytes(SMALL, arrangement, count) == pytest.approx(sent)


def test_seconds():
    step = sketch._step(SMALL, MACHINE, "data", 12)
    assert step["communication_seconds"] == pytest.approx(2 * 200 * 11 / 12 / 20)
    assert step["computing_seconds"] == pytest.approx((6 * 100 + 7 * 3 * 11 * 5) * 7 / 500)
    step = sketch._step(SMALL, MACHINE, "context", 2)  # within the island; 12 messages
    assert step["communication_seconds"] == pytest.approx(200 / 10 + 2520 / 30 + 12 * 0.25)
    assert step["computing_seconds"] == pytest.approx((6 * 100 + 7 * 3 * 14 * 5) * 7 / 500)
    assert step["gigabytes"] == pytest.approx(2.72e-6)


def test_what_is_expected_of_the_default_settings():
    numbers = {"config": dataclasses.asdict(sketch.Config()), **sketch.run(sketch.Config())}
    assert all(expectation.met for expectation in sketch.expectations(numbers))
    for arrangements in numbers["steps"].values():
        for way in ("data", "fsdp"):  # (n - 1) / n of the parameters, whatever the machine
            growth = arrangements[way]["4096"]["gigabytes"] / arrangements[way]["8"]["gigabytes"]
            assert growth == pytest.approx(8 / 7, abs=0.01)
    (figure,) = sketch.plot(numbers).values()
    assert len(figure.axes) == 2
    table = sketch.report(numbers)
    assert "| TPU v5p | 4,096 | fsdp | 15.6 |" in table
    assert "| H100 | 4,096 | context | 39,593 |" in table
    assert "takes 4 to 22 % of the time of computing" in table


def test_one_number_of_devices():
    config = sketch.Config(devices=(16,))
    numbers = {"config": dataclasses.asdict(config), **sketch.run(config)}
    assert len(sketch.expectations(numbers)) == 8
    assert "| H100 | 16 | data |" in sketch.report(numbers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, "layers must be greater than 0; got 0"),
        ({"devices": (8, 1)}, "devices must be one or more of at least 2"),
        ({"utilisation": 1.5}, "utilisation must be above 0, at most 1; got 1.5"),
        ({"hop_seconds": -1.0}, "hop_seconds must be at least 0; got -1.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        sketch.Config(**settings)
