"""The Pallas TPU kernels: what they cannot serve, and what JAX lowers for a TPU without one."""

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj
from attention_jax.implementations import Inputs, Options
from attention_jax.kernels import mosaic_tpu
from attention_jax.kernels.mosaic_tpu import calls as mosaic_tpu_calls
from attention_jax.pairwise.biases import RelativeBias

NAME = "mosaic_tpu"


def attend(score="scaled", dtype=jnp.float32, **options):
    tokens = jnp.ones((128, 8), dtype)
    return aj.attention(tokens, tokens, tokens, score=score, implementation=NAME, **options)


def by_sorting(q, k):
    return jnp.sort(q)[:, :1] + jnp.sort(k)[:, :1].T


MATRIX = jnp.ones((8, 8))


def by_a_matrix(q, k):
    return q @ MATRIX @ k.T


@aj.bias_dataclass
class OwnDistances(RelativeBias):
    """A bias of which JAX cannot lower the gradient for a TPU."""

    slope: jax.Array = aj.array_field()

    def of_distance(self, distances):
        return self.slope * distances.astype(self.slope.dtype)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("runs on a TPU, not on cpu", {}),
        ("cannot run by_sorting in its kernels: .*: sort", {"score": by_sorting}),
        ("by_sorting may have an infinite slope", {"score": by_sorting, "mask": aj.causal_mask()}),
        ("softmax, not Entmax", {"normalizer": "entmax"}),
    ],
)
def test_a_call_that_it_cannot_serve_says_why(words, options):
    line = f"^implementation 'mosaic_tpu'.*{words}.*: use 'tiled'"
    with pytest.raises(NotImplementedError, match=line):
        attend(**options)


def test_an_array_that_the_pair_closes_over_is_refused():
    line = (
        r"^implementation 'mosaic_tpu': the pair of by_a_matrix reads arrays \[8, 8\] that .*params"
    )
    with pytest.raises(NotImplementedError, match=line) as error:
        attend(by_a_matrix)
    assert "/" not in str(error.value).partition("\n")[0]


def test_padding_counts_as_a_mask_of_infinite_slopes():
    tokens = jnp.ones((130, 8))
    line = r"\(a length that is no multiple of the tile counts as one\)"
    with pytest.raises(NotImplementedError, match=line):
        aj.attention(tokens, tokens, tokens, score=by_sorting, implementation=NAME)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer versions of JAX lower this bias")
def test_a_refusal_has_the_whole_reason_and_names_what_is_given():
    bias = OwnDistances(jnp.array(0.5))
    with pytest.raises(NotImplementedError) as error:
        lower_for_a_tpu(bias=bias)
    line = str(error.value).partition("\n")[0]
    assert "with this bias in its kernels: Invalid type: error" in line
    assert "vector types must have positive constant sizes" in line
    with pytest.raises(NotImplementedError, match="with this mask and bias in"):
        lower_for_a_tpu(bias=bias, mask=aj.causal_mask())


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


@pytest.mark.parametrize("slopes", [aj.alibi_slopes(2), jnp.array(0.5)])
def test_gradients_with_alibi_lower(slopes):
    lower_for_a_tpu(bias=aj.alibi_bias(slopes))


@pytest.mark.parametrize("bias", [aj.t5_bias(jnp.ones(32)), aj.relative_bias(jnp.ones(5))])
@pytest.mark.parametrize("gradient", [False, True])
def test_tables_of_distances_are_refused(bias, gradient):
    with pytest.raises(NotImplementedError, match=r"Unsupported gather.*: use 'tiled'"):
        lower_for_a_tpu(gradient, bias=bias)


def test_more_keys_than_fit_are_refused():
    tokens = jax.ShapeDtypeStruct((2**17, 128), jnp.float32)

    def loss(query, key):
        return aj.attention(query, key, key, implementation=NAME).sum()

    gradient = jax.jit(jax.grad(loss, argnums=1)).trace(tokens, tokens)
    with pytest.raises(NotImplementedError, match="gradients of 131072 keys take 256 MiB"):
        gradient.lower(lowering_platforms=("tpu",))


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="no float64"):
        attend(dtype=jnp.float64)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_narrow_products_lower_under_every_precision(precision):
    tokens = jnp.ones((2, 128, 8), jnp.bfloat16)

    def loss(tokens):
        return aj.attention(tokens, tokens, tokens, implementation=NAME).sum()

    with jax.default_matmul_precision(precision):
        text = jax.jit(jax.grad(loss)).trace(tokens).lower(lowering_platforms=("tpu",)).as_text()
    assert "attention_backward" in text


@pytest.mark.parametrize(("mebibytes", "fits"), [(128, True), (64, False)])
def test_the_gradients_of_all_keys_fit_into_the_chips_memory(monkeypatch, mebibytes, fits):
    """A kernel for 32,768 keys needs 64 MiB for its gradients."""
    monkeypatch.setattr(mosaic_tpu_calls, "vector_memory", lambda: mebibytes * 2**20)
    shapes = [jax.ShapeDtypeStruct((n, 128), jnp.bfloat16) for n in (128, 2**15 - 1 - fits)]
    query, key = shapes
    inputs = Inputs(query, key, key, {}, None, None, None, {})
    options = Options(aj.get_score("scaled"), aj.BlockSizes(512, 512))
    reason = mosaic_tpu.reason_against(options, inputs)
    assert (reason is None) is fits
    assert fits or "64 MiB of the chip's memory, more than 36" in reason


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
    with pytest.raises(NotImplementedError, match="'mosaic_tpu': needs known lengths; got T = n"):
        attend.trace(query, key)
