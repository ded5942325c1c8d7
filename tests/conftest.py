"""Settings of every test: what would be a silent cost or a silent mistake is an error."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest.register_assert_rewrite("conformance", "derivative_cases")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Thousands of them in one process fill gigabytes, and end in a crash of the compiler."""
    yield
    jax.clear_caches()
