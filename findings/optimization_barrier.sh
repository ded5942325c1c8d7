#!/usr/bin/env bash
# jax 0.10.2 (Python 3.11) and jax 0.12.0.1 (Python 3.12 and newer), jaxlib of the same version, CPU.
#
# What happens: jax.lax.optimization_barrier((sort(x), y)), of which only y is used, does not compute
# the sort. The program that JAX hands over has it; the compiled program has not: the compiler drops
# what enters the barrier if what leaves it there is not used.
# What one would have believed: that nothing that enters a barrier is removed, since everything
# behind the barrier waits for all that enters it.
# Who is hurt: who uses a barrier to keep a computation that nothing reads: in a benchmark, as a
# warm-up, or to change how a loop is compiled.
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


def one_result_is_used(x, y):
    _, y = jax.lax.optimization_barrier((jnp.sort(x), y))
    return y + 1


def both_results_are_used(x, y):
    x, y = jax.lax.optimization_barrier((jnp.sort(x), y))
    return y + 1, x[0]


found = []
for program in (one_result_is_used, both_results_are_used):
    lowered = jax.jit(program).lower(jnp.arange(100.0), jnp.ones(5))
    found += ["stablehlo.sort" in lowered.as_text(), " sort(" in lowered.compile().as_text()]
    print(f"jax {jax.__version__}, {program.__name__}: a sort before compiling {found[-2]}, after {found[-1]}")
sys.exit(found != [True, False, True, True])
PYTHON
