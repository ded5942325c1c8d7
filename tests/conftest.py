"""Settings of every test: what would be a silent cost or a silent mistake is an error."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest.register_assert_rewrite("conformance", "derivative_cases")
