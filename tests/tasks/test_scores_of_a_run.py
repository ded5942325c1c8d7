"""A run knows its score and its normaliser: another one under the same name is refused."""

import dataclasses
import functools
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from stand_in_training import without_training
from user_tasks import Rotate

from attention_jax import Entmax, LogScaled, Score, Softmax, nn
from attention_jax.nn.config import ModelConfig
from attention_jax.runs.run_folder import read_config
from attention_jax.scores import Additive, SoftCap
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.identity import check_resumable, config_of, task_in
from attention_jax.training.run import train_run
from attention_jax.training.task import TrainConfig

OLD, NEW = "Temperature(temperature=4.0)", "Temperature(temperature=2.0)"
CHANGE = re.escape(f"'my_scores:MINE' was {OLD}") + ".* and is " + re.escape(NEW) + ".*; restore"


@dataclasses.dataclass(frozen=True)
class Temperature(Score):
    temperature: float

    def pair(self, params, q_features, k_features):
        return q_features @ k_features.T / self.temperature


@pytest.fixture
def mine(monkeypatch):
    """A function that changes what "my_scores:MINE" names."""
    module = types.ModuleType("my_scores")
    monkeypatch.setitem(sys.modules, "my_scores", module)

    def change(score):
        module.MINE = score

    change(Temperature(4.0))
    return change


def begun(folder, cls=Reversal, **scores):
    """A run folder with the config.json that `train_run` writes."""
    task = cls(model=ModelConfig(**scores))
    (folder / "config.json").write_text(json.dumps(config_of(task)))
    return task


def formula(factor):
    def score(q, k):
        return factor * (q @ k.T)

    return score


def elsewhere(temperature):
    def pair(self, params, q_features, k_features):
        return q_features @ k_features.T * self.temperature

    body = {"__module__": "elsewhere", "pair": pair}
    return type("Temperature", (Temperature,), body)(temperature)


class Shifted(Softmax):
    """Its init is not seen in any number of given parameters."""

    start = 0.0

    def init(self, *rng_and_sizes):
        return {"shift": jnp.full((), self.start)}

    def transform(self, params, logits, num_keys):
        return logits + params["shift"]


COLD, WARM = (type("Mine", (Shifted,), {"start": start})() for start in (0.0, 3.0))
BEFORE, AFTER = Temperature(4.0), Temperature(2.0)
WIDE, NARROW = (LogScaled(Entmax(alpha), start=7) for alpha in (1.25, 1.5))


@pytest.mark.parametrize(
    ("setting", "before", "after", "message"),
    [
        ("score", BEFORE, AFTER, CHANGE),
        ("self_attention_score", BEFORE, SoftCap(Additive(3)), r".*and is SoftCap\(score=Additive"),
        ("score", BEFORE, elsewhere(4.0), r".* was .*_run.Temperature.* is .*elsewhere.Temp"),
        ("score", formula(1.0), formula(2.0), ".* was .*program .* and is .*program .* now"),
        ("normalizer", COLD, WARM, ".* was .*program .* and is .*program .* now"),
        ("normalizer", WIDE, NARROW, r".* was LogScaled\(.*\(alpha=1.25.* is .*\(alpha=1.5"),
        ("self_attention_normalizer", WIDE, NARROW, r".* was LogScaled\(.*\(alpha=1.25"),
    ],
)
def test_another_part_under_the_name_is_refused(setting, before, after, message, mine, tmp_path):
    mine(before)
    task = begun(tmp_path, **{setting: "my_scores:MINE"})
    config, known = (tmp_path / "config.json").read_text(), task.model.known()
    assert task_in(tmp_path) == task
    mine(after)
    assert task.model.known() != known
    for read in (task_in, functools.partial(train_run, task, resume=True)):
        with pytest.raises(ValueError, match=f"^workdir {tmp_path}: {setting} {message}"):
            read(tmp_path)
    assert (tmp_path / "config.json").read_text() == config
    mine(before)
    assert task_in(tmp_path) == task


def test_a_compiled_model_follows_the_fields_of_what_a_module_names(mine):
    def cap_of(score):
        mine(score)
        params = jax.eval_shape(lambda: nn.initial_params(config, 7, jax.random.key(0)))
        model = nn.bind(config, params, 7)
        return model.decoder[0].cross_attention.attention.score.cap

    config = ModelConfig(score="my_scores:MINE", dim=4, encoder_layers=0)
    assert [cap_of(SoftCap(cap=cap)) for cap in (2.0, 3.0)] == [2.0, 3.0]


def test_another_name_is_one_difference(mine, tmp_path):
    task = begun(tmp_path, score="my_scores:MINE")
    other = dataclasses.replace(task, model=dataclasses.replace(task.model, score="dot"))
    with pytest.raises(ValueError, match="another configuration") as raised:
        train_run(other, tmp_path, resume=True)
    assert "another configuration: model.score was 'my_scores:MINE'," in str(raised.value)
    assert "scores." not in str(raised.value)


def softplus(q, k):
    return jax.nn.softplus(q @ k.T)


def softplus_rewritten(q, k):
    return jnp.log(1 + jnp.exp(k @ q.T)).T


def test_a_renamed_or_rewritten_score_is_read_and_resumed(mine, tmp_path, monkeypatch):
    mine(softplus)
    names = {"score": "my_scores:MINE", "self_attention_score": "my_scores:MINE"}
    train = TrainConfig(seeds=1, steps=6, schedule="constant", log_every=2, checkpoint_every=2)
    model = ModelConfig(**names, dim=8, hidden_dim=8, encoder_layers=0)
    task = Rotate(model, train)  # whose program is known, too
    with without_training():
        train_run(task, tmp_path)
    monkeypatch.setitem(sys.modules, "my_scores", None)
    with pytest.raises(ValueError, match=r"score 'my_scores:MINE'.* new name as score$"):
        task_in(tmp_path)
    new = types.ModuleType("new_scores")
    monkeypatch.setitem(sys.modules, "new_scores", new)
    new.SAME, new.REWRITTEN, new.OTHER = softplus, softplus_rewritten, formula(1.0)
    read = functools.partial(task_in, tmp_path)

    def renamed(score, steps=6):
        model = dataclasses.replace(task.model, **dict.fromkeys(names, score))
        return dataclasses.replace(task, model=model, train=dataclasses.replace(train, steps=steps))

    def resumed(score):
        return train_run(renamed(score, steps=8), tmp_path, resume=True)

    assert read(score="new_scores:SAME") == renamed("new_scores:SAME")
    with pytest.warns(UserWarning, match="the same numbers"):
        assert read(score="new_scores:REWRITTEN") == renamed("new_scores:REWRITTEN")
    for other, use in (("new_scores:OTHER", resumed), ("dot", lambda score: read(score=score))):
        with pytest.raises(ValueError, match=rf"score '{other}' was .*"):
            use(other)
    with pytest.warns(UserWarning, match="the same numbers"):
        resumed("new_scores:REWRITTEN")
    assert read() == renamed("new_scores:REWRITTEN", 8)  # and no warning: the new program
    config = json.loads((tmp_path / "config.json").read_text())
    del config["scores"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="score must be left out"):
        read(score="new_scores:SAME")


@dataclasses.dataclass(frozen=True)
class Swap(Rotate):
    """A task of a user, in a file that is renamed."""

    by: int = 2


def test_every_part_of_a_user_may_be_renamed(mine, tmp_path, monkeypatch):
    mine(softplus)
    old, new = (types.ModuleType(name) for name in ("old_parts", "new_parts"))
    old.Cold, old.look, old.Swap = Shifted, formula(2.0), Swap
    monkeypatch.setattr(Swap, "__module__", "old_parts")
    for module in (old, new):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    parts = {
        "score": "my_scores:MINE", "self_attention_score": "old_parts:look",
        "normalizer": "old_parts:Cold", "self_attention_normalizer": "old_parts:Cold",
    }  # fmt: skip
    task = begun(tmp_path, Swap, **parts, dim=4, hidden_dim=4, encoder_layers=0)
    stored = read_config(tmp_path)
    new.Warm, new.see, new.Swap = Shifted, old.look, Swap
    changes = [
        ("task", "old_parts:Swap", "new_parts:Swap"),
        ("self_attention_score", "old_parts:look", "new_parts:see"),
        ("normalizer", "old_parts:Cold", "new_parts:Warm"),
    ]
    given = ""
    monkeypatch.setitem(sys.modules, "old_parts", None)
    monkeypatch.setattr(Swap, "__module__", "new_parts")
    for setting, before, after in changes:
        cure = f"{before!r}.*; if it was renamed, give its new name as score, {setting}=module:Name"
        with pytest.raises(ValueError, match=cure):
            task_in(tmp_path, score=given or None)
        given = f"{given} {setting}={after}".strip()
    model = dataclasses.replace(
        task.model, self_attention_score="new_parts:see", normalizer="new_parts:Warm",
        self_attention_normalizer="new_parts:Warm",
    )  # fmt: skip
    renamed = dataclasses.replace(task, model=model)
    assert task_in(tmp_path, score=f"my_scores:MINE {given}") == renamed
    check_resumable(renamed, config_of(renamed), tmp_path, stored)
    for wrong, named in ((given.replace(":see", ":MISSING"), "MISSING"), ("task=dot", "'dot'")):
        with pytest.raises(ValueError, match=named):
            task_in(tmp_path, score=wrong)
    mine(formula(3.0))
    with pytest.raises(ValueError, match="score 'my_scores:MINE' was"):
        task_in(tmp_path, score=given)
