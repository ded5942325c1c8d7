"""The Pallas TPU kernels: what they cannot serve, and what JAX lowers for a TPU without one."""

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj

NAME = "mosaic_tpu"


def attend(score="scaled", dtype=jnp.float32, **options):
    tokens = jnp.ones((128, 8), dtype)
    return aj.attention(tokens, tokens, tokens, score=score, implementation=NAME, **options)


def by_sorting(q, k):
    return jnp.sort(q)[:, :1] + jnp.sort(k)[:, :1].T


MATRIX = jnp.ones((8, 8))


def by_a_matrix(q, k):
    return q @ MATRIX @ k.T


REFUSED = {
    "runs on a TPU, not on cpu": {},
    "cannot run by_sorting in its kernels: .*: sort": {"score": by_sorting},
    "by_sorting, which may have an infinite slope": {
        "score": by_sorting, "mask": aj.causal_mask()},
    "softmax without a sink, not Entmax": {"normalizer": "entmax"},
    "softmax without a sink, not Softmax": {
        "normalizer": "softmax(sink=True)", "normalizer_params": {"sink": jnp.ones(())}},
    "has no bias": {"bias": aj.alibi_bias(jnp.array(0.5))},
    "dropout_rate 0.5": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
    "segment_mask.* and their conjunctions; got DenseMask": {"mask": jnp.ones((128, 128), bool)},
    "segment_mask.* and their conjunctions; got OrMask": {
        "mask": aj.causal_mask() | aj.local_mask(1, 1)},
    "float32 or bfloat16.* got float16": {"dtype": jnp.float16},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_a_call_that_it_cannot_serve_says_why(words):
    line = f"^implementation 'mosaic_tpu' .*{words}.*: use 'tiled'"
    with pytest.raises(NotImplementedError, match=line):
        attend(**REFUSED[words])


def test_an_array_that_the_pair_closes_over_is_refused():
    line = r"^implementation 'mosaic_tpu' .* by_a_matrix, which reads arrays \[8, 8\] that .*params"
    with pytest.raises(NotImplementedError, match=line) as error:
        attend(by_a_matrix)
    assert "/" not in str(error.value).partition("\n")[0]


def test_padding_counts_as_a_mask_of_infinite_slopes():
    tokens = jnp.ones((130, 8))
    line = r"\(a length that is no multiple of the tile counts as one\)"
    with pytest.raises(NotImplementedError, match=line):
        aj.attention(tokens, tokens, tokens, score=by_sorting, implementation=NAME)


def test_it_says_how_to_interpret_gradients_too():
    """Other arguments of `force_tpu_interpret_mode` fail where a gradient is taken."""
    with pytest.raises(NotImplementedError, match=r"force_tpu_interpret_mode\(True\) to interpret"):
        attend()


def lower_for_a_tpu(gradient=True, score="scaled", **options):
    """Lowers attention, or its gradient, for a TPU; nothing is compiled."""
    tokens = jnp.ones((2, 128, 8), jnp.float32)

    def loss(tokens):
        output = aj.attention(tokens, tokens, tokens, score=score, implementation=NAME, **options)
        return output.sum()

    function = jax.grad(loss) if gradient else loss
    jax.jit(function).trace(tokens).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("mask", [None, aj.causal_mask()])
def test_float32_lowers_where_jax_enables_float64(mask, gradient):
    # The tests' strict promotion is for programs of one width.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        lower_for_a_tpu(gradient, mask=mask)


def test_more_keys_than_fit_are_refused():
    tokens = jax.ShapeDtypeStruct((2**17, 128), jnp.float32)

    def loss(query, key):
        return aj.attention(query, key, key, implementation=NAME).sum()

    gradient = jax.jit(jax.grad(loss, argnums=1)).trace(tokens, tokens)
    with pytest.raises(NotImplementedError, match=r"gradients of all keys.*: 256 MiB, more"):
        gradient.lower(lowering_platforms=("tpu",))


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="got float64"):
        attend(dtype=jnp.float64)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_narrow_products_lower_under_every_precision(precision):
    tokens = jnp.ones((2, 128, 8), jnp.bfloat16)

    def loss(tokens):
        return aj.attention(tokens, tokens, tokens, implementation=NAME).sum()

    with jax.default_matmul_precision(precision):
        text = jax.jit(jax.grad(loss)).trace(tokens).lower(lowering_platforms=("tpu",)).as_text()
    assert "attention_backward" in text


def test_what_one_precision_cannot_lower_is_not_remembered_for_others():
    with jax.default_matmul_precision("high"), pytest.raises(NotImplementedError, match="HIGH"):
        lower_for_a_tpu()
    lower_for_a_tpu()


def test_it_lowers_inside_shard_map_with_its_checks():
    """`jax.shard_map` asks over which axes of the mesh a result varies."""
    tokens = jnp.ones((1, 128, 8))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axis = jax.sharding.PartitionSpec("data")
    attend = jax.shard_map(
        lambda tokens: aj.attention(tokens, tokens, tokens, implementation=NAME),
        mesh=mesh, in_specs=axis, out_specs=axis,
    )  # fmt: skip
    gradient = jax.grad(lambda tokens: attend(tokens).sum())
    text = jax.jit(gradient).trace(tokens).lower(lowering_platforms=("tpu",)).as_text()
    assert "attention_backward" in text


@pytest.mark.parametrize("tokens_like", [None, 128])
def test_symbolic_lengths_are_refused(tokens_like):
    (length,) = jax.export.symbolic_shape("n")
    query = jax.ShapeDtypeStruct((length, 8), jnp.float32)
    key = query if tokens_like is None else jax.ShapeDtypeStruct((tokens_like, 8), jnp.float32)
    attend = jax.jit(lambda query, key: aj.attention(query, key, key, implementation=NAME))
    with pytest.raises(NotImplementedError, match="'mosaic_tpu' needs known lengths; got T = n"):
        attend.trace(query, key)
