#!/usr/bin/env bash
# torch 2.13.0, CPU.
#
# What happens: scaled_dot_product_attention with both attn_mask and is_causal=True runs, and applies
# both, where the flash kernel serves the call. Where it cannot (values of another size than keys, or a
# float mask that requires a gradient), the same call raises "Explicit attn_mask should not be set when
# is_causal=True".
# What one would have believed: what the documentation says, an error whenever both are set.
# Who is hurt: who has a model that runs, and makes the bias of its attention a parameter, or changes
# the size of its values: the error is about an argument that was not changed.
# Seen on 2026-11-28, x86-64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "numpy>=2"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

attention = torch.nn.functional.scaled_dot_product_attention
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 6, 16) for _ in range(3))
mask = torch.ones(6, 6, dtype=torch.bool)
mask[3:, 1] = False
bias = torch.zeros(6, 6).masked_fill(~mask, -torch.inf)
both = attention(query, key, value, attn_mask=mask & mask.tril())


def outcome(value, mask):
    try:
        output = attention(query, key, value, attn_mask=mask, is_causal=True)
    except RuntimeError as error:
        return "raises" if "is_causal" in str(error) else "another error"
    return "applies both" if torch.allclose(output, both, atol=1e-6) else "something else"


found = {
    "a boolean mask": outcome(value, mask),
    "a float mask": outcome(value, bias),
    "a float mask that requires a gradient": outcome(value, bias.clone().requires_grad_()),
    "values of size 5": outcome(value[..., :5], mask),
}
for case, result in found.items():
    print(f"torch {torch.__version__}, attn_mask and is_causal=True, {case}: {result}")
sys.exit(list(found.values()) != ["applies both", "applies both", "raises", "raises"])
PYTHON
