"""core/only_on.py: the right platform runs and compiles, another is refused."""

import jax
import jax.numpy as jnp
import pytest

from attention_jax.core.only_on import only_on

REFUSAL = "needs another device than {platforms}"


@pytest.mark.parametrize("how", [jax.jit, jax.vmap, lambda function: function])
def test_the_right_platform_runs(how):
    x = jnp.arange(3.0)
    assert how(lambda x: only_on("cpu", REFUSAL, x))(x).tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", [jax.jit, jax.vmap, lambda function: function])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_another_platform_is_refused(how, platform):
    with pytest.raises(NotImplementedError, match="needs another device than cpu"):
        how(lambda x: only_on(platform, REFUSAL, x))(jnp.arange(3.0))


def test_a_program_for_another_platform_is_lowered_here():
    lowered = jax.jit(lambda x: only_on("tpu", REFUSAL, x)).trace(jnp.arange(3.0))
    lowered.lower(lowering_platforms=("tpu",))
    with pytest.raises(NotImplementedError, match="than cpu, tpu"):
        lowered.lower(lowering_platforms=("cpu", "tpu"))
