#!/usr/bin/env bash
# equinox 0.13.8 with jax 0.10.2 (Python 3.11) or jax 0.12.0.1 (Python 3.12 and newer), CPU.
#
# What happens: equinox.tree_serialise_leaves writes arrays in float8 and int4 without a word, and
# equinox.tree_deserialise_leaves cannot read its own file: it raises. bfloat16, which NumPy does not
# know either, is written and read. Of the float8 types, float8_e5m2 is lost in another way: its
# header says '<f1', which NumPy's own reader refuses.
# What one would have believed: that what is written is read, as for bfloat16, or that writing raises.
# Who is hurt: who saves a cache, or quantised weights, at the end of a long run.
# Seen on 2026-11-28, x86-64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("0.10.2" if sys.version_info[:2] == (3, 11) else "0.12.0.1")')
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==$version" "jaxlib==$version" "equinox==0.13.8"
"$folder/venv/bin/python" - <<'PYTHON'
import io
import sys

import equinox as eqx
import jax
import jax.numpy as jnp

found = {}
for dtype in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, jnp.arange(4).astype(dtype))
    written = len(file.getvalue())
    file.seek(0)
    try:
        eqx.tree_deserialise_leaves(file, jnp.zeros(4, dtype))
        found[dtype] = "read"
    except Exception as error:
        found[dtype] = type(error).__name__
    print(f"jax {jax.__version__}, {dtype}: {written} bytes written; reading: {found[dtype]}")
is_read = {dtype: outcome == "read" for dtype, outcome in found.items()}
expected = {"float32", "bfloat16"}
sys.exit({dtype for dtype, read in is_read.items() if read} != expected)
PYTHON
