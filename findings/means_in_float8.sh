#!/usr/bin/env bash
# jax 0.10.2 (Python 3.11) and jax 0.12.0.1 (Python 3.12 and newer), jaxlib of the same version, CPU.
#
# What happens: jnp.mean of 1,000 ones is NaN in float8_e4m3fn and 0.0625 in float8_e5m2; the variance
# of these equal numbers is NaN and 0.0625; a softmax over 1,000 equal logits is NaN in one type, and
# sums to 15.6 in the other. In float16 and bfloat16 the same calls are right to the digits of the type.
# Sums run in float32 for the 16-bit types, and in float8 itself for float8.
# What one would have believed: that jnp.mean sums all small floats in float32.
# Who is hurt: who takes statistics of a cache or of weights in float8 without a cast (dtype=jnp.float32
# in the call gives the right sum).
# Seen on 2026-11-28, x86-64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("0.10.2" if sys.version_info[:2] == (3, 11) else "0.12.0.1")')
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==$version" "jaxlib==$version"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp

found = {}
for dtype in ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"):
    ones = jnp.ones(1000, dtype)
    total = jnp.sum(jax.nn.softmax(ones).astype(jnp.float32))
    results = jnp.mean(ones), jnp.var(ones), total, jnp.sum(ones, dtype=jnp.float32)
    found[dtype] = [f"{float(result):.3g}" for result in results]
    mean, variance, total, wide = found[dtype]
    print(
        f"jax {jax.__version__}, {dtype}: mean {mean}, variance {variance},"
        f" sum of the softmax {total}; sum with dtype=jnp.float32 {wide}"
    )
expected = {
    "float16": ["1", "0", "1", "1e+03"],
    "bfloat16": ["1", "0", "0.999", "1e+03"],
    "float8_e5m2": ["0.0625", "0.0625", "15.6", "1e+03"],
    "float8_e4m3fn": ["nan", "nan", "nan", "1e+03"],
}
sys.exit(found != expected)
PYTHON
