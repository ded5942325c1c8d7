#!/usr/bin/env bash
# jax 0.12.0.1 and jaxlib 0.12.0.1, CPU; Python 3.12 or newer (jax 0.10.2 refuses float6).
#
# What happens: a cast to float6_e2m3fn or float6_e3m2fn turns every number beyond the largest one of
# the type into 0: 9 becomes 0 where NumPy, with the same type of ml_dtypes, gives 7.5. The type has no
# infinity. Numbers within its range are rounded alike.
# What one would have believed: that the cast saturates, as NumPy's does, or raises.
# Who is hurt: who tries a small type for weights or a cache: the outliers vanish, in silence. (Other
# operations on these types raise internal errors, or stop the process.)
# Seen on 2026-11-28, x86-64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    echo "this needs Python 3.12 or newer: PYTHON=python3.13 $0" >&2
    exit 2
fi
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==0.12.0.1" "jaxlib==0.12.0.1" "ml_dtypes==0.5.4"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

changed = False
for dtype in (ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn):
    largest = float(ml_dtypes.finfo(dtype).max)
    numbers = np.array([1.0, -3.0, largest, 1.2 * largest, -1e4], np.float32)
    by_jax = np.asarray(jnp.asarray(numbers).astype(dtype)).astype(np.float32)
    by_numpy = numbers.astype(dtype).astype(np.float32)
    print(f"jax {jax.__version__}, {np.dtype(dtype)} of {numbers.tolist()}:")
    print(f"    jax {by_jax.tolist()}, numpy {by_numpy.tolist()}")
    changed |= by_jax.tolist() != [1, -3, largest, 0, 0]
    changed |= by_numpy.tolist() != [1, -3, largest, largest, -largest]
sys.exit(changed)
PYTHON
