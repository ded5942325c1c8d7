"""A wrong score of the user fails with one line, before anything compiles."""

import dataclasses
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from command_lines import call, load

from attention_jax import Score, SoftCap, nn
from attention_jax.scores import SCORES, FunctionScore, get_score, known_score
from attention_jax.tasks.translation.task import MODEL, Translation
from attention_jax.training.run import train_run

HERE = "test_known_scores.py, line "  # of this file


@dataclasses.dataclass(frozen=True)
class Wrong(Score):
    """A score of which one method is wrong."""

    method: str
    mistake: str

    def init(self, rng, query_dim, key_dim):
        self._fail("init")
        return {"kernel": jax.random.normal(rng, (query_dim, key_dim))}

    def project_query(self, params, query):
        self._fail("project_query")
        if (self.method, self.mistake) == ("project_query", "transposed"):
            return query.T
        return query @ params["kernel"]

    def project_key(self, params, key):
        self._fail("project_key")
        if (self.method, self.mistake) == ("project_key", "no tokens"):
            return {"keys": key, "sum": key.sum()}
        return key

    def pair(self, params, q_features, k_features):
        self._fail("pair")
        logits = q_features @ k_features.T
        return {
            "queries": lambda: q_features,
            "row": lambda: logits[:, :1],
            "integers": lambda: logits.astype(int),
            "booleans": lambda: logits > 0,
            "several": lambda: (logits, logits),
            "nothing": lambda: None,
            "jax": lambda: q_features @ k_features,  # shapes that do not fit
            "branch": lambda: logits if logits[0, 0] > 0 else -logits,
            "params": lambda: params["karnel"] * logits,
        }.get(self.mistake, lambda: logits)()

    def _fail(self, method):
        if (self.method, self.mistake) == (method, "raises"):
            raise LookupError("first line\nsecond line")


@pytest.mark.parametrize(
    ("method", "mistake", "message"),
    [
        ("init", "raises", "init raised LookupError: first line ("),
        ("project_query", "raises", "project_query of float32 [3, 4] raised LookupError: first"),
        ("project_query", "transposed", "project_query must return one row per token, [3, ...]"),
        ("project_key", "raises", "project_key of float32 [5, 4] raised LookupError: first line ("),
        ("project_key", "no tokens", "project_key must return one row per token, [5, ...]"),
        ("pair", "raises", "pair of float32 [3, 4] and float32 [5, 4] raised LookupError: first"),
        ("pair", "queries", "pair must return float logits [3, 5]"),
        ("pair", "row", "got float32 [3, 1]"),
        ("pair", "integers", "got int32 [3, 5]"),
        ("pair", "booleans", "got bool [3, 5]"),
        ("pair", "several", "got a tuple of 2 arrays"),
        ("pair", "nothing", "got None"),
        ("pair", "jax", "raised TypeError: "),
        ("pair", "branch", "raised TracerBoolConversionError: "),
        ("pair", "params", "raised KeyError: 'karnel' ("),
    ],
)  # fmt: skip
def test_one_line_names_score_method_result_and_line(method, mistake, message):
    score = Wrong(method, mistake)
    lines, first = inspect.getsourcelines(Wrong)
    line = first + next(i for i, line in enumerate(lines) if "raise LookupError" in line)
    for whole in (score, SoftCap(score), SoftCap(SoftCap(score))):
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            known_score(whole, None, 4, 4)
        text = str(raised.value)
        assert text.startswith(f"score {score}")
        assert "\n" not in text
        assert "raised" not in message or HERE in text
        assert mistake != "raises" or text.endswith(f"{HERE}{line})")


@pytest.mark.parametrize("score", [*SCORES, FunctionScore(lambda q, k: jnp.tanh(q @ k.T))])
def test_good_scores_pass(score):
    known_score(get_score(score), None, 5, 5)
    known_score(Wrong("", ""), None, 3, 5)


def test_a_function_names_its_line():
    def cube(q, k):
        return q @ k.T + missing(k)

    def missing(k):
        raise OverflowError(f"of {k.shape}")

    message = r"score .*cube: pair of .* raised OverflowError: of \(5, 4\) \(.*" + HERE
    with pytest.raises(ValueError, match=message):
        known_score(get_score(cube), None, 4, 4)


def test_a_mistake_of_ours_keeps_its_error(monkeypatch):
    def broken(*_):
        return jnp.zeros(3) + jnp.zeros(4)

    # As if the library's own function failed inside JAX.
    monkeypatch.setattr("attention_jax.core.programs.users_line", lambda *_: None)
    with pytest.raises(TypeError):
        known_score(FunctionScore(lambda q, k: broken()), None, 4, 4)


# --- where models are made ---


@pytest.fixture
def wrong_module(tmp_path, monkeypatch):
    """Modules of a user in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    head = "import dataclasses\nfrom attention_jax import Score\n\n\n"
    (tmp_path / "wrong_scores.py").write_text(
        f"{head}@dataclasses.dataclass(frozen=True)\nclass Wrong(Score):\n    size: int = 64\n\n"
        "    def pair(self, params, q, k):\n        if q.shape[1] == self.size:\n"
        "            raise RuntimeError('broken')\n        return q @ k.T\n"
    )
    yield tmp_path
    sys.modules.pop("wrong_scores", None)


LINE = "pair of float32 [3, {0}] and float32 [5, {0}] raised RuntimeError: broken (wrong_scores.py,"


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"score": "wrong_scores:Wrong"}, 64),
        ({"score": "wrong_scores:Wrong(size=16)", "num_heads": 4}, 16),
        ({"score": "wrong_scores:Wrong", "num_heads": 4, "attention": "local-p"}, 64),
        ({"self_attention_score": "wrong_scores:Wrong(size=16)", "num_heads": 4}, 16),
        ({"score": "wrong_scores:Wrong(size=16)", "num_heads": 4, "attention": "local-p",
          "self_attention_score": None}, 16),
        ({"score": "softcap(score=wrong_scores:Wrong)", "normalizer": "log_scaled(start=8)"}, 64),
    ],
)  # fmt: skip
def test_a_model_checks_its_scores_at_its_sizes(settings, size, wrong_module):
    config = nn.ModelConfig(**settings)
    with pytest.raises(ValueError, match=re.escape(LINE.format(size))):
        nn.Model(config, 7, rngs=nn_rngs())


def test_self_attention_that_is_not_there_is_not_checked(wrong_module):
    config = nn.ModelConfig(
        self_attention_score="wrong_scores:Wrong", encoder_layers=0, decoder_self_attention=False
    )
    config.check_scores_run()


def nn_rngs():
    from flax import nnx

    return nnx.Rngs(0)


def test_training_fails_before_it_makes_a_folder(wrong_module, monkeypatch, capsys):
    train = load("scripts/train.py")
    words = ["--score", "wrong_scores:Wrong", "--workdir", "run"]
    assert call(train, *words, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"error: score Wrong(size=64): {LINE.format(64)} line 11)")
    assert not (wrong_module / "run").exists()


def test_translation_fails_before_it_reads_the_text(wrong_module):
    model = dataclasses.replace(MODEL, score="wrong_scores:Wrong(size=32)")
    task = Translation(source="nowhere", target="nowhere", model=model)
    with pytest.raises(ValueError, match=re.escape(LINE.format(32))):
        train_run(task, wrong_module / "run")


@dataclasses.dataclass(frozen=True)
class WithoutPair(Score):
    """A score that lacks its only required method."""


def test_a_score_without_pair():
    with pytest.raises(ValueError, match=r"score WithoutPair\(\) must define pair\(params, "):
        known_score(WithoutPair(), None, 3, 5)
