#!/usr/bin/env bash
# jax 0.10.2 (Python 3.11) and jax 0.12.0.1 (Python 3.12 and newer), jaxlib of the same version, CPU.
#
# What happens: jax.scipy.sparse.linalg.cg (gmres and bicgstab alike) has a Hessian with respect to the
# right-hand side by jax.hessian and by reverse mode twice, but jax.jacfwd(jax.jacfwd(f)) and
# jax.jacrev(jax.jacfwd(f)) raise "TypeError: Error interpreting argument to custom_linear_solve".
# jnp.linalg.solve has all four. With respect to the matrix all four exist, for cg, too.
# What one would have believed: that a solver with one order of forward mode, and a Hessian, has two
# orders of forward mode.
# Who is hurt: who computes Laplacians or Taylor series in forward mode through a least-squares fit.
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
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

matrix, vector = jnp.array([[2.0, 0.5], [0.5, 1.0]]), jnp.array([1.0, 2.0])
seconds = {
    "hessian": jax.hessian,
    "reverse twice": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward twice": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "reverse of forward": lambda f: jax.jacrev(jax.jacfwd(f)),
}


def outcome(second, function, argument):
    try:
        return "finite" if bool(jnp.isfinite(second(function)(argument)).all()) else "not finite"
    except TypeError as error:
        return "raises" if "custom_linear_solve" in str(error) else "another error"


found = {}
for name, solve in {
    "cg": lambda a, b: cg(lambda x: a @ x, b)[0],
    "gmres": lambda a, b: gmres(lambda x: a @ x, b)[0],
    "bicgstab": lambda a, b: bicgstab(lambda x: a @ x, b)[0],
    "jnp.linalg.solve": jnp.linalg.solve,
}.items():
    of_vector = lambda b: jnp.sum(solve(matrix, b) ** 2)
    of_matrix = lambda t: jnp.sum(solve(matrix * t, vector) ** 2)
    found[name] = [outcome(second, of_vector, vector) for second in seconds.values()]
    found[name] += [outcome(second, of_matrix, jnp.array(1.0)) for second in seconds.values()]
    print(f"jax {jax.__version__}, {name}: {dict(zip(seconds, found[name]))}; matrix {found[name][4:]}")
iterative = ["finite", "finite", "raises", "raises"] + ["finite"] * 4
expected = {name: iterative for name in ("cg", "gmres", "bicgstab")}
sys.exit(found != expected | {"jnp.linalg.solve": ["finite"] * 8})
PYTHON
