#!/usr/bin/env bash
# torch 2.13.0, CPU.
#
# What happens: scaled_dot_product_attention returns 0 for a query that is NaN, if there are fewer keys
# than a vector register has float32 numbers (16 with AVX-512, 8 with AVX2). With more keys it returns
# NaN. The backward pass gives NaN with few keys, too. The math backend returns NaN for any number of
# keys.
# What one would have believed: that NaN in a query reaches its output, however many keys there are.
# Who is hurt: who looks for the first NaN of a model in its activations, or stops a run when the loss
# is not finite: short sources, and the first steps of a cache, hide it.
# Seen on 2026-11-28, x86-64 with AVX-512, and with ATEN_CPU_CAPABILITY=avx2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "numpy>=2"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

attention = torch.nn.functional.scaled_dot_product_attention
torch.manual_seed(0)
found = {}
for num_keys in (4, 32):
    query, key = torch.randn(1, 1, 3, 16), torch.randn(1, 1, num_keys, 16)
    query[0, 0, 1] = float("nan")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            output = attention(query, key, key)[0, 0, 1]
        found[num_keys, backend.name] = "NaN" if output.isnan().all() else output.abs().max().item()
    query.requires_grad_()
    (gradient,) = torch.autograd.grad(attention(query, key, key).sum(), query)
    found[num_keys, "gradient"] = bool(gradient[0, 0, 1].isnan().all())
    print(f"torch {torch.__version__}, a NaN query and {num_keys} keys: ", end="")
    print(
        f"largest output {found[num_keys, 'FLASH_ATTENTION']}, of the math backend"
        f" {found[num_keys, 'MATH']}, a NaN gradient {found[num_keys, 'gradient']}"
    )
expected = {}
for num_keys, flash in ((4, 0.0), (32, "NaN")):
    expected[num_keys, "FLASH_ATTENTION"] = flash
    expected[num_keys, "MATH"], expected[num_keys, "gradient"] = "NaN", True
sys.exit(found != expected)
PYTHON
