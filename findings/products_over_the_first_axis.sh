#!/usr/bin/env bash
# jax 0.10.2 (Python 3.11) and jax 0.12.0.1 (Python 3.12 and newer), jaxlib of the same version, CPU.
#
# What happens: a batch of small products that sums over the first axis of both factors,
# einsum("bts,btd->bsd"), is compiled to a plain `dot`, which XLA:CPU computes by a loop of its own.
# The same numbers written as jnp.sum(p[..., None] * q[:, :, None, :], axis=1) are compiled to a
# fusion of YNN, the library of fast kernels. So is einsum("bts,bsd->btd"), which sums over the last
# axis of one factor.
# What one would have believed: that a product is what the fast library gets, and that an array of
# all terms and its sum are two passes over memory.
# Who is hurt: the gradients of attention by keys and values are such products, here with the sizes
# of a small model (64 examples, 9 queries, 8 keys, 64 features).
# Seen on 2026-11-28, x86-64 with AVX-512.
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

p, q, v = (jnp.ones(shape) for shape in ((64, 9, 8), (64, 9, 64), (64, 8, 64)))
programs = {
    "product over the first axis": lambda p, q, v: jnp.einsum("bts,btd->bsd", p, q),
    "the same, multiplied and summed": lambda p, q, v: jnp.sum(p[..., None] * q[:, :, None, :], 1),
    "product over the last axis": lambda p, q, v: jnp.einsum("bts,bsd->btd", p, v),
}
found = {}
for name, program in programs.items():
    text = jax.jit(program).lower(p, q, v).compile().as_text()
    entry = text[text.index("ENTRY") :]
    found[name] = "YNN" if "ynn" in entry else "dot" if " dot(" in entry else "loop"
    print(jax.__version__, name, found[name], sep=", ")
sys.exit([*found.values()] != ["dot", "YNN", "YNN"])
PYTHON
