"""Optimisers: their rate, another one that is known by its program, and wrong ones."""

import dataclasses
import functools
import json
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mistakes import refused
from saved_files import assert_bits_equal
from toy_task import Toy, toy

from attention_jax.training.run import load_run, load_states, prepare, train_run
from attention_jax.training.step import initial_state
from attention_jax.training.task import Task, TrainConfig

pytestmark = pytest.mark.usefixtures("standard_promotion")


@dataclasses.dataclass(frozen=True)
class Plain(Toy):
    """A task without an optimiser of its own."""

    optimizer = Task.optimizer


@dataclasses.dataclass(frozen=True)
class Composed(Toy):
    """A task whose optimiser is composed by hand."""

    make: ClassVar = None

    def optimizer(self):
        chain = optax.chain(optax.clip_by_global_norm(0.1), self.make(self.train.rate()))
        return optax.MultiSteps(chain, 2)


SIZE = [1.0]


def signed(rate, power=0.0):
    """An optimiser of a user: steps of the sign of the gradient times a power of its size."""

    def update(gradients, params):
        del params
        return jax.tree.map(lambda g: SIZE[0] * jnp.sign(g) * jnp.abs(g) ** power, gradients)

    return optax.chain(
        optax.stateless(update), optax.trace(0.5), optax.scale_by_learning_rate(rate)
    )


def plain(optimizer, **train):
    saved = {"log_every": 2, "checkpoint_every": 2, "schedule": "constant", "clip_norm": 0.1}
    return toy(Plain, optimizer=optimizer, **saved, **train)


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("optax:lion", optax.lion),
        ("optax:sgd(momentum=0.9)", functools.partial(optax.sgd, momentum=0.9)),
        ("optax:adafactor", optax.adafactor),
        ("test_optimizers:signed(power=1)", functools.partial(signed, power=1)),
    ],
)
def test_another_optimizer(tmp_path, monkeypatch, text, make):
    task = plain(text, steps=6, warmup_steps=2, accumulate=2)
    for each in (plain(text, steps=4, warmup_steps=2, accumulate=2), task):
        train_run(each, tmp_path / "resumed", resume=True)
    train_run(task, tmp_path / "whole")
    folders = tmp_path / "resumed", tmp_path / "whole"
    found, expected = (load_states(folder)[1][6] for folder in folders)
    assert_bits_equal(found, expected)
    configs = [(folder / "config.json").read_bytes() for folder in folders]
    assert configs[0] == configs[1]
    monkeypatch.setattr(Composed, "make", staticmethod(make))
    train_run(Composed(train=dataclasses.replace(task.train, optimizer="adam")), tmp_path / "hand")
    assert_bits_equal(found.params, load_run(tmp_path / "hand").params)
    assert not np.allclose(found.params["w"], initial_state(task).params["w"], rtol=1e-4)


def test_an_edited_optimizer_is_not_resumed_but_its_run_is_read(tmp_path, monkeypatch):
    train_run(plain("test_optimizers:signed", steps=2), tmp_path)
    SIZE[0] = 2.0
    assert load_run(tmp_path).step == 2
    with pytest.raises(
        ValueError, match=r"optimizer test_optimizers:signed was program .* restore"
    ):
        train_run(plain("test_optimizers:signed", steps=4), tmp_path, resume=True)
    for size, message in ((2.0, "other numbers"), (1.0, "the same numbers")):
        SIZE[0] = size
        config = json.loads((tmp_path / "config.json").read_text())
        config["optimizer_program"] |= {"program": "0", "jax": "0.9"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with (
            pytest.raises(ValueError, match=message)
            if size == 2
            else pytest.warns(UserWarning, match=message)
        ):
            train_run(plain("test_optimizers:signed", steps=2), tmp_path, resume=True)
    with pytest.raises(
        ValueError, match=r"train.optimizer was 'test_optimizers:signed', now 'adam'"
    ):
        train_run(plain("adam", steps=2), tmp_path, resume=True)
    assert train_run(plain("test_optimizers:signed", steps=4), tmp_path, resume=True).step == 4


# --- rates and updates ---


@dataclasses.dataclass(frozen=True)
class Rated(Toy):
    """A task that is trained with the rate of its settings."""

    def optimizer(self):
        return optax.sgd(self.train.rate())


@pytest.mark.parametrize("from_0", [False, True])
@pytest.mark.parametrize(
    ("schedule", "warmup", "accumulate"),
    [
        ("constant", 4, 1),
        ("constant", 1, 1),
        ("inverse-sqrt", 0, 1),
        ("inverse-sqrt", 4, 1),
        ("cosine", 4, 1),
        ("cosine", 10, 1),
        ("cosine", 0, 3),
    ],
)
def test_rates(schedule, warmup, accumulate, from_0):
    """Of 10 updates. Vaswani et al. 2017, section 5.3, for the inverse square root."""
    config = TrainConfig(
        steps=10 * accumulate, accumulate=accumulate, schedule=schedule, warmup_steps=warmup,
        learning_rate=0.5, warmup_from_0=from_0,
    )  # fmt: skip
    found = jax.jit(jax.vmap(config.rate()))(np.arange(10))
    expected = []
    for count in range(10):
        done = count if from_0 and schedule != "inverse-sqrt" else count + 1
        rise = min(1.0, done / warmup) if warmup else 1.0
        fall = 1.0
        if schedule == "cosine" and warmup < 10:
            fall = (1 + np.cos(np.pi * max(0, count - warmup) / (10 - warmup))) / 2
        if schedule == "inverse-sqrt":
            fall = min(1.0, (max(warmup, 1) / done) ** 0.5)
        expected.append(0.5 * rise * fall)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_run_of_before_goes_on_as_it_began_and_a_new_one_warms_up_in_its_updates(tmp_path):
    def warmed(**train):
        saved = {"log_every": 2, "checkpoint_every": 2, "schedule": "constant"}
        return toy(Rated, warmup_steps=4, **(saved | train))

    with pytest.raises(ValueError, match=r"^warmup_steps must be at most .* updates, 3; got 4$"):
        prepare(warmed(steps=6, accumulate=2), tmp_path / "long")
    train_run(warmed(steps=6, warmup_from_0=True), tmp_path / "whole")
    train_run(warmed(steps=2, warmup_from_0=True), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"].pop("warmup_from_0") is True
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    for steps in (4, 6):  # config.json has the setting after the first
        assert train_run(warmed(steps=steps), tmp_path / "run", resume=True).step == steps
    folders = tmp_path / "run", tmp_path / "whole"
    assert_bits_equal(*(load_states(folder)[1][6] for folder in folders))
    new = train_run(warmed(steps=6), tmp_path / "new").params["w"]
    assert not np.allclose(new, load_run(folders[0]).params["w"], rtol=1e-3)


def test_one_update_for_several_batches_is_that_of_their_mean():
    config = TrainConfig(schedule="constant", learning_rate=0.5, accumulate=2, weight_decay=0.1)
    one = dataclasses.replace(config, accumulate=1)
    optimizer, single = config.transformation(), one.transformation()
    # The mean is not clipped, and has the size of epsilon: its double would be another update.
    params, gradients = np.ones(2, np.float32), np.float32([[3e-8, -1e-8], [1e-8, 0.0]])

    @jax.jit
    def updates():
        first, state = optimizer.update(gradients[0], optimizer.init(params), params)
        second, _ = optimizer.update(gradients[1], state, params)
        return first, second, single.update(gradients.mean(0), single.init(params), params)[0]

    first, second, expected = updates()
    assert np.all(np.asarray(first) == 0)
    np.testing.assert_allclose(second, expected, rtol=1e-6)


# --- wrong ones ---

OPTIMIZERS = {  # (init, update)
    "textual": (lambda params: "state", lambda grads, state, params: (grads, state)),
    "growing": (lambda params: 0, lambda grads, state, params: (grads, jnp.ones(2))),
    "losing": (lambda params: 0, lambda grads, state, params: ({}, state)),
    "short": (lambda params: 0, lambda grads, state, params: grads["w"]),
    "twofold": (lambda params: {"a.b": 0, "a": {"b": 0}},
                lambda grads, state, params: (grads, state)),
    "random": (lambda params: 0, lambda grads, state, params: (
        jax.tree.map(lambda g: g * np.random.rand(3), grads), state)),
}  # fmt: skip


def __getattr__(name):
    """The functions that an option --optimizer names."""
    if name not in OPTIMIZERS:
        raise AttributeError(name)
    return lambda rate: optax.GradientTransformation(*OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("lion", "must be one of adam"),
        *((f"optax:{text}", text) for text in ("lyon", "sgd(3)", "sgd(rate=3)", "safe_norm")),
        *((text, text) for text in ("nowhere:lion", "math:pi", "optax:lbfgs")),
        *((f"test_optimizers:{name}", name) for name in OPTIMIZERS),
    ],
)
def test_a_wrong_optimizer_is_one_line(tmp_path, text, named):
    task = toy(optimizer=text)
    refused(f"optimizer .*{re.escape(named)}", lambda: prepare(task, tmp_path / "run"))


@pytest.mark.parametrize("name", ["weight_decay", "beta2", "epsilon"])
def test_settings_of_adam_belong_to_adam(name):
    refused(name, lambda: TrainConfig(optimizer="optax:lion", **{name: 0.3}))
