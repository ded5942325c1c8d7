"""The digest of a program: of its operations, of the numbers in them, and of what a text hides.

JAX gives the program of a function as text, a jaxpr. It does not show arrays, which count by their
numbers, nor the rules of functions for derivatives and batches (`jax.custom_jvp`, `jax.custom_vjp`,
`attention_jax.custom_vjp`, `custom_root`, `custom_vmap`, ...). Such a function is differentiated,
twice, and the programs of its derivatives count too. A digest holds for one version of JAX.
"""

import contextlib
import hashlib
import os
import re
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from attention_jax.core.errors import LIBRARY_FOLDER
from attention_jax.parts.user_code import UserCode

ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in its repr; differs between processes

_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_NO_MESH = jax.sharding.AbstractMesh((), ())
# Operations that do more than their text shows, and the parameter that is their function.
_UNSHOWN = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "kept_call": "program",
    "linear_call": None,
    "call_hi_primitive": None,  # `custom_root`, from JAX 0.12 on
    "pallas_call": None,
}
# Files of JAX with rules that call functions of the user: `custom_root`, `custom_gradient`.
_OF_CALLERS = ("solves.py", "custom_derivatives.py")
# The mesh around a call, and what a `kept_call` says of its transpose.
_NOT_COMPUTED = re.compile(r"\n +(ctx_mesh|linear_in)=.*")
_HOST_CALLBACKS = ("pure_callback", "io_callback", "buffer_callback")
CALLS_PYTHON = "+"  # how the digest of a program ends that calls functions which it does not show
_PRINTS = ("debug_print", "debug_callback", *_HOST_CALLBACKS)
# The digests of the arrays with these ids, while they exist; of an array of NumPy's, which may
# change, with its numbers, which are compared in a fifth of the time.
_DIGESTS: dict[int, tuple[bytes, bytes | None]] = {}
_LARGEST_COPY = 2**24  # bytes


def program_digest(code: UserCode, function: Callable[..., Any], *arguments: Any) -> str:
    """Traces a function on shapes, and returns the digest of its program; nothing is computed.

    Args:
        code: the user's code that the function calls, for errors.
        function: takes pytrees of arrays, and returns one.
        arguments: pytrees of `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: the program uses a traced array of its enclosing scope, or a Python function
            whose result it reads: its digest would not see them.
    """
    # Without a mesh and a default precision, the digest is that of any: they may be others when
    # a derivative is traced.
    with jax.sharding.use_abstract_mesh(_NO_MESH), jax.default_matmul_precision(None):
        # JAX remembers traces by function, so the lambda is a new function.
        closed = jax.make_jaxpr(lambda *arrays: function(*arrays))(*arguments)
        programs, digest, end = [(closed, 2)], hashlib.sha256(), ""
        for closed, orders in programs:  # which grows
            digest.update(_text_of(closed).encode())
            for inner in _with_inner(closed):
                for constant in getattr(inner, "consts", ()):
                    if isinstance(constant, jax.core.Tracer):
                        raise ValueError(
                            f"{code.name} must not use the traced array"
                            f" {constant.aval.str_short()} of its enclosing scope, which would get"
                            f" no gradient: {code.remedy}"
                        )
                    digest.update(_digest_of_array(constant))
                for equation in inner.eqns:
                    kind = equation.primitive.name
                    if kind in _HOST_CALLBACKS and equation.outvars:
                        raise ValueError(
                            f"{code.name} must not read the result of a Python function ({kind}):"
                            " use jax.numpy"
                        )
                    if kind in _PRINTS[1:]:
                        end = CALLS_PYTHON
                    if kind in _UNSHOWN:
                        unshown = _unshown(equation, inner, orders)
                        programs += [(each, orders - 1) for each in unshown]
    return digest.hexdigest() + end


def _digest_of_array(array: Any) -> bytes:
    """The digest of an array's numbers, computed once."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    fixed = isinstance(array, jax.Array)
    owner = array
    if not fixed:  # JAX has a view of the array
        array = np.asarray(array)
        owner = array if array.base is None else array.base
    digest, copy = _DIGESTS.get(id(owner), (None, None))
    if digest is not None and (fixed or array.tobytes() == copy):
        return digest
    with jax.transfer_guard("allow"):
        numbers = np.asarray(jax.random.key_data(array) if is_key else array).tobytes()
    new = hashlib.sha256(numbers).digest()
    if fixed or len(numbers) <= _LARGEST_COPY:
        _DIGESTS[id(owner)] = new, None if fixed else numbers
        if digest is None:
            weakref.finalize(owner, _DIGESTS.pop, id(owner), None)
    return new


def _text_of(program: ClosedJaxpr) -> str:
    """The text of a program, without addresses and what is not computed."""
    # The first trace of a function that fills a cache has operations without effect.
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    text = ADDRESS.sub("", str(jaxpr))
    return re.sub(_NOT_COMPUTED, "", text) if "ctx_mesh=" in text or "linear_in=" in text else text


def _with_inner(program: ClosedJaxpr) -> list[ClosedJaxpr | Jaxpr]:
    """A program, and all programs in it."""
    programs: list[ClosedJaxpr | Jaxpr] = [program]
    for each in programs:  # which grows
        for equation in each.eqns:
            for value in equation.params.values():
                values = value if isinstance(value, tuple | list) else (value,)
                programs += [inner for inner in values if isinstance(inner, ClosedJaxpr | Jaxpr)]
    return programs


def without_prints(program: Any) -> Any:
    """A program without `jax.debug.print` and other calls of Python that give it no result."""

    def is_print(equation: Any) -> bool:
        return equation.primitive.name in _PRINTS and not equation.outvars

    equations = [equation for each in _with_inner(program) for equation in each.eqns]
    effects = {effect for each in filter(is_print, equations) for effect in each.effects}

    def silent(value: Any) -> Any:
        # From JAX 0.12 on, a closed program is its own `jaxpr`.
        if isinstance(value, ClosedJaxpr) and value.jaxpr is not value:
            return value.replace(jaxpr=silent(value.jaxpr))
        if isinstance(value, ClosedJaxpr | Jaxpr):
            replaced: Any = value.replace
            equations = [
                each.replace(
                    params={name: silent(param) for name, param in each.params.items()},
                    effects=each.effects - effects,
                )
                for each in value.eqns
                if not is_print(each)
            ]
            return replaced(eqns=equations, effects=value.effects - effects)
        return type(value)(map(silent, value)) if type(value) in (tuple, list) else value

    return silent(program) if any(map(is_print, equations)) else program


def _unshown(equation: Any, program: ClosedJaxpr | Jaxpr, orders: int) -> list[ClosedJaxpr]:
    """What an operation of a program does and its text does not show.

    These are the index maps of a kernel's blocks, and what a rule of the user does: a batch, or a
    derivative. An error in a rule is left to JAX, which raises it where the derivative is taken.

    Args:
        equation: the operation, one of `_UNSHOWN`.
        program: which contains it.
        orders: how often to differentiate.
    """
    name, params = equation.primitive.name, equation.params
    if name == "pallas_call":
        return [block.index_map_jaxpr for block in params["grid_mapping"].block_mappings]
    function = params.get(_UNSHOWN[name])
    if orders == 0 or (function is not None and _is_fixed(function, name, orders)):
        return []
    jaxpr: Any = getattr(program, "jaxpr", program)
    alone = jaxpr.replace(
        constvars=[],
        invars=[*dict.fromkeys(v for v in equation.invars if not isinstance(v, Literal))],
        outvars=[v for v in equation.outvars if type(v).__name__ != "DropVar"],
        eqns=[equation],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    call = jaxpr_as_fun(ClosedJaxpr(alone, ()))

    types, results = ([v.aval for v in group] for group in (alone.invars, alone.outvars))

    def pull(primals: Any, cotangents: Any) -> Any:
        return jax.vjp(call, *primals)[1](cotangents)

    def push(primals: Any, tangents: Any) -> Any:
        return jax.jvp(call, primals, tangents)[1]

    with contextlib.suppress(Exception):
        if name == "custom_vmap_call":
            batch = [jax.ShapeDtypeStruct((2, *each.shape), each.dtype) for each in types]
            return [jax.make_jaxpr(jax.vmap(call))(*batch)]
        derive, avals = (push, types) if name == "custom_jvp_call" else (pull, results)
        return [jax.make_jaxpr(derive)(types, [aval.to_tangent_aval() for aval in avals])]
    return []


def _is_fixed(function: ClosedJaxpr, name: str, orders: int) -> bool:
    """Whether the rule of a function is JAX's or this library's, and calls nothing of the user."""
    if name == "kept_call" and orders < 2:  # of a rule of the user
        return False
    source = str(function.jaxpr.debug_info.func_src_info).partition(" at ")[2]
    # A batched `kept_call` has a function of JAX.
    fixed = (LIBRARY_FOLDER,) if name == "kept_call" else (LIBRARY_FOLDER, _JAX)
    return source.startswith(fixed) and not any(file in source for file in _OF_CALLERS)
