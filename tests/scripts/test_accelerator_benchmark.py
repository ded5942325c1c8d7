"""The attention benchmark on a GPU and on a TPU: works, peers, and one of them interpreted."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def peers_on(backend, monkeypatch):
    """The peers of the works that this backend alone has, by name of the work."""
    from benchmarks import attention_works

    everywhere = attention_works.all_works().keys()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    works = attention_works.all_works()
    return {name: works[name].peers for name in works.keys() - everywhere}


@pytest.mark.parametrize(
    ("backend", "scaled", "additive"),
    [
        ("gpu", ("jax.nn", "cuDNN", "tokamax"), ("naive JAX", "ours, mosaic_gpu")),
        ("tpu", ("jax.nn", "splash", "tokamax"), ("naive JAX",)),
    ],
)
def test_accelerators_have_works_with_their_peers(backend, scaled, additive, monkeypatch):
    from benchmarks.attention_peers import PEERS

    found = peers_on(backend, monkeypatch)
    assert len(found) == 5 * 2 * 2 * 2  # lengths, dtypes, scores, directions
    assert found[f"{backend}-scaled-bfloat16-4k"] == scaled
    assert found[f"{backend}-additive-float32-16k-grad"] == additive
    assert {peer for peers in found.values() for peer in peers} <= PEERS.keys()


@pytest.mark.parametrize("name", ["splash", "tokamax"])
def test_peers_for_accelerators_are_absent_elsewhere(name):
    from benchmarks.attention_peers import PEERS
    from benchmarks.attention_works import Work

    with pytest.raises(LookupError, match="it needs a"):
        PEERS[name](Work("scaled", "scaled", 128))


@pytest.mark.parametrize("mask", ["", "causal"])
def test_splash_computes_the_same(mask):
    from benchmarks.attention_peers import PEERS, ours
    from benchmarks.attention_works import Work

    work = Work("scaled", "scaled", 128, num_heads=2, dim=128, mask=mask, backward=True)
    expected = ours(work).call()
    with (
        pltpu.force_tpu_interpret_mode(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        found = PEERS["splash"](work).call()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
