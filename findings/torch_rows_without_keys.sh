#!/usr/bin/env bash
# torch 2.13.0, CPU.
#
# What happens: torch.nn.MultiheadAttention(12, N, batch_first=True) after eval(), under no_grad, with
# need_weights=False and a boolean attn_mask that hides all keys from one query: the output of that
# query is NaN with an even number N of heads, and the bias of the last projection with an odd N. With
# gradients, with a float mask of the same values, or with bias=False the output is that bias (or 0)
# for every N.
# What one would have believed: that the number of heads, or no_grad, does not decide what a query
# without keys gets.
# Who is hurt: who validates under no_grad: the loss of training is finite and that of validation NaN.
# Seen on 2026-11-28, x86-64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "numpy>=2"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

mask = torch.zeros(5, 5, dtype=torch.bool)
mask[2] = True
added = torch.zeros(5, 5).masked_fill(mask, -torch.inf)


def outcome(layer, mask):
    output = layer(tokens, tokens, tokens, attn_mask=mask, need_weights=False)[0][:, 2]
    bias = 0 if layer.out_proj.bias is None else layer.out_proj.bias
    if output.isnan().all():
        return "NaN"
    return "the bias" if torch.allclose(output, output.new_zeros(2, 12) + bias) else "another number"


found = {}
for num_heads in (1, 2, 3, 4, 6):
    torch.manual_seed(0)
    tokens = torch.randn(2, 5, 12)
    layer = torch.nn.MultiheadAttention(12, num_heads, batch_first=True).eval()
    without = torch.nn.MultiheadAttention(12, num_heads, batch_first=True, bias=False).eval()
    torch.nn.init.normal_(layer.out_proj.bias)
    with torch.no_grad():
        cases = [outcome(layer, mask), outcome(layer, added), outcome(without, mask)]
    found[num_heads] = [*cases, outcome(layer, mask)]
    print(
        f"torch {torch.__version__}, {num_heads} heads: under no_grad {cases[0]}, with a float mask"
        f" {cases[1]}, with bias=False {cases[2]}; with gradients {found[num_heads][3]}"
    )
expected = {n: ["the bias" if n % 2 else "NaN", *["the bias"] * 3] for n in found}
sys.exit(found != expected)
PYTHON
