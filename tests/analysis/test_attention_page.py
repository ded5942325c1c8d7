"""`analysis.view`: the data of the page, its checks, and text that must stay text."""

import base64
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from html_reader import Reader, decoded_numbers
from oracles import normal, softmax

from attention_jax import analysis, attention, causal_mask, padding_mask
from attention_jax.analysis import AttentionView, view
from attention_jax.analysis.attention_page import page as page_files

N, T, S = 3, 5, 7
EVIL = "</script><script>alert('x')</script><!-- & \"quotes\" <b>"


def tokens(letter, count):
    return [f"{letter}{index}" for index in range(count)]


def random_weights(shape=(N, T, S), seed=0):
    return softmax(normal(*shape, seed=seed))


def attentions_of(shown):
    return {each["name"]: each for each in shown.data["captures"][0]["attentions"]}


def numbers(attention, quantity):
    return decoded_numbers(attention["arrays"][quantity])


SEQ2SEQ_TOKENS = {
    "encoder_*": (tokens("s", 4), tokens("s", 4)),
    "*/cross_attention": (tokens("t", T), tokens("s", 4)),
    "decoder_*": (tokens("t", T), tokens("i", T)),
}


@pytest.fixture(scope="module")
def captured():
    """Captured gradients of functions with the names of a model's attentions."""

    def attend(name, query, key, mask):
        with jax.named_scope(name):
            return attention(query, key, key, mask=mask, implementation="reference")

    def loss(tokens):
        source, target = tokens
        padding = padding_mask(np.array([4, S]))
        for layer in range(2):
            source += attend(f"encoder_{layer}/self_attention", source, source, padding)
        target += attend("decoder_0/self_attention", target, target, causal_mask())
        output = attend("decoder_0/cross_attention", target, source, padding)
        return jnp.sum(jnp.sin(output))

    return jax.jit(lambda tokens: analysis.capture_gradients(loss, tokens))(
        (normal(2, S, 4), normal(2, T, 4))
    )


def test_every_captured_quantity_is_in_the_page(captured):
    found = attentions_of(view(captured, SEQ2SEQ_TOKENS))
    assert list(found) == [  # a jit has sorted them by name
        "encoder_0/self_attention",
        "encoder_1/self_attention",
        "decoder_0/self_attention",
        "decoder_0/cross_attention",
    ]
    cross = found["decoder_0/cross_attention"]
    assert (cross["query_tokens"], cross["key_tokens"]) == (tokens("t", T), tokens("s", 4))
    attention = captured.attentions["decoder_0/cross_attention"]
    gradient = captured.gradients["decoder_0/cross_attention"]
    for quantity, expected in {
        "weights": attention.weights[0, :, :4],
        "logits": attention.logits[0, :, :4],
        "dlogits": gradient.dlogits[0, :, :4],
        "entropy": attention.statistics.entropy[0],
    }.items():
        assert cross["arrays"][quantity]["dtype"] == "float32"
        np.testing.assert_allclose(numbers(cross, quantity)[0], expected, atol=1e-6)
    assert "dlogits" not in attentions_of(view(captured.attentions))[cross["name"]]["arrays"]
    assert cross["mask"] is None  # the padding has no labels
    assert found["decoder_0/self_attention"]["mask"]["shape"] == [1, T, T]


def test_rollout_of_the_encoder_and_through_the_cross_attention(captured):
    found = attentions_of(view(captured))
    rollout = np.eye(S)
    for layer in range(2):
        weights = captured.attentions[f"encoder_{layer}/self_attention"].weights[0]
        heads = weights.reshape(-1, S, S).mean(0)
        rollout = (heads + np.eye(S)) / (heads + np.eye(S)).sum(-1, keepdims=True) @ rollout
        entry = found[f"encoder_{layer}/self_attention"]
        np.testing.assert_allclose(numbers(entry, "rollout")[0], rollout, atol=1e-5)
    weights = captured.attentions["decoder_0/cross_attention"].weights[0]
    expected = weights.reshape(-1, T, S).mean(0) @ rollout
    cross = found["decoder_0/cross_attention"]
    np.testing.assert_allclose(numbers(cross, "rollout")[0], expected, atol=1e-5)
    assert "rollout" not in found["decoder_0/self_attention"]["arrays"]
    # It is not defined for weights whose rows do not sum to 1, as behind a Gaussian.
    first = captured.attentions["encoder_0/self_attention"]
    halved = first._replace(weights=first.weights / 2)
    attentions = {**captured.attentions, "encoder_0/self_attention": halved}
    found = attentions_of(view(captured._replace(attentions=attentions)))
    assert not any("rollout" in entry["arrays"] for entry in found.values())


def test_masks_as_bits():
    weights = random_weights()
    mask = np.array(causal_mask(1).materialize(T, S))
    own = np.random.default_rng(1).random((N, T, S)) < 0.5
    for masks, expected in ((np.stack([mask] * N), mask[None]), (own, own)):
        shown = view({"a": {"weights": weights, "mask": masks}}, example=())
        entry = attentions_of(shown)["a"]["mask"]
        assert entry["shape"] == list(expected.shape)
        bytes_ = base64.b64decode(entry["data"])
        bits = [bytes_[n // 8] >> (n % 8) & 1 for n in range(expected.size)]
        np.testing.assert_array_equal(np.array(bits, bool), expected.ravel())


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_numbers_of_16_bits_keep_three_digits(scale):
    gradient = np.random.default_rng(0).normal(size=(N, T, S)) * scale
    shown = view({"a": {"dlogits": gradient}}, example=(), precision="float16")
    found = attentions_of(shown)["a"]
    assert found["arrays"]["dlogits"]["dtype"] == "float16"
    np.testing.assert_allclose(numbers(found, "dlogits"), gradient, rtol=6e-4, atol=1e-7 * scale)


def test_infinite_logits_and_nan_weights_survive():
    logits = np.array([[[0.5, -np.inf, np.nan]]])
    for precision in ("float32", "float16"):
        shown = view({"a": {"logits": logits}}, example=(), precision=precision)
        np.testing.assert_array_equal(numbers(attentions_of(shown)["a"], "logits"), logits)
        json.loads(json.dumps(shown.data, allow_nan=False))


# --- several views on one page ---


def small_view(seed=0):
    return view({"a": {"weights": random_weights(seed=seed)}}, example=())


def test_views_side_by_side_step_by_step_and_by_example():
    steps = {
        score: AttentionView.step_by_step({"0": small_view(0), "500": small_view(1)})
        for score in ("dot", "additive")
    }
    both = AttentionView.side_by_side(steps)
    shown = AttentionView.by_example({"first": both, "second": both})
    places = [(c["example"], c["panel"], c["step"]) for c in shown.data["captures"]]
    assert places == [
        (example, score, step)
        for example in ("first", "second")
        for score in ("dot", "additive")
        for step in ("0", "500")
    ]
    with pytest.raises(ValueError, match="views must differ"):
        AttentionView.side_by_side({"lost": both})
    with pytest.raises(ValueError, match="views must be at least one"):
        AttentionView.side_by_side({})


# --- text stays text ---


def test_tokens_names_and_titles_are_text():
    attentions = {EVIL: {"weights": random_weights((1, 2, 2))}}
    shown = view(attentions, [EVIL, "-->"], example=(), title=EVIL)
    shown = AttentionView.side_by_side({EVIL: shown, "other": shown})
    document = shown.to_html()
    page = Reader(document)
    assert page.open == []
    assert len(page.attributes("script")) == 2  # the data, and the script of the page
    assert page.attributes("b") == []
    (written,) = re.findall(r'id="data">(.*?)</script>', document)
    assert not set(written) & set("<>&")
    assert json.loads(written) == shown.data
    assert page.text.count(EVIL) == 2  # the title and the heading
    assert "http" not in document.replace("http-equiv", "")


def test_every_script_is_part_of_the_page():
    scripts = {path.name: path for path in (Path(page_files.__file__).parent / "script").iterdir()}
    assert scripts.keys() == {*page_files.SCRIPT}
    document = small_view().to_html()
    for path in scripts.values():
        assert path.read_text() in document
        assert len(path.read_text().splitlines()) < 400


def test_a_notebook_gets_a_frame_without_access_to_it():
    shown = view({"a": {"weights": random_weights((1, 2, 2))}}, [EVIL, "b"], example=())
    (frame,) = Reader(shown._repr_html_()).attributes("iframe")
    assert frame["sandbox"] == "allow-scripts"
    assert frame["srcdoc"] == shown.to_html()


# --- mistakes ---


def test_an_index_into_arrays_without_batch_axes():
    with pytest.raises(ValueError, match=r"got 0; give example=\(\) for arrays without batch"):
        view({"a": {"weights": np.ones((T, S)) / S}})


@pytest.mark.parametrize("name", ["page.png", "missing/page.html", "."])
def test_saving_where_no_page_can_be(name, tmp_path):
    with pytest.raises(ValueError, match="html must be a file"):
        small_view().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
