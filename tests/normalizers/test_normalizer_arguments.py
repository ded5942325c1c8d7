"""Rows without keys, dtypes, batches, memory and rings, and mistakes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normalizer_cases import NORMALIZER_CASES
from normalizer_inputs import BLOCKS, TABLE, D, S, T, arrays, params_of
from quick_compilation import quick_jit

import attention_jax as aj
from attention_jax.implementations import PORTABLE

# --- rows, dtypes and batches ---


@pytest.mark.parametrize("implementation", PORTABLE)
def test_rows_without_keys_ignore_nan_cotangents(implementation):
    table = jnp.asarray(TABLE)
    doutput = jnp.where(TABLE.any(1)[:, None], 1.0, jnp.nan) * jnp.ones((T, D))

    def everything(query, key, value):
        results = {}
        for name in ("entmax", "sigmoid", "sink"):
            normalizer = NORMALIZER_CASES[name].normalizer
            params = params_of(normalizer)

            def attend(*args, normalizer=normalizer):
                *args, params = args
                return aj.attention(
                    *args,
                    mask=table,
                    normalizer=normalizer,
                    normalizer_params=params,
                    implementation=implementation,
                    block_sizes=BLOCKS,
                )

            output, pull_back = jax.vjp(attend, query, key, value, params)
            results[name] = output, pull_back(doutput)
        return results

    for output, gradients in quick_jit(everything)(*arrays()).values():
        assert np.all(np.asarray(output)[3] == 0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        assert np.all(np.asarray(gradients[0])[3] == 0)


@pytest.mark.parametrize("name", ["entmax", "sigmoid", "softmax(sink=True)"])
def test_narrow_dtypes(name):
    normalizer = aj.get_normalizer(name)

    def output(dtype, implementation):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params_of(normalizer))
        result = aj.attention(
            *arrays(dtype),
            mask=TABLE,
            normalizer=normalizer,
            normalizer_params=params,
            implementation=implementation,
            block_sizes=BLOCKS,
        )
        assert result.dtype == dtype
        return np.asarray(result, np.float32)

    for implementation in PORTABLE:
        expected = output(jnp.float32, implementation)
        np.testing.assert_allclose(output(jnp.bfloat16, implementation), expected, atol=0.05)
        np.testing.assert_allclose(output(jnp.float16, implementation), expected, atol=0.01)


def test_batch_axes_of_params_and_vmap():
    """One sink per head: a batch axis of the parameter; and `vmap` over a loop's examples."""
    heads, batch = 3, 2
    query, key, value = (
        jax.random.normal(jax.random.key(i), (batch, heads, n, D)) for i, n in enumerate((T, S, S))
    )
    sinks = jnp.array([-1.0, 0.0, 2.0])
    for implementation in PORTABLE:

        def attend(query, key, value, sink, implementation=implementation):
            return aj.attention(
                query,
                key,
                value,
                normalizer="softmax(sink=True)",
                normalizer_params={"sink": sink},
                implementation=implementation,
                block_sizes=BLOCKS,
            )

        at_once = attend(query, key, value, sinks)
        by_vmap = jax.vmap(jax.vmap(attend), (0, 0, 0, None))(query, key, value, sinks)
        one = attend(query[1, 2], key[1, 2], value[1, 2], sinks[2])
        np.testing.assert_allclose(at_once, by_vmap, atol=1e-6)
        np.testing.assert_allclose(at_once[1, 2], one, atol=1e-6)


def test_weights_times_values_are_the_output():
    for name in ("entmax", "sigmoid", "sparsemax"):
        query, key, value = arrays()
        weights = aj.attention_weights(query, key, mask=TABLE, normalizer=name)
        output = aj.attention(query, key, value, mask=TABLE, normalizer=name)
        np.testing.assert_allclose(weights @ value, output, atol=1e-6)
        assert np.all(np.asarray(weights)[~TABLE] == 0)


def test_memory_is_linear():
    """Twice the length takes at most twice the temporary memory, forward and backward."""

    def temporary(length):
        shapes = [jax.ShapeDtypeStruct((length, 8), jnp.float32)] * 3

        def loss(query, key, value):
            options = {"implementation": "tiled", "block_sizes": aj.BlockSizes(64, 64)}
            return jnp.sum(aj.attention(query, key, value, normalizer="entmax", **options) ** 2)

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 2.2 * temporary(1024)


@pytest.mark.parametrize("implementation", PORTABLE)
def test_shard_map_checks_the_axes_that_arrays_vary_over(implementation):
    options = {"axis_types": (jax.sharding.AxisType.Auto,), "devices": jax.devices()[:1]}
    mesh = jax.make_mesh((1,), ("data",), **options)
    spec = jax.sharding.PartitionSpec("data")
    batch = [array[None] for array in arrays()]

    def loss(query, key, value):
        total = jnp.zeros(())
        for name in ("entmax", "ssmax", "sigmoid"):
            output = aj.attention(
                query,
                key,
                value,
                mask=jnp.asarray(TABLE),
                normalizer=name,
                normalizer_params=params_of(aj.get_normalizer(name)),
                implementation=implementation,
                block_sizes=BLOCKS,
            )
            total = total + jnp.sum(jnp.sin(output))
        return total

    def one_device(*batch):
        return jax.lax.psum(loss(*batch), "data")

    sharded = jax.shard_map(
        one_device, mesh=mesh, in_specs=(spec,) * 3, out_specs=jax.sharding.PartitionSpec()
    )
    got = quick_jit(jax.grad(sharded, (0, 1, 2)))(*batch)
    expected = quick_jit(jax.grad(loss, (0, 1, 2)))(*batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, expected)


def test_no_keys_and_no_queries():
    for name in ("entmax", "sigmoid", "softmax(sink=True)", "ssmax"):
        params = params_of(aj.get_normalizer(name))
        for target, source in ((0, 3), (3, 0)):
            inputs = [jnp.ones((n, D)) for n in (target, source, source)]
            for implementation in PORTABLE:
                output = aj.attention(
                    *inputs,
                    normalizer=name,
                    normalizer_params=params,
                    implementation=implementation,
                )
                np.testing.assert_array_equal(output, np.zeros((target, D)))


def test_ring_attention():
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    tokens = jax.random.normal(jax.random.key(0), (6, 3))
    mask = aj.causal_mask()
    for name in ("sigmoid", "softmax(sink=True)"):
        params = params_of(aj.get_normalizer(name))
        options = {"mask": mask, "normalizer": name, "normalizer_params": params}
        got = aj.ring_attention(tokens, tokens, tokens, mesh=mesh, **options)
        expected = aj.attention(tokens, tokens, tokens, **options)
        np.testing.assert_allclose(got, expected, atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"Entmax.*threshold"):
        aj.ring_attention(tokens, tokens, tokens, mesh=mesh, normalizer="entmax")


# --- errors ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalizer": "softmax(sink=True)"}, "normalizer_params must be .*sink.*init"),
        ({"normalizer_params": {"sink": 0.0}}, "normalizer_params must be {}"),
        (
            {"normalizer": "softmax(sink=True)", "normalizer_params": {"sink": 1}},
            r"normalizer_params\['sink'\] must be floating",
        ),
        (
            {"normalizer": "softmax(sink=True)", "normalizer_params": {"sink": np.zeros(3)}},
            r"normalizer_params\['sink'\] must broadcast",
        ),
        ({"normalizer": "entmax", "return_statistics": True}, "return_statistics.*Entmax"),
    ],
)
def test_mistakes_in_other_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        aj.attention(*arrays(), **options)


def test_a_normalizer_must_define_its_methods():
    @dataclasses.dataclass(frozen=True)
    class WithoutInverse(aj.Normalizer):
        def weight(self, params, shifted):
            return jax.nn.relu(shifted)

    for normalizer, method in (
        (aj.Normalizer, r"Normalizer must define inverse\("),
        (WithoutInverse(), r"WithoutInverse must define inverse\("),
        (aj.LogScaled(WithoutInverse()), r"WithoutInverse must define inverse\("),
    ):
        with pytest.raises(ValueError, match=method):
            aj.attention(*arrays(), normalizer=normalizer)
