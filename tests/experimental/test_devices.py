"""The devices at hand, programs for one platform alone, and kernels that nothing has used yet."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from attention_jax.core import products
from attention_jax.experimental import devices
from attention_jax.kernels import cudnn


def test_the_default_device_comes_before_the_default_backend(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert products.current_backend() == "tpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert products.current_backend() == "cpu"
    with jax.default_device("cpu"):
        assert products.current_backend() == "cpu"
    for platform, backend in {
        "cuda": "gpu",
        "rocm": "gpu",
        "gpu": "gpu",
        "another": "another",
    }.items():
        device = type("Device", (), {"platform": platform})()
        with jax.default_device(device):
            assert products.current_backend() == backend


@pytest.mark.parametrize(
    ("capability", "generation"), [("9.0", 9.0), ("7.5", 7.5), ("gfx942", 0.0), (None, 0.0)]
)
def test_generations(monkeypatch, capability, generation):
    gpu = types.SimpleNamespace(platform="gpu")
    if capability is not None:
        gpu.compute_capability = capability
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert cudnn.nvidia_generation() == generation


def test_without_a_gpu_nothing_is_known_of_it(monkeypatch):
    assert cudnn.nvidia_generation() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # compiled for one that is not there
    assert cudnn.nvidia_generation() is None


REFUSAL = "needs another device than {platforms}"


@pytest.mark.parametrize("how", [jax.jit, jax.vmap, lambda function: function])
def test_only_the_right_platform_runs(how):
    x = jnp.arange(3.0)
    assert how(lambda x: devices.only_on("cpu", REFUSAL, x))(x).tolist() == [0, 1, 2]
    with pytest.raises(NotImplementedError, match="needs another device than cpu"):
        how(lambda x: devices.only_on("tpu", REFUSAL, x))(x)


def test_a_program_for_another_platform_is_lowered_here():
    traced = jax.jit(lambda x: devices.only_on("tpu", REFUSAL, x)).trace(jnp.arange(3.0))
    traced.lower(lowering_platforms=("tpu",))
    with pytest.raises(NotImplementedError, match="than cpu, tpu"):
        traced.lower(lowering_platforms=("cpu", "tpu"))


PROGRAM = """
import sys
import jax
import attention_jax as aj

tokens = [jax.ShapeDtypeStruct((3, 2), "f4")] * 3
for name in ("reference", "tiled", None):
    jax.eval_shape(lambda *tokens: aj.attention(*tokens, implementation=name), *tokens)
rooms = "attention_jax.experimental", "jax.experimental.pallas"
print([name for name in sys.modules if name.startswith(rooms)])
"""


def test_no_experimental_kernel_is_loaded_before_it_is_used():
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"
