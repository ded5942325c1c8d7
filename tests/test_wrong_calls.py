"""Wrong arguments of functions, see `mistakes`; nn/test_wrong_modules.py has those of modules."""

import jax
import jax.numpy as jnp
import no
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st
from mistakes import refused, refuses, using
from no import one_of, ones

import attention_jax as aj
from attention_jax import analysis, interop, scores
from attention_jax.functional.centers import predicted_centers, reversed_centers
from attention_jax.functional.memory import remember
from attention_jax.scores import literature

# --- right calls, and their wrong arguments ---

TOKENS = {"query": ones(2, 2), "key": ones(3, 2), "value": ones(3, 2)}
HEADS = {"query": ones(2, 2, 2, 2), "key": ones(2, 3, 2, 2), "value": ones(2, 3, 2, 2)}
PAIRS = np.full((2, 3), 1 / 3, "f4")
STATE = {"logits": np.zeros((2, 3, 3), "f4")}
SEARCH = {"step": lambda state, tokens: (state["logits"][:, 0], state), "state": STATE}
SEARCH |= {"batch_size": 2, "max_length": 3, "sos": 0, "eos": 1, "pad": 2}
tokens = dict.fromkeys(TOKENS, no.tokens)
only_floats = dict.fromkeys(TOKENS, no.floats | st.none())
pairs = {"mask": no.mask, "bias": no.bias}
options = {"dropout_rate": no.rate, "implementation": no.word, "score": no.score}
wrong_search = {
    **dict.fromkeys(("sos", "eos", "pad"), one_of(1.0, "1", None, [1], True)),
    "eos": st.integers(max_value=-1) | st.integers(min_value=3),
    **dict.fromkeys(("batch_size", "max_length"), no.size_or_none | one_of(True, ones(2))),
    "step": one_of(
        None, 3, "step", lambda *_: None, lambda state, _: state["logits"][:, 0],
        lambda state, _: (state["logits"], state), lambda state, _: (state["logits"][:, 0], {}),
        lambda state, _: (state["logits"][:1, 0], state),
        lambda state, _: (state["logits"][:, 0].astype(int), state),
    ),
}  # fmt: skip
SOFTMAX = {"logits": ones(2, 3)}
CAPTURED = analysis.capture(aj.attention, ones(2, 3), ones(2, 3), ones(2, 3)).attentions
SIZE = analysis.logit_size(ones(2, 3))
ROLLOUT = {"weights": ones(1, 1, 2, 2) / 2}
CENTER_PARAMS = {"kernel": ones(2, 4), "v": ones(4)}
CENTERS = {**TOKENS, "centers": ones(2), "radius": 1}
MONOTONIC = {**TOKENS, "score": "dot"}


def combined(mask):
    return aj.causal_mask() & mask


def added(bias):
    return aj.alibi_bias(0.5) + bias


def forgetting(log_gates):
    return aj.attention(**TOKENS, bias=aj.forgetting_bias(log_gates))


def materialized(mask):
    return mask.materialize(2, 3)


WRONG = [  # (function, a right call, {argument: wrong values})
    (aj.attention, TOKENS, {
        **tokens, **pairs, **options, "block_sizes": one_of((2, 2), 4, "4", {}, True, []),
        "key": no.tokens | one_of(ones(3, 3), ones(3, 0)), "value": no.tokens | one_of(ones(2, 2)),
        "normalizer": no.normalizer, "params": no.params,
        "normalizer_params": one_of(3.0, {"sink": 0.0})}),
    (using(aj.attention, score="general"), TOKENS, {
        "params": no.params | one_of(None, *(
            {"kernel": ones(*shape)} for shape in ((2,), (3, 2), (7, 2, 2))))}),
    (using(aj.attention, normalizer="entmax"), TOKENS, {"return_statistics": st.just(True)}),
    (aj.attention_weights, {name: TOKENS[name] for name in ("query", "key")}, {
        "query": no.tokens, "key": no.tokens, **pairs, "score": no.score}),
    (using(aj.ring_attention, mesh=jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])),
     TOKENS, {**only_floats, "key": no.floats | one_of(None, ones(0, 2), ones(3, 3)), **pairs,
              "dropout_rate": no.rate, "axis_name": one_of("data", 3, None), "score": no.score,
              "block_sizes": one_of((2, 2), 4)}),
    (aj.ring_attention, TOKENS, {"mesh": one_of(None, 1, "context", jax.devices())}),
    *((score, {}, {"scale": one_of("1", np.inf, np.nan)})
      for score in (aj.ScaledDot, scores.Cosine, scores.NegativeSquaredDistance)),
    *((score, {}, {"hidden_dim": no.size, "key_part": one_of(0, 1, "False", None)})
      for score in (aj.Additive, scores.Concat)),
    (literature.Indexer, {}, {"num_heads": no.size_or_none}),
    (literature.Power, {}, {"degree": one_of("2", np.inf, np.nan), "score": one_of("dot", 2.0)}),
    (literature.Yat, {}, {"epsilon": one_of(0.0, -1, np.inf, np.nan, "1")}),
    (aj.Multiplied, {}, {"factor": one_of("2", np.inf, np.nan, None)}),
    (aj.SoftCap, {}, {"cap": one_of(0.0, -1, np.inf, np.nan, "50"), "score": one_of("dot", 50.0)}),
    (using(aj.attention, dropout_rate=0.5), TOKENS, {"dropout_rng": no.rng | st.none()}),
    (using(aj.attention, normalizer="softmax(sink=True)"), TOKENS, {
        "normalizer_params": one_of(3.0, {"sink": "text"}, {"sink": np.zeros(7, "f4")}, "sink",
                                    {"sink": None}, {"wrong": 0.0}, {"sink": np.zeros((), int)})}),
    (aj.BlockSizes, {}, {"query": no.size, "key": no.size}),
    (aj.causal_mask, {}, {"offset": no.offset}),
    (aj.local_mask, {"left": 1, "right": 1}, {"left": no.side, "right": no.side}),
    (aj.padding_mask, {"key_lengths": 3},
     {"key_lengths": no.integers, "query_lengths": no.integers}),
    (aj.segment_mask, {"query_segments": [1], "key_segments": [1]},
     {"query_segments": no.integers, "key_segments": no.integers}),
    (aj.packed_documents, {"size": 5, "lengths": [2, 3]}, {
        "size": no.count, "lengths": no.integers | one_of(None, 5, [2, 4], [-1, 3]),
        "cu_seqlens": one_of([0, 2, 5])}),
    (aj.packed_documents, {"size": 5, "cu_seqlens": [0, 2, 5]}, {
        "cu_seqlens": no.integers | one_of(None, 5, [], [1, 5], [0, 3, 2], [0, 6])}),
    (aj.Documents.from_segments, {"segments": [0, 0, 1]},
     {"segments": no.integers | one_of(3, [2**31 - 2])}),
    (aj.window_mask, {"centers": [1.0], "radius": 1}, {
        "centers": no.floats.filter(lambda x: getattr(x, "dtype", "") != "int64"),
        "radius": no.count}),
    (aj.token_mask, {"key_tokens": ones(3, dtype=bool)}, {
        "key_tokens": one_of(ones(3), ones(3, dtype=int), "text"),
        "query_tokens": one_of(ones(3), "text")}),
    (combined, {}, {"mask": one_of("causal", 1, 1.0, ones(2, 2), [[1, 0]], object(), {}, None)}),
    (materialized, {}, {"mask": one_of(
        combined(ones(5, 3, dtype=bool)), ~combined(ones(3, 2, dtype=bool)),
        aj.window_mask(ones(3), 1), aj.segment_mask(ones(3, dtype=int), ones(3, dtype=int)))}),
    (added, {}, {"bias": no.floats}),
    (aj.alibi_bias, {}, {"slopes": no.floats}),
    (aj.alibi_slopes, {}, {"num_heads": no.size_or_none}),
    (aj.forgetting_bias, {}, {"log_gates": no.floats}),
    (forgetting, {}, {"log_gates": one_of(1.0, ones(1), ones(2), ones(3), ones(2, 3))}),
    (aj.relative_bias, {}, {"table": no.floats | one_of(ones(4), 1.0)}),
    (aj.t5_bias, {"table": ones(8)},
     {"table": no.floats | st.just(1.0), "max_distance": one_of(0, -3, 2, 8.0, "8", None)}),
    (aj.gaussian_bias, {"centers": ones(2), "sigma": 1.0}, {
        "centers": no.centers.filter(lambda x: np.shape(x) not in ((3, 1), (7,))),
        "sigma": no.positive | one_of(None, 1j)}),
    (aj.local_attention, CENTERS, {
        **only_floats, **pairs, "implementation": no.word, "dropout_rate": no.rate,
        "centers": no.centers, "radius": no.count,
        "sigma": no.positive | one_of(ones(7), True, 1j)}),
    (aj.coverage_attention, {**MONOTONIC, "coverage_kernel": ones(2)}, {
        **only_floats, "mask": no.mask, "score": no.score, "params": no.params,
        "coverage_kernel": no.floats | one_of(None, 1.0, ones(3), ones(1), ones(7, 2)),
        "coverage": no.floats | one_of(1.0, ones(2), ones(1), ones(7, 3))}),
    (aj.monotonic_attention, MONOTONIC, {
        **only_floats, "mask": no.mask, "score": no.score, "hard": one_of("yes", 1, None, 0.5),
        "offset": no.number | one_of(ones(2), object()), "initial": no.floats | st.just(1.0),
        "noise_scale": no.number | one_of(ones(2), object()), "noise_rng": no.rng,
        "return_weights": one_of("all", 3)}),
    (aj.coverage_loss, {"weights": PAIRS}, {
        "weights": no.floats | one_of(None, 1.0, ones(3)), "coverage": one_of(ones(2), "text")}),
    (predicted_centers, {"query": ones(2, 2), "params": CENTER_PARAMS, "source_lengths": 3}, {
        "params": one_of({"kernel": ones(2, 4)}, {"kernel": ones(3, 4), "v": ones(4)}),
        "source_lengths": one_of(3.0, "3", ones(2))}),
    (reversed_centers, {"target_length": 3, "source_lengths": 3}, {
        "target_length": no.count, "source_lengths": one_of(3.0, "3", ones(2))}),
    (using(remember, query_dim=2), {"score": "dot", "params": None, "key": ones(3, 2),
                                    "value": ones(3, 2)}, {
        "key": no.floats | one_of(ones(2), 1.0), "value": no.floats | one_of(ones(2, 2)),
        "params": one_of({"kernel": ones(2, 2)})}),
    (aj.monotonic_weights, {"probabilities": PAIRS}, {
        "probabilities": no.floats | one_of(0.5, ones(3), 2 * ones(2, 3), np.inf * ones(2, 3)),
        "initial": no.floats | one_of(1.0, ones(2), ones(7, 3))}),
    *((function, {"probabilities": PAIRS}, {
        "probabilities": one_of("text", b"text", {}, 3, 0.5, ones(3), ones(2, 2, dtype=complex),
                                2 * ones(2, 3)),
        "start": no.integers | one_of(None, ones(2, dtype=int))})
      for function in (aj.hard_monotonic_positions, aj.hard_monotonic_weights)),
    (aj.greedy_search, SEARCH, wrong_search),
    (using(aj.beam_search, beams=2), SEARCH, wrong_search | {
        "length_penalty": no.number | one_of(-1.0, np.nan, np.inf)}),
    (aj.beam_search, SEARCH, {"beams": no.size_or_none}),
    (aj.masked_softmax, SOFTMAX, {
        "logits": no.floats | st.none(), "mask": no.mask,
        "axis": one_of(1.0, "last", None, [0], (0, 1)) | st.integers(min_value=2)}),
    *((getattr(analysis, name), {}, {"weights": no.floats | one_of(None, 1.0, ones(3))})
      for name in ("weight_entropy", "effective_keys")),
    (analysis.normalized_entropy, {"weights": PAIRS}, {"weights": no.floats, "mask": no.mask}),
    *((getattr(analysis, name), {"weights": PAIRS, **also}, {
        **wrong, "weights": no.floats, "rows": one_of("all", 1, ones(2), ones(7, dtype=bool), {})})
      for name, also, wrong in (
        ("saturation", {}, {"bound": one_of(-0.5, 1.0, np.nan, "a", None, 1j)}),
        *((name, {"alignment": [0, 1]}, {"alignment": one_of("a", None, 1.0, ones(7, dtype=int))})
          for name in ("alignment_error", "expected_distance")))),
    (analysis.jensen_shannon, {"weights_a": PAIRS}, {
        "weights_b": no.floats | one_of(None, ones(3, 2), ones(1, 2, 3))}),
    (analysis.softmax_vjp, {"weights": PAIRS}, {"dweights": no.floats | one_of(None, ones(3, 2))}),
    *((getattr(analysis, name), {}, {"weights": no.floats})
      for name in ("softmax_jacobian", "softmax_jacobian_norm")),
    (analysis.logit_variance, {}, {"logits": no.floats | st.just(1.0)}),
    (analysis.logit_size, {"logits": ones(1, 2, 3)}, {
        "logits": no.floats | one_of(1.0, None),
        "axis": one_of(1, -2, (0, -1), None, "a", 0.0, True, np.array([0])),
        "rows": one_of("text", 3, ones(2), ones(3, dtype=bool))}),
    (analysis.logit_factor, {"sizes": {"attention": SIZE}, "deviation": 1.0}, {
        "sizes": one_of({}, SIZE, CAPTURED, {"attention": None}),
        "deviation": one_of(0.0, -1, np.inf, np.nan, "1", None)}),
    (analysis.attention_rollout, ROLLOUT, {
        "weights": one_of("text", 3, None, [], ones(2, 3), ones(1, 1, 2, 3), ones(0, 1, 2, 2),
                          ones(1, 1, 2, 2), [ones(1, 2, 2), ones(1, 3, 3)],
                          [ones(1, 2, 2), "text"]),
        "residual": no.rate.filter(lambda x: x != [0.1]), "head_reduction": no.word}),
    (analysis.attention_gradients, TOKENS | {"doutput": ones(2, 2)}, {
        **only_floats, "doutput": no.floats | one_of(None, ones(3, 2), ones(2, 2, 2))}),
    (interop.dot_product_attention, HEADS, {
        **dict.fromkeys(HEADS, no.floats | one_of(None, ones(2, 2), ones(1, 1, 1, 1, 1))), **pairs,
        "scale": one_of("text", [1.0], ones(2), {}, np.nan, np.inf), "score": no.score,
        **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), no.integers | st.just(3)),
        "local_window_size": one_of(1.5, "1", (1,), (1, 2, 3), (-1, 0), {}, -1),
        "implementation": no.word, "params": no.params}),
    (using(interop.dot_product_attention, scale=0.3), HEADS, {
        "score": one_of("dot", aj.ScaledDot(0.3))}),
    (interop.flax_attention_fn, {}, {"score": no.score, "implementation": no.word}),
]  # fmt: skip

test_a_wrong_argument_is_named_in_one_line = refuses(WRONG)


# --- of the analysis, where what is wrong is drawn by no strategy ---

T, S = 5, 7
LAYERS = np.full((3, 2, T, T), 1 / T, np.float32)  # three layers, two heads
ROWS = (np.ones((T, 4)), np.ones((S, 4)), np.ones((S, 3)))
PAGE = {"weights": np.ones((1, T, S))}
RNG = jax.random.key(0)


def cube(x):
    return jnp.sum(x**3)


# (function, arguments, keyword arguments, what the error names)
OF_ANALYSIS = [
    # capture
    (analysis.capture, (3,), {}, "function must be a function"),
    (analysis.capture, (nnx.Linear, 2), {}, "got the class Linear"),
    (analysis.capture, (cube, jnp.ones(3)), {}, "function must call attention"),
    (analysis.capture, (aj.attention_weights, ones(2, 3), ones(2, 3)), {}, "it calls none"),
    (analysis.capture_gradients, (cube, jnp.ones(3)), {}, "loss must call attention"),
    (analysis.capture_gradients, (lambda x: x, jnp.ones(3)), {}, "loss must be one float"),
    (analysis.capture_gradients, (lambda x: [cube(x)], jnp.ones(3)), {}, "loss must be one float"),
    (analysis.capture_gradients, (cube, {"n": jnp.arange(3)}), {}, "params n must be floating"),
    # gradients
    (analysis.logit_scale_sweep, (*ROWS, np.ones((T, 3)), np.ones((2, 2))), {}, "scales"),
    (analysis.logit_scale_sweep, (*ROWS, np.ones((T, 3)), np.arange(3)), {}, "scales"),
    (analysis.softmax_jacobian_norm, (np.float32(1),), {}, "weights .*got a scalar"),
    (analysis.gradient_norms, ({"a": {"b": np.ones(2, int)}},), {}, "gradients a/b"),
    (analysis.gradient_norms, ({"a": np.ones(2)},), {"depth": -1}, "depth"),
    (analysis.gradient_signal_to_noise, ({"a": jnp.ones((1, 2))},), {}, "gradients .*at least 2"),
    (analysis.gradient_signal_to_noise, ([jnp.ones(3), jnp.ones(2)],), {}, "gradients .*the same"),
    # statistics
    (analysis.attention_summary, (ones(2, T, S) / S,), {"bound": 2}, "bound"),
    # rollout
    (analysis.cross_rollout, (LAYERS[0], LAYERS[0]), {}, "encoder_rollout"),
    (analysis.cross_rollout, (LAYERS[0, 0], LAYERS[0, 0]), {}, "cross_weights"),
    # curvature
    (analysis.hessian_trace, (cube, {}, RNG), {}, "params must hold at least one number"),
    (analysis.hessian_trace, (cube, [jnp.arange(3)], RNG), {}, r"params\[0\] must be floating"),
    (analysis.hessian_trace, (cube, jnp.ones(3), 3), {}, "rng must be one PRNG key"),
    (analysis.hessian_trace, (cube, jnp.ones(3), RNG), {"samples": 0}, "samples"),
    (analysis.hessian_spectrum_edges, (cube, jnp.ones(3), RNG), {"iterations": 0}, "iterations"),
    (analysis.hessian_spectrum_edges, (lambda x: x, jnp.ones(3), RNG), {}, r"loss\(params\)"),
    (analysis.hessian_vector_product, (cube, jnp.ones(3), jnp.ones(2)), {}, "vector"),
    (analysis.hessian_vector_product, (cube, jnp.ones(3), [jnp.ones(3)]), {}, "vector"),
    # cost
    (analysis.score_cost, ("general", 3, 2.5), {}, "key_dim"),
    (analysis.attention_memory, ("dot", -1, 3), {}, "length"),
    # the page
    (analysis.view, (np.ones((T, S)),), {}, "attentions must be what capture"),
    (analysis.view, ({"a": {"wieghts": np.ones((1, T, S))}},), {}, "wieghts"),
    (analysis.view, ({"a": {"mask": np.ones((1, T, S))}},), {}, "weights, logits or dlogits"),
    (analysis.view, ({"a": {"weights": np.ones((T, S))}},), {}, "example"),
    (analysis.view, ({"a": PAGE},), {"example": 1}, "example"),
    (analysis.view, ({"a": {**PAGE, "mask": np.ones((1, T, T))}},), {}, "arrays of one shape"),
    (analysis.view, ({"a": {"weights": np.ones((1, T, 0))}},), {}, "without an axis of 0"),
    (analysis.view, ({"a": PAGE}, "word"), {}, "tokens .*got 'word'"),
    (analysis.view, ({"a": PAGE}, list("abcdef")), {}, "tokens must be 1 to 5 labels"),
    (analysis.view, ({"a": PAGE}, {"b*": ("x", "y")}), {}, "tokens .*fits 'a'"),
    (analysis.view, ({"a": PAGE},), {"precision": "int8"}, "precision"),
    (
        lambda: analysis.view(analysis.capture(aj.attention, *ROWS, matrices=False)),
        (),
        {},
        "matrices=True",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "options", "message"), OF_ANALYSIS)
def test_a_mistake_in_the_analysis(function, arguments, options, message):
    refused(message, lambda: function(*arguments, **options))


def test_a_traced_rate_of_dropout_is_refused():
    rng = jax.random.key(0)
    call = jax.jit(lambda x: aj.attention(**TOKENS, dropout_rate=x, dropout_rng=rng))
    refused("^dropout_rate must", lambda: call(0.5))
