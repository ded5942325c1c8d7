"""The library loads no kernel until one is used."""

import subprocess
import sys

PROGRAM = """
import sys
import jax.numpy as jnp
import attention_jax as aj

tokens = jnp.ones((3, 2))
for name in ("reference", "tiled", None):
    aj.attention(tokens, tokens, tokens, implementation=name)
kernels = ("cudnn", "mosaic_tpu", "mosaic_gpu")
loaded = [f"attention_jax.kernels.{name}" for name in kernels] + ["jax.experimental.pallas"]
print([name for name in loaded if name in sys.modules])
"""


def test_no_kernel_is_loaded_before_it_is_used():
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"
