"""Saving and restoring: every bit, the newest, on any machine."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.training.checkpoints import Checkpoints


def state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "params": {"kernel": jnp.array(rng.normal(size=(3, 5, 2)), jnp.float32), "empty": {}},
        "layers": {0: jnp.array(rng.normal(size=7), jnp.bfloat16)},
        "moments": (jnp.array([np.nan, np.inf, -0.0, 1e-45], jnp.float32), None),
        "count": jnp.array(seed, jnp.int32),
    }


def assert_bits_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_every_leaf_comes_back_bit_by_bit(tmp_path):
    with Checkpoints(tmp_path / "a" / "checkpoints") as checkpoints:
        assert checkpoints.latest_step() is None
        assert checkpoints.restore(state()) is None
        checkpoints.save(3, state(3))
        checkpoints.wait()
        assert_bits_equal(checkpoints.restore(state(0)), state(3))
    with Checkpoints(tmp_path / "a" / "checkpoints") as checkpoints:
        assert checkpoints.latest_step() == 3
        shapes = jax.eval_shape(lambda: state(0))
        assert_bits_equal(checkpoints.restore(shapes), state(3))


def test_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 4, 10):
            checkpoints.save(step, state(step))
            assert checkpoints.latest_step() == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "4"]
    with Checkpoints(tmp_path) as checkpoints:
        assert_bits_equal(checkpoints.restore(state()), state(10))


def test_the_state_may_be_donated_right_after_save(tmp_path):
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    big = {"x": jnp.arange(1_000_003, dtype=jnp.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, big)
        spoiled = spoil(big)
        assert big["x"].is_deleted()
        assert spoiled["x"][7] == -1
        checkpoints.wait()
        restored = checkpoints.restore(jax.eval_shape(lambda: spoiled))
    np.testing.assert_array_equal(restored["x"], np.arange(1_000_003, dtype=np.float32))


def test_what_was_begun_is_saved_when_an_exception_passes(tmp_path):
    def interrupted():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(5, state(5))
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        interrupted()
    with Checkpoints(tmp_path) as checkpoints:
        assert_bits_equal(checkpoints.restore(state()), state(5))


def test_restores_what_another_machine_saved(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1))
    # As if on a GPU that is not here: Orbax notes for each leaf where it lived.
    (path,) = tmp_path.glob("1/default/_sharding")
    shardings = json.loads(path.read_text())
    assert shardings
    assert all("cpu:0" in sharding for sharding in shardings.values())
    path.write_text(path.read_text().replace("cpu:0", "cuda:3"))
    with Checkpoints(tmp_path) as checkpoints:
        assert_bits_equal(checkpoints.restore(jax.eval_shape(state)), state(1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_another_number_of_seeds_is_an_error_not_a_cut(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones((3, 2))})
        checkpoints.wait()
        with pytest.raises(ValueError, match="shape"):
            checkpoints.restore({"x": jnp.ones((2, 2))})
