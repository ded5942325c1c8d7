"""`interop.dot_product_attention` against `jax.nn`, and `flax_attention_fn` against Flax."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conformance import SCORE_CASES, quick_jit
from derivative_cases import agree
from flax import linen, nnx
from oracles import normal, softmax
from score_cases import numpy_params

import attention_jax as aj
from attention_jax.interop import dot_product_attention, flax_attention_fn
from attention_jax.kernels.windows import windows_of
from attention_jax.nn.inputs import checked_source
from attention_jax.positions.buckets import relative_position_bucket

B, T, S, N, K, D, DV = 2, 5, 7, 6, 3, 11, 13
MASK = np.random.default_rng(5).random((B, N, T, S)) < 0.6
MASK[..., 0] = True  # no row without keys: there jax.nn, Flax and this library differ


def qkv(n=N, k=K, dv=D, batch=(B,)):
    shapes = ((*batch, T, n, D), (*batch, S, k, D), (*batch, S, k, dv))
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def assert_close(got, expected, tolerance=2e-6):
    """Within `tolerance` of the largest entry, or of 1."""
    oracles.assert_close("", got, expected, tolerance, terms=1.0)


# --- dot_product_attention against jax.nn ---


def test_the_signature_is_that_of_jax_nn():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    assert [*ours] == [*theirs, "score", "params"]
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name


CASES = {
    "unbatched": {
        "batch": (), "k": 1, "bias": normal(N, T, S), "local_window_size": (1, 3), "scale": 0.7
    },
    "heads_first": {
        "mask": MASK[0], "bias": normal(1, N, 1, S), "local_window_size": 2, "is_causal": True
    },
    "all": {
        "k": N, "mask": MASK, "bias": normal(N, T, S),
        "local_window_size": (4, 9), "query_seq_lengths": np.array([3, 5], np.int32),
        "key_value_seq_lengths": np.array([1, 6], np.int32),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_jax_nn(name):
    """Output, residual, and gradients of query, key, value and bias."""
    case = dict(CASES[name])
    arrays = qkv(k=case.pop("k", K), batch=case.pop("batch", (B,)))
    arrays += [case.pop("bias")] if "bias" in case else []

    def results_and_gradients(attend, arrays):
        def loss(*arrays):
            results = attend(*arrays, **case, return_residual=True)
            return (results[0] * jnp.cos(jnp.arange(D))).sum(), results

        return jax.grad(loss, tuple(range(len(arrays))), has_aux=True)(*arrays)

    implementation = "tiled" if name == "all" else None
    ours = functools.partial(dot_product_attention, implementation=implementation)
    with jax.numpy_rank_promotion("allow"):
        (gradients, (output, residual)), (wanted, (expected, expected_residual)) = jax.device_get(
            quick_jit(
                lambda arrays: [
                    results_and_gradients(attend, arrays)
                    for attend in (ours, jax.nn.dot_product_attention)
                ]
            )(arrays)
        )
    assert_close(output, expected)
    some_key = expected_residual > -1e30
    assert residual.dtype == expected_residual.dtype
    assert some_key.any()
    assert_close(residual[some_key], expected_residual[some_key])
    assert np.isneginf(residual[~some_key]).all()
    assert_close(gradients, wanted, 2e-5)
    assert all(map(np.any, wanted))


LONG = normal(2, 300, 1, 3)
INTEGERS = {  # functions of integers [2]
    "query lengths": lambda n: dot_product_attention(LONG, LONG, LONG, query_seq_lengths=n),
    "key lengths": lambda n: dot_product_attention(LONG, LONG, LONG, key_value_seq_lengths=n),
    "padding": lambda n: aj.padding_mask(n, n).materialize(300, 300),
    "windows": lambda n: windows_of(aj.padding_mask(n[1], n[0]) & aj.causal_mask(n[0]), 300, 300),
    "bounds": lambda n: aj.local_mask(n, n).materialize(300, 300),
    "segments": lambda n: aj.segment_mask(n, n.astype(jnp.int32)).materialize(2, 2),
    "window": lambda n: aj.window_mask(n, 90).materialize(2, 300),
    "reversed": lambda n: aj.reversed_centers(300, n),
    "anchored": lambda n: aj.nn.anchored_positions(300, n, "both"),
    "rotary": lambda n: aj.nn.rotary(LONG[0, :2, :, :2].swapaxes(0, 1), n),
    "buckets": lambda n: relative_position_bucket(n, max_distance=1000),
    "walk": lambda n: aj.hard_monotonic_weights(jnp.full((2, 1, 300), 0.5), n),
    "source": lambda n: checked_source(n[:, None], n // n, 300),
}


@functools.cache
def results_of_integers(dtype):
    return quick_jit(lambda n: {name: function(n) for name, function in INTEGERS.items()})(
        jnp.array([5, 100], dtype)
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_integers_of_any_width_are_positions(dtype):
    expected = results_of_integers("int32")
    chex.assert_trees_all_equal(results_of_integers(dtype), expected, strict=True)
    with jax.enable_x64(True):
        assert aj.padding_mask(np.array([5], "int64")).key_lengths.dtype == "int64"
    masked = expected["query lengths"][1, :, 0]
    assert_close(masked, np.where(np.arange(300)[:, None] < 100, attended(LONG[1, :, 0]), 0))


def attended(x):
    """Scaled dot-product self attention [T, D] in NumPy."""
    return softmax(np.float64(x) @ x.T / x.shape[-1] ** 0.5) @ x


def test_every_head_has_its_own_parameters():
    """As with keys and values repeated for every query head, where nothing is left to group."""
    score = SCORE_CASES["own"].score
    heads = [numpy_params(score, D, D, seed) for seed in range(N)]
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *heads)
    arrays = (*qkv(dv=DV), normal(B, N, T, S), params)

    def whole(query, key, value, bias, params):
        return dot_product_attention(query, key, value, bias, MASK, score=score, params=params)

    def repeated(query, key, value, bias, params):
        key, value = (jnp.repeat(array, N // K, axis=2) for array in (key, value))
        heads = (array.swapaxes(1, 2) for array in (query, key, value))
        output = aj.attention(*heads, score=score, params=params, mask=MASK, bias=bias)
        return output.swapaxes(1, 2)

    @quick_jit
    def gradients(arrays):
        return [
            jax.grad(lambda arrays, f=f: (f(*arrays) ** 2).sum())(arrays) for f in (whole, repeated)
        ]

    agree(*gradients(arrays), 2e-5)


def test_keys_are_not_repeated_for_the_heads_that_share_them():
    query, key = jnp.ones((1, 3, 64, 16)), jnp.ones((1, 1024, 1, 16))  # repeated: 4 MiB
    compiled = jax.jit(dot_product_attention).lower(query, key, key).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 1024 * 16 * 4


def test_a_call_is_one_program():
    """Outside of `jit`, each equation would be a program of its own."""
    query, key, _ = qkv()

    def call(query, lengths):
        return dot_product_attention(
            query, key, key, None, aj.causal_mask(1), is_causal=True, return_residual=True,
            key_value_seq_lengths=lengths, local_window_size=3,
        )  # fmt: skip

    assert len(jax.make_jaxpr(call)(query, np.array([1, 3])).eqns) == 1


def test_errors_show_the_shapes_that_were_given():
    query, key, value = qkv()
    with pytest.raises(ValueError, match=rf"^key .*\[{B}, {S}, {K}, {D - 1}\]$"):
        dot_product_attention(query, key[..., 1:], value)


# --- flax_attention_fn against Flax ---


def layers(score="scaled", params=None, **options):
    """Two layers of the same parameters: Flax's own, and one with our attention."""
    options = {"decode": False, "in_features": N * D, "num_heads": N} | options
    attend = flax_attention_fn(score, params)
    return (
        nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0)),
        nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0), attention_fn=attend),
    )


@pytest.fixture
def _flax_relies_on_rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


def sown(layer, x, y):
    _, intermediates = nnx.capture(layer, nnx.Intermediate)(x, y, sow_weights=True, mask=MASK)
    return jax.tree.leaves(intermediates)[0]


@pytest.mark.usefixtures("_flax_relies_on_rank_promotion")
def test_equals_flax():
    x, y = normal(B, T, N * D), normal(B, S, N * D)

    def call(layer):
        return {
            "causal": layer(x, is_causal=True),
            "cross": layer(x, y),
            "float_mask": layer(x, mask=nnx.make_causal_mask(x[..., 0])),
            "mask": layer(x, y, mask=MASK),
            "sown weights": sown(layer, x, y),
        }

    expected, got = quick_jit(
        lambda: [call(layer) for layer in layers(num_kv_heads=1, normalize_qk=True)]
    )()
    assert_close(got, expected)


@pytest.mark.usefixtures("_flax_relies_on_rank_promotion")
@pytest.mark.parametrize(("implementation", "broadcast"), [("reference", True), ("tiled", False)])
def test_dropout(implementation, broadcast):
    """With an identity for values, the output is the weights after dropout."""
    rate, length = 0.4, 37
    query, key = normal(B, length, 2, D), normal(B, length, 2, D, seed=1)
    identity = np.eye(length, dtype=np.float32)[None, :, None, :]
    value = np.broadcast_to(identity, (B, length, 2, length))
    attend = flax_attention_fn(implementation=implementation)

    @quick_jit
    def weights(query, key):
        outputs = [
            attend(
                query, key, value, dropout_rate=rate, broadcast_dropout=broadcast,
                dropout_rng=jax.random.key(0), deterministic=deterministic,
            )
            for deterministic in (True, False)
        ]  # fmt: skip
        return [x.swapaxes(1, 2).reshape(B * 2, length, length) for x in outputs]

    whole, dropped = map(np.asarray, weights(query, key))
    kept = dropped != 0
    assert_close(dropped[kept], whole[kept] / (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 0.05
    same = [np.array_equal(kept[0], other) for other in kept[1:]]
    assert all(same) if broadcast else not any(same)


@pytest.mark.usefixtures("_flax_relies_on_rank_promotion")
def test_steps_of_flaxs_cache_are_one_causal_call():
    _, layer = layers()
    x = normal(B, T, N * D)
    layer.init_cache(x.shape)

    @nnx.jit
    def step(layer, token):
        return layer(token, is_causal=True, decode=True)

    at_once = nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, x)
    steps = [step(layer, x[:, t : t + 1]) for t in range(T)]
    assert_close(np.concatenate(steps, axis=1), at_once)


class LinenLayer(linen.Module):
    """Linen's attention with additive scores, as the docstring of `flax_attention_fn` has it."""

    @linen.compact
    def __call__(self, x, y):
        attend = flax_attention_fn("additive", self.param("score", aj.Additive().init, D, D))
        return linen.MultiHeadDotProductAttention(N, attention_fn=attend)(x, y)


@pytest.mark.usefixtures("_flax_relies_on_rank_promotion")
def test_the_parameters_of_linens_layer_are_trained():
    x, y = normal(B, T, N * D), normal(B, S, N * D)

    params = jax.jit(LinenLayer().init)(jax.random.key(0), x, y)["params"]

    @jax.jit
    def losses(score):
        def loss(score):
            return (LinenLayer().apply({"params": params | {"score": score}}, x, y) ** 2).sum()

        before, gradient = jax.value_and_grad(loss)(score)
        after = loss(jax.tree.map(lambda leaf, slope: leaf - 1e-3 * slope, score, gradient))
        return before, after, gradient

    before, after, gradient = losses(params["score"])
    assert after < before
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.usefixtures("_flax_relies_on_rank_promotion")
def test_the_models_state_holds_the_scores_parameters():
    heads = [numpy_params(aj.Additive(), D, D, seed) for seed in range(N)]
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *heads)
    _, layer = layers("additive", params)
    x, y = normal(B, T, N * D), normal(B, S, N * D)

    @jax.grad
    def expected(params):
        arrays = layer.query(x), layer.key(y), layer.value(y)
        heads = dot_product_attention(*arrays, score="additive", params=params)
        return (layer.out(heads) ** 2).sum()

    state = nnx.jit(nnx.grad(lambda layer: (layer(x, y) ** 2).sum()))(layer)
    found = nnx.to_pure_dict(state)["attention_fn"]["params"]
    shared = jax.tree.map(nnx.Param, params)  # with another module, which updates them
    assert flax_attention_fn("additive", shared).params["v"] is shared["v"]
    own = jax.tree_util.Partial(lambda scale, q, k: scale * (q @ k.T), jnp.float32(2))
    assert jax.tree.leaves(nnx.state(flax_attention_fn(own), nnx.Param)) == [2]
    wanted = jax.device_get(quick_jit(expected)(params))
    assert_close(found, wanted, 2e-5)
    for leaf in wanted.values():
        assert np.abs(leaf).sum(axis=tuple(range(1, leaf.ndim))).all()  # every head learns
