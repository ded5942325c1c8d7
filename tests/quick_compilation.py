"""How the tests compile: in one part per program, and each program once for all processes.

Most of the time of the tests goes into compiling. The settings are environment variables, which
JAX reads when it is imported and which processes that the tests start inherit.
"""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
LARGEST_CACHE = 2**30  # bytes
# XLA cuts a CPU program into this many parts and compiles them in parallel. The workers of the
# tests keep all cores busy already, and more parts take more time in total.
PARTS = "--xla_cpu_parallel_codegen_split_count=1"
SETTINGS = {
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}

os.environ.update(SETTINGS)
if PARTS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PARTS}".strip()

import jax  # noqa: E402  after the settings
from jax._src import compiler  # noqa: E402


def empty_large_cache():
    """Deletes the programs of earlier runs of the tests when they fill LARGEST_CACHE."""
    if CACHE.exists() and sum(file.stat().st_size for file in CACHE.iterdir()) > LARGEST_CACHE:
        shutil.rmtree(CACHE, ignore_errors=True)  # another run of the tests may write to it


def quick_jit(function: Callable, **options: Any) -> Callable:
    """`jax.jit` with few optimisations: on the CPU a tile loop compiles four times as fast."""
    return jax.jit(function, compiler_options=quick_options(), **options)


@functools.cache
def quick_options() -> dict[str, Any]:
    """Options of XLA for few optimisations, those that this version has."""
    wanted = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    return {name: value for name, value in wanted.items() if _xla_knows(name, value)}


def _xla_knows(name: str, value: Any) -> bool:
    """Whether this version of XLA has the option."""
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def install():
    """Gives programs the options of `quick_jit` where optimisations are disabled.

    `jax.jit` takes the options for its own program alone, and JAX has no setting for all programs.
    """
    options, original = quick_options(), compiler.get_compile_options

    def get_compile_options(*arguments, env_options_overrides=None, **named):
        if jax.config.read("jax_disable_most_optimizations"):
            env_options_overrides = {**options, **(env_options_overrides or {})}
        return original(*arguments, env_options_overrides=env_options_overrides, **named)

    compiler.get_compile_options = get_compile_options
