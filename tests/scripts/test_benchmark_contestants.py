"""All contestants of a benchmark compute the same; lengths are a dozen."""

import functools

import chex
import jax
import numpy as np
import pytest
from command_lines import users_settings

from attention_jax import interop
from attention_jax.nn.config import ModelConfig
from attention_jax.normalizers import NORMALIZERS
from attention_jax.tasks.vocabulary import EOS
from benchmarks import models
from benchmarks.measure import GRAD
from benchmarks.peers import PEERS, jax_nn
from benchmarks.works import OWN, WORKS, Work


@pytest.fixture(autouse=True)
def usual_settings(monkeypatch):
    """Peers need them; compiled programs are shared."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    with users_settings():
        yield


def small(score, **changes):
    sizes = {"direction": GRAD, "key_length": 13, "num_heads": 3, "batch": 2, "dim": 5}
    hidden_dim = 5 if score == "additive" else None
    return Work(score, score, 11, **(sizes | {"hidden_dim": hidden_dim} | changes))


def prepared(name, work):
    """A contestant; the test is skipped where its library is not installed."""
    try:
        return MAKERS[name](work)
    except LookupError as error:
        if "install -e" in str(error):
            pytest.skip(str(error))
        raise


@functools.cache
def by_reference(work):
    return PEERS["ours, reference"](work).call(1)


def check_contestant(name, work):
    """Output and gradients equal those of the reference implementation."""
    expected = by_reference(work)

    def aligned(found, expected):
        found = np.asarray(found)
        return found if found.shape == expected.shape else found.swapaxes(1, 2)

    found = jax.tree.map(aligned, tuple(prepared(name, work).call(1)), tuple(expected))
    chex.assert_trees_all_close(found, tuple(expected), rtol=1e-3, atol=1e-4)


MAKERS = PEERS | {"ours, as jax.nn": functools.partial(jax_nn, module=interop)}
PYTORCH = (("scaled", "local 2"), ("general", "causal"))  # slow, because it is slow to import


@pytest.mark.parametrize(
    ("name", "score", "mask"),
    [
        *(("naive JAX", score, "causal") for score in ("additive", "general")),
        *((name, "scaled", "local 2") for name in ("naive JAX", "jax.nn", "flax")),
        *((name, "general", "causal") for name in ("ours, tiled", "jax.nn")),
        *(pytest.param("PyTorch SDPA", *case, marks=pytest.mark.slow) for case in PYTORCH),
        ("ours, tiled", OWN, ""),
        ("ours, as jax.nn", "scaled", "causal"),
        ("Keras", "additive", ""),
    ],
)
def test_contestants_compute_the_same(name, score, mask):
    check_contestant(name, small(score, mask=mask))


@pytest.mark.slow  # it compiles C++ for every formula
def test_keops_computes_the_same():
    # One test: KeOps puts its build folder on sys.path once, and fixtures restore sys.path.
    for score in ("additive", OWN, "scaled"):
        check_contestant("KeOps", small(score, batch=1, num_heads=1))


@pytest.mark.parametrize(
    ("name", "score", "changes"),
    [
        ("jax.nn", "additive", {}),
        ("flax", "general", {}),
        ("Keras", "scaled", {}),
        ("naive JAX", OWN, {}),
    ],
)
def test_a_peer_that_cannot_serve_says_why(name, score, changes):
    with pytest.raises(LookupError):
        prepared(name, small(score, **changes))


def test_the_peers_of_all_works_exist():
    names = {work.name for work in WORKS["attention"]}
    assert {*NORMALIZERS} <= names
    assert {peer for work in WORKS["attention"] for peer in work.peers} <= PEERS.keys()


@pytest.mark.slow
def test_both_ways_to_decode_emit_the_same_tokens_and_never_end():
    config = ModelConfig(score="additive", dim=8, hidden_dim=8, num_heads=4, encoder_layers=0)
    source = np.random.default_rng(3).integers(EOS + 1, 29, (5, 7)).astype(np.int32)
    lengths = np.full(5, 7, np.int32)

    @jax.jit
    def answers():
        model = models.never_ending(config)
        return [way(model, source, lengths, 7) for way in (models.cached, models.naive)]

    cached, naive = answers()
    np.testing.assert_array_equal(cached.tokens, naive.tokens)
    np.testing.assert_allclose(cached.weights, naive.weights, atol=1e-6)
    assert not np.any(cached.tokens == EOS)
    assert len(np.unique(cached.tokens)) > 2
