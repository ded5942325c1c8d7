"""Settings of every test: silent costs and silent mistakes become errors."""

import gc
import os

import quick_compilation  # first, because JAX reads its settings when it is imported

import hypothesis  # isort: skip
import jax  # isort: skip
import pytest

os.environ["ATTENTION_JAX_CACHE"] = "off"  # command lines of tests leave the user's cache alone

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # for meshes; all other tests use the first

pytest.register_assert_rewrite("conformance", "derivative_cases")


# The same examples in every run; pytest --hypothesis-profile=nightly draws fifty times as many, new
# ones each night. Both shrink what fails.
hypothesis.settings.register_profile(
    "fast", max_examples=100, deadline=None, derandomize=True, database=None,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
)  # fmt: skip
hypothesis.settings.register_profile(
    "nightly", max_examples=5000, deadline=None, print_blob=True,
    phases=[hypothesis.Phase.reuse, hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("fast")


def pytest_configure():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        quick_compilation.empty_large_cache()
    quick_compilation.install()


# These test the numerics or the memory of compiled programs, so they are compiled as on users'
# machines. All other files are compiled quickly, with few of LLVM's optimisations.
FULLY_OPTIMIZED = (
    "test_linear_memory.py", "test_nn_linear_memory.py", "test_row_statistics.py",
    "test_pairwise_tanh.py", "test_all_threads.py",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request):
    quickly = request.path.name not in FULLY_OPTIMIZED
    jax.config.update("jax_disable_most_optimizations", quickly)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def _compile_for_accelerators(request):
    """Options of XLA:CPU for quick compilation are unknown to the compilers of accelerators."""
    if request.node.get_closest_marker("accelerators") is None:
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def interpreted(request):
    """The implementation `NAME` of the module computes on this CPU."""
    from kernel_cases import runnable

    with runnable(request.module.NAME):
        yield


def pytest_collection_finish():
    """Collects garbage less often, because tracing a program makes many objects that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@pytest.fixture(scope="module")
def standard_promotion():
    """Optax's Adam counts in int32 and multiplies floats by it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs a script of scripts/ by its name: (exit status, standard output, standard error)."""
    import command_lines  # not above: a process that only distributes tests does without

    return command_lines.runner(monkeypatch, capfd)


COMPILED = []  # one entry per program that this process has compiled and still holds


@jax.monitoring.register_event_duration_secs_listener
def _count_programs(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Clears compiled programs: thousands of them fill gigabytes and crash the compiler."""
    yield
    if len(COMPILED) > 600:
        jax.clear_caches()
        COMPILED.clear()
