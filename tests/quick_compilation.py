"""How the tests compile: in one part per program, and each program once for all processes.

Most of the time of the tests goes into compiling. The settings are environment variables, which
JAX reads when it is imported and which processes that the tests start inherit.
"""

import os
import shutil
from pathlib import Path

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


def empty_large_cache():
    """Deletes the programs of earlier runs of the tests when they fill LARGEST_CACHE."""
    if CACHE.exists() and sum(file.stat().st_size for file in CACHE.iterdir()) > LARGEST_CACHE:
        shutil.rmtree(CACHE)


def install():
    """Gives programs the options of `conformance.quick_jit` where optimisations are disabled.

    `jax.jit` takes the options for its own program alone, and JAX has no setting for all programs.
    """
    import conformance  # both import JAX, after the settings above
    import jax
    from jax._src import compiler

    options, own = conformance.quick_options(), compiler.get_compile_options

    def get_compile_options(*arguments, env_options_overrides=None, **named):
        if jax.config.read("jax_disable_most_optimizations"):
            env_options_overrides = {**options, **(env_options_overrides or {})}
        return own(*arguments, env_options_overrides=env_options_overrides, **named)

    compiler.get_compile_options = get_compile_options
