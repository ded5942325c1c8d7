"""Settings of every test: what would be a silent cost or a silent mistake is an error."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest.register_assert_rewrite("conformance", "derivative_cases")

# Here every case runs on every implementation; of the third, which `test_checkpointed.py` looks at
# in any case, compiling takes minutes.
GRIDS = {"test_attention.py", "test_biases.py", "test_gradients.py", "test_local.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in GRIDS and "checkpointed" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Thousands of them in one process fill gigabytes, and end in a crash of the compiler."""
    yield
    jax.clear_caches()
