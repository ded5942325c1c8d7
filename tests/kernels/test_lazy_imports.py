"""The library loads no kernel until one is used."""

import subprocess
import sys

PROGRAM = """
import sys
import jax
import attention_jax as aj

tokens = [jax.ShapeDtypeStruct((3, 2), "f4")] * 3
for name in ("reference", "tiled", None):
    jax.eval_shape(lambda *tokens: aj.attention(*tokens, implementation=name), *tokens)
kernels = ("cudnn", "mosaic_tpu", "mosaic_gpu")
loaded = [f"attention_jax.kernels.{name}" for name in kernels] + ["jax.experimental.pallas"]
print([name for name in loaded if name in sys.modules])
"""


def test_no_kernel_is_loaded_before_it_is_used():
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"
