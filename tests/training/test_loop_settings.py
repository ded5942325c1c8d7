"""Settings of the training loop that are refused."""

import pytest

from attention_jax.training.loop import LoopConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": 0}, "seeds must be at least 1; got 0"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"log_every": 0}, "log_every must be at least 1; got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1; got 0"),
        ({"first_seed": -1}, "first_seed must be at least 0; got -1"),
        ({"seeds": 2, "first_seed": 2**31 - 1}, "first_seed must leave all seeds below 2"),
        (
            {"log_every": 20, "checkpoint_every": 30},
            "checkpoint_every must be a multiple of log_every 20; got 30",
        ),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        LoopConfig(**settings)
