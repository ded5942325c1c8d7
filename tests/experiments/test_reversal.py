"""The experiments on reversal: their models, scores and counts against independent numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_gru import numpy_logits

from attention_jax.tasks.vocabulary import PAD
from experiments import lab
from experiments.reversal import gru_padding

B, S, T, E, H = 3, 7, 5, 11, 13
LENGTHS = np.array([7, 2, 5])
SCORES = ("additive", "dot", "general", "scaled")


# --- gru_padding ---


def torch_state(score, params):
    """The parameters by their names in PyTorch, float64; PAD's embedding is 0."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    state = {}
    for name in ("source_embedding", "target_embedding"):
        state[f"{name}.weight"] = params[name].copy()
        state[f"{name}.weight"][PAD] = 0
    for name, ending in (("encoder", "_l0"), ("decoder", "")):
        for ours, theirs in (("input", "ih"), ("state", "hh")):
            state[f"{name}.weight_{theirs}{ending}"] = params[name][f"{ours}_kernel"].T
            state[f"{name}.bias_{theirs}{ending}"] = params[name][f"{ours}_bias"]
    state["logits.weight"] = params["logits"]["kernel"].T
    state["logits.bias"] = params["logits"]["bias"]
    if score == "additive":
        kernels = (params["score"]["query_kernel"].T, params["score"]["key_kernel"].T)
        state["score.hidden.weight"] = np.concatenate(kernels, axis=1)
        state["score.v.weight"] = params["score"]["v"][None]
    if score == "general":
        state["score.weight"] = params["score"]["kernel"]
    return state


@pytest.mark.parametrize("score", SCORES)
def test_the_gru_is_that_of_the_chapter(score):
    rng = np.random.default_rng(3)
    source, target_inputs = rng.integers(1, 29, (B, S)), rng.integers(1, 29, (B, T))
    source[np.arange(S) >= LENGTHS[:, None]] = PAD
    config = gru_padding.Config()
    tasks = [config.task(gru_padding.GRU, score, mask=mask) for mask in (False, True)]
    tasks = [dataclasses.replace(task, embedding_dim=E, hidden_dim=H) for task in tasks]
    params = tasks[0].init(jax.random.key(5))
    arrays = params, jnp.asarray(source), jnp.asarray(LENGTHS), jnp.asarray(target_inputs)
    bare, masked = (jax.jit(task.logits)(*arrays) for task in tasks)
    for logits, lengths in ((bare, None), (masked, LENGTHS)):
        expected = numpy_logits(score, torch_state(score, params), source, target_inputs, lengths)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(bare - masked).max() > 1e-3


def test_initial_parameters_are_distributed_as_in_pytorch():
    tasks = [gru_padding.Config().task(gru_padding.GRU, s, mask=True) for s in SCORES[::2]]
    additive, params = (jax.device_get(jax.jit(task.init)(jax.random.key(5))) for task in tasks)
    kernels = [additive["score"][name] for name in ("query_kernel", "key_kernel")]
    # A linear layer or GRU: uniform up to 1 / sqrt(fan-in), or 1 / sqrt(H).
    for arrays, bound in (
        (params["encoder"].values(), 96**-0.5),
        (params["decoder"].values(), 96**-0.5),
        (params["logits"].values(), 192**-0.5),
        (kernels, 192**-0.5),
        ([additive["score"]["v"]], 96**-0.5),
    ):
        for array in arrays:
            assert np.abs(array).max() <= bound
            assert np.std(array) == pytest.approx(bound / 3**0.5, rel=0.25)
    assert np.std(params["source_embedding"]) == pytest.approx(1, rel=0.1)
    assert np.std(params["score"]["kernel"]) == pytest.approx(0.1, rel=0.05)  # 0.1 randn(H, H)


def test_a_worse_scaled_dot_would_not_contradict_the_published_ranking():
    rows = lab.content_of("gru_padding")["rows"]
    for row in lab.where(rows, model=gru_padding.GRU, arm=gru_padding.MASKED, score="scaled"):
        row["letters"] = [0.9 for _ in row["letters"]]
    (claim,) = [claim for claim in gru_padding.claims(rows) if claim.denies]
    assert claim.verdict == "MISS"
    assert claim.measured == pytest.approx(-0.1, abs=0.005)
