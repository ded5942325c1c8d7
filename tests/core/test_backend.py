"""core/backend.py: the default device, generations of GPUs, and kernels for one platform."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from attention_jax.core import backend


def test_the_default_device_comes_before_the_default_backend(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert backend.current_backend() == "tpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert backend.current_backend() == "cpu"
    with jax.default_device("cpu"):
        assert backend.current_backend() == "cpu"


def test_kernels_are_interpreted_where_the_caller_says_so():
    assert backend.interpret_params() is None
    with pltpu.force_tpu_interpret_mode():
        assert backend.interpret_params() is not None
    assert backend.interpret_params() is None


REFUSAL = "needs another device than {platforms}"
HOW = [jax.jit, jax.vmap, lambda function: function]


@pytest.mark.parametrize("how", HOW)
def test_only_the_right_platform_runs(how):
    x = jnp.arange(3.0)
    assert how(lambda x: backend.only_on("cpu", REFUSAL, x))(x).tolist() == [0, 1, 2]
    for platform in ("tpu", "cuda"):
        with pytest.raises(NotImplementedError, match="needs another device than cpu"):
            how(lambda x, platform=platform: backend.only_on(platform, REFUSAL, x))(x)


def test_a_program_for_another_platform_is_lowered_here():
    traced = jax.jit(lambda x: backend.only_on("tpu", REFUSAL, x)).trace(jnp.arange(3.0))
    traced.lower(lowering_platforms=("tpu",))
    with pytest.raises(NotImplementedError, match="than cpu, tpu"):
        traced.lower(lowering_platforms=("cpu", "tpu"))
