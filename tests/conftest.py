"""Settings of every test: what would be a silent cost or a silent mistake is an error."""

import os

import quick_compilation  # first, because JAX reads its settings when it is imported

import jax  # isort: skip
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest.register_assert_rewrite("conformance", "derivative_cases")

# Measured: each of these compiles for 8 s or more, and a quicker case or test of the same remains.
LONG = {
    "test_attention.py": tuple(
        f"test_without_jit[{case}]" for case in ("reference-own", "tiled-own", "tiled-scaled")
    ),
    "test_attention_benchmark.py": (
        "test_memory_of_every_derivative_is_compiled",
        "test_crossover_compares_tiled_with_reference",
    ),
    "test_benchmark.py": ("test_without_torch_only_the_peer_is_absent",),
    "test_forward_mode.py": ("test_third_derivatives_in_three_orders_of_modes",),
    "test_command_lines.py": ("test_comparison_writes_numbers_and_figures",),
    "test_coverage.py": ("test_derivatives[additive]",),
    "test_dropout.py": (
        "test_gradient_with_the_rng_held[reference]",
        "test_same_rng_same_result_and_examples_differ[reference]",
    ),
    "test_experiments.py": (
        "test_family_trains_evaluates_and_draws_an_arm",
        "test_rollout_numbers_are_means_of_what_was_seen",
    ),
    "test_length_experiments.py": ("test_parts_of_the_recipe_with_tiny_settings",),
    "test_linear_memory.py": (
        "test_memory_is_linear_in_the_length[tiled-scaled-gradient_of_gradient]",
    ),
    "test_local.py": ("test_second_derivatives", "test_narrow_inputs_and_empty_ones[reference]"),
    "test_local_and_decoding_benchmarks.py": ("test_rows_of_decoding",),
    "test_processes.py": ("test_a_signal_to_one_stops_both",),
    "test_reference.py": tuple(
        f"test_two_orders_in_both_modes[{case}]"
        for case in (
            "additive-causal", "concat-causal", "cosine-causal", "softcap-causal", "own-causal",
            "general-causal0", "general-causal1", "general-local", "general-none",
        )
    ),
    "test_scale_sweep.py": ("test_against_a_call_a_scale",),
    "test_statistics_gradients.py": ("test_gradients[attention_summary]",),
    "test_tiled.py": ("test_second_derivatives_are_those_of_the_reference[additive]",),
    "test_train_script.py": (
        "test_positions_for_any_length",
        "test_the_best_state_is_kept_and_evaluated",
    ),
}  # fmt: skip


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        quick_compilation.empty_large_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        file, name = item.path.name, item.name
        if name in LONG.get(file, ()):
            item.add_marker(pytest.mark.slow)


# These test the numerics or the memory of compiled programs, so they are compiled as on users'
# machines. All other files are compiled quickly, with few of LLVM's optimisations.
FULLY_OPTIMIZED = (
    "test_attention.py", "test_linear_memory.py", "test_nn_linear_memory.py",
    "test_online_softmax.py", "test_pairwise_tanh.py", "test_softmax.py",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request):
    if request.path.name in FULLY_OPTIMIZED:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    with quick_compilation.quick_options():
        yield
    jax.config.update("jax_disable_most_optimizations", False)


COMPILED = []  # one entry per program that this process has compiled and still holds


@jax.monitoring.register_event_duration_secs_listener
def _count_programs(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Thousands of them in one process fill gigabytes, and end in a crash of the compiler."""
    yield
    if len(COMPILED) > 600:
        jax.clear_caches()
        COMPILED.clear()
