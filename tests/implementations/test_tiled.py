"""Tiles with a gradient by hand: the tiles leave no trace, and the second derivative is right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import TILE, OwnCosine, assert_close, named, quick_jit
from derivative_cases import DROPOUT, DV, S, T, agree, loss_of, normal, numbers_of, point_of
from jax.test_util import check_vjp

import attention_jax as aj
from attention_jax.implementations import BlockSizes

B, N = 2, 3


# --- second derivatives ---


@pytest.mark.slow  # for "own": test_forward_mode.py
@pytest.mark.parametrize("score", ["additive"])
def test_second_derivatives_are_those_of_the_reference(score):
    point = point_of(score)
    with jax.enable_x64(True):
        mask = aj.causal_mask(-1) & aj.padding_mask(jnp.array(6))
        direction = jax.tree.map(lambda leaf: normal(*leaf.shape), point)

        def derivatives(implementation):
            gradient = jax.grad(loss_of(score, implementation, **DROPOUT))

            def along(point, mask):
                pairs = zip(*map(jax.tree.leaves, (gradient(point, mask), direction)), strict=True)
                return sum(jnp.vdot(a, b) for a, b in pairs)

            def both(point, mask):
                once, product = jax.jvp(lambda p: gradient(p, mask), (point,), (direction,))
                return once, product, jax.grad(along)(point, mask)

            return quick_jit(both)(point, mask)

        tiled, expected = derivatives("tiled"), derivatives("reference")
    agree(tiled, expected)
    agree(tiled[1], tiled[2])  # a Hessian is symmetric


@pytest.mark.slow
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
def test_a_hessian_of_one_argument_forward_over_reverse_and_reverse_over_reverse(outer):
    point = point_of("scaled")
    with jax.enable_x64(True):

        def hessian(implementation, outer):
            # One argument only: the others' tangents are symbolic zeros.
            def loss(query, mask):
                arrays = {**point, "query": query}
                return loss_of("scaled", implementation)(arrays, mask)

            inner = jax.jit(jax.grad(loss))
            return quick_jit(outer(inner))(point["query"], aj.local_mask(1, 2))

        agree(hessian("tiled", outer), hessian("reference", jax.jacfwd))


@pytest.mark.slow
def test_the_gradients_gradient_against_differences():
    """What `check_grads` does at its second order, without compiling the loop five times."""
    point = point_of("general")
    with jax.enable_x64(True):
        gradient = jax.grad(lambda point: loss_of("general", "tiled")(point, aj.causal_mask()))
        compiled = quick_jit(gradient)
        pull_back = quick_jit(lambda point, dgradient: jax.vjp(gradient, point)[1](dgradient))

        def vjp(point):
            return compiled(point), lambda dgradient: pull_back(point, dgradient)

        check_vjp(compiled, vjp, (point,), rtol=1e-6)


# --- the tiles leave no trace ---


@pytest.mark.parametrize(
    ("target", "source", "blocks"),
    [
        (T, S, [(1, 1), (3, 2)]),
        (1, 1, [(2, 3)]),
        (1, S, [(1, 3)]),
        pytest.param(T, 1, [(2, 1)], marks=pytest.mark.slow),
        pytest.param(T, S, [(2, 64), (64, 3), (64, 64)], marks=pytest.mark.slow),
        pytest.param(19, 17, [(9, 9)], marks=pytest.mark.slow),
        (19, 17, [(8, 16)]),  # tiles are of whole eights: the last is mostly padding
    ],
)
def test_block_sizes_change_nothing(target, source, blocks):
    point = point_of("own", target, source)
    with jax.enable_x64(True):
        mask = aj.local_mask(3, 2)

        @quick_jit
        def all_of_them(point):
            options = [("reference", None), *(("tiled", BlockSizes(*sizes)) for sizes in blocks)]
            return [
                jax.value_and_grad(
                    loss_of("own", implementation, block_sizes=sizes, **DROPOUT)
                )(point, mask)
                for implementation, sizes in options
            ]  # fmt: skip

        expected, *got = all_of_them(point)
        for other in got:
            np.testing.assert_allclose(other[0], expected[0], rtol=1e-13)
            for name, array in named(other[1]).items():
                assert_close(name, array, named(expected[1])[name], 1e-12)


def test_without_keys_or_queries_and_small_blocks():
    for target, source in ((0, S), (T, 0), (0, 0)):
        arrays = (jnp.ones((n, 3)) for n in (target, source, source))
        output, statistics = aj.attention(
            *arrays, bias=jnp.ones((target, source)), implementation="tiled", block_sizes=TILE,
            mask=aj.causal_mask(), return_statistics=True,
        )  # fmt: skip
        np.testing.assert_array_equal(output, np.zeros((target, 3)))
        np.testing.assert_array_equal(statistics.logsumexp, np.full(target, -np.inf))
        np.testing.assert_array_equal(statistics.entropy, np.zeros(target))


@pytest.mark.parametrize(
    "shapes",
    [
        [(B, 1, T, 1), (B, N, T, S)],
        pytest.param([(1, S), (1, 1), (1, N, T, S), (B, N, T, S)], marks=pytest.mark.slow),
    ],
)
def test_bias_of_every_shape_in_tiles(shapes):
    with jax.enable_x64(True):
        query, key, value = normal(B, N, T, 3), normal(B, N, S, 3), normal(B, N, S, DV)
        lengths = np.array([[6], [4]])
        mask = aj.padding_mask(lengths)
        biases = [normal(*shape) for shape in shapes]
        # What is masked, of the last, may be anything.
        biases[-1][0, ..., 6:], biases[-1][1, ..., 4:] = np.nan, np.inf

        def gradients(biases, implementation):
            def loss(bias):
                return numbers_of(
                    aj.attention(
                        query, key, value, bias=bias, mask=mask, return_statistics=True,
                        implementation=implementation, block_sizes=TILE,
                    )
                )  # fmt: skip

            return [jax.grad(loss)(bias) for bias in biases]

        got, expected = quick_jit(
            lambda biases: [gradients(biases, name) for name in ("tiled", "reference")]
        )(biases)
        agree(got, expected)
    assert not np.any(got[-1][0, ..., 6:])


def test_parameters_of_each_head_and_float64_among_float32():
    point = point_of("additive")
    with jax.enable_x64(True):
        arrays = {
            "query": jnp.asarray(normal(B, N, T, 3), jnp.float32),
            "key": jnp.asarray(normal(B, N, S, 11), jnp.float32),
            "value": jnp.asarray(normal(B, N, S, DV), jnp.bfloat16),
            "params": {name: normal(N, *leaf.shape) for name, leaf in point["params"].items()},
            "bias": jnp.asarray(normal(N, 1, S), jnp.float16),
        }
        mask = aj.causal_mask(1)
        got, expected = (
            quick_jit(jax.grad(loss_of("additive", name, **DROPOUT)))(arrays, mask)
            for name in ("tiled", "reference")
        )
    # Computed in float64, and rounded to each input's dtype.
    for name, tolerance in {"query": 1e-7, "key": 1e-7, "value": 4e-3, "bias": 1e-3}.items():
        assert got[name].dtype == arrays[name].dtype
        agree(got[name], expected[name], tolerance)
    agree(got["params"], expected["params"])


def test_vmaps_around_it_nested_and_of_some_arguments():
    with jax.enable_x64(True):
        query, key, value = normal(4, 3, T, 3), normal(3, S, 3), normal(3, S, DV)
        lengths, rngs = jnp.array([2, 7, 5]), jax.random.split(jax.random.key(2), 4)

        def gradient(implementation):
            def loss(query, key, value, length, rng):
                return numbers_of(
                    aj.attention(
                        query, key, value, mask=aj.padding_mask(length), dropout_rng=rng,
                        dropout_rate=0.2, implementation=implementation, block_sizes=TILE,
                        return_statistics=True,
                    )
                )  # fmt: skip

            def total(query, key, value):
                inner = jax.vmap(jax.checkpoint(loss), (0, 0, 0, 0, None))
                outer = jax.vmap(inner, (0, None, None, None, 0))
                return outer(query, key, value, lengths, rngs).sum()

            of_each = jax.vmap(jax.grad(loss, (0, 1)), (0, None, None, None, 0))
            return quick_jit(lambda query, key, value: (
                jax.grad(total, (0, 1, 2))(query, key, value),
                of_each(query[:, 0], key[0], value[0], lengths[0], rngs),
            ))(query, key, value)  # fmt: skip

        got, expected = gradient("tiled"), gradient("reference")
    agree(got, expected)


# --- statistics, and rows without keys ---


def test_what_comes_back_to_a_row_without_keys_goes_nowhere():
    with jax.enable_x64(True):
        point = point_of("general")
        mask = aj.causal_mask(-1)  # query 0 sees nothing
        doutput = jnp.asarray(normal(T, DV))
        dstatistics = aj.AttentionStatistics(*map(jnp.asarray, (normal(T) for _ in range(3))))
        clean = doutput, dstatistics._replace(logsumexp=dstatistics.logsumexp.at[0].set(0.0))

        def pulled_back(implementation, poisons):
            @quick_jit
            def pull(point, cotangents):
                def run(point):
                    return aj.attention(
                        **point, score="general", mask=mask, return_statistics=True,
                        implementation=implementation, block_sizes=TILE,
                    )  # fmt: skip

                return jax.vjp(run, point)[1](cotangents)[0]

            for poison in poisons:
                dirty = dstatistics._replace(
                    logsumexp=dstatistics.logsumexp.at[0].set(poison),
                    entropy=dstatistics.entropy.at[0].set(poison),
                    max_logit=dstatistics.max_logit + poison,
                )
                yield pull(point, (doutput.at[0].set(3.0), dirty))
            yield pull(point, clean)

        *_, expected = pulled_back("reference", [])
        for got in pulled_back("tiled", [0.0, np.nan, np.inf]):
            agree(got, expected, 1e-12)
    assert not np.any(expected["query"][0])


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_the_lowest_float_as_a_bias_is_as_good_as_a_mask(implementation):
    query, key, value = (np.float32(normal(*shape)) for shape in ((T, 3), (S, 3), (S, DV)))
    lowest = jnp.where(jnp.arange(S) < 4, jnp.finfo(jnp.float32).min, 0.0)[None, :]

    @quick_jit
    def gradients(query, bias, mask):
        def loss(query):
            return numbers_of(
                aj.attention(
                    query, key, value, bias=bias, mask=mask, implementation=implementation,
                    block_sizes=TILE, return_statistics=True,
                )
            )  # fmt: skip

        return jax.value_and_grad(loss)(query)

    agree(
        gradients(query, lowest, jnp.ones((1, 1), bool)),
        gradients(query, jnp.zeros((1, S)), lowest == 0),
        2e-6,
    )


# --- scores of a user's own ---


@dataclasses.dataclass(frozen=True)
class Distance(OwnCosine):
    """Features that are pytrees, of several ranks."""

    numbers: type = jnp.float32

    def project_query(self, params, query):
        return self._with_number(super().project_query(params, query), query)

    def project_key(self, params, key):
        return self._with_number(super().project_key(params, key), key)

    def _with_number(self, features, tokens):
        return {"x": (features,), "at": (3 * tokens[:, 0]).astype(self.numbers)}

    def pair(self, params, q_features, k_features):
        logits = super().pair(params, q_features["x"][0], k_features["x"][0])
        distance = q_features["at"][:, None] - k_features["at"][None, :]
        return logits - params["temperature"] * jnp.abs(distance).astype(logits.dtype)


@dataclasses.dataclass(frozen=True)
class Cubed(aj.Additive):
    """A `pair` of its own, which JAX differentiates."""

    pair_vjp = aj.Score.pair_vjp
    tile_params = aj.Additive.tile_params
    finite_slopes = aj.Additive.finite_slopes

    def pair(self, params, q_features, k_features):
        return super().pair(params, q_features, k_features) ** 3


@pytest.mark.parametrize("score", [Distance(), Cubed()])
def test_gradients_of_a_score_of_ones_own(score):
    arrays = [np.float32(normal(*shape)) for shape in ((T, 3), (S, 11), (S, DV))]
    params = score.init(jax.random.key(0), 3, 11)

    def gradient(implementation):
        def loss(arrays, params):
            return numbers_of(
                aj.attention(
                    *arrays, params=params, score=score, implementation=implementation,
                    block_sizes=TILE, mask=aj.causal_mask(1), return_statistics=True,
                )
            )  # fmt: skip

        return quick_jit(jax.grad(loss, (0, 1)))(arrays, params)

    agree(gradient("tiled"), gradient("reference"), 2e-5)


def test_what_a_score_may_not_do():
    arrays = [np.float32(normal(*shape)) for shape in ((T, 3), (S, 11), (S, DV))]

    @dataclasses.dataclass(frozen=True)
    class Transposed(OwnCosine):
        def pair(self, params, q_features, k_features):
            return super().pair(params, q_features, k_features).T

    def run(query, score, implementation):
        return aj.attention(
            query, *arrays[1:], score=score, params=score.init(jax.random.key(0), 3, 11),
            implementation=implementation, block_sizes=TILE,
        ).sum()  # fmt: skip

    with pytest.raises(ValueError, match=r"Transposed\(\): pair must .* got float32 \[7, 5\]"):
        run(arrays[0], Transposed(), "tiled")
    # Whole numbers as features: they have no gradient, and the others do.
    whole = Distance(jnp.int32)
    (total, gradient), (expected, wanted) = quick_jit(
        lambda query: [
            jax.value_and_grad(run)(query, whole, name) for name in ("tiled", "reference")
        ]
    )(arrays[0])
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    agree(gradient, wanted, 2e-5)


# --- 16 bits ---


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_float16_gradients_of_long_rows(spread):
    """Divided by the sum of 8,192 weights, a cotangent of 1e-3 has two steps of float16 left."""
    target, source, size = 512, 8192, 16
    rng = np.random.default_rng(0)
    query, doutput = (rng.normal(size=(target, size)) * spread + offset for offset in (0, 1))
    arrays = query, rng.normal(size=(source, size)), rng.normal(size=(source, size)), 1e-3 * doutput
    arrays = [np.float16(array) for array in arrays]

    @quick_jit
    def gradients(*arrays_and_cotangent):
        *arrays, doutput = arrays_and_cotangent
        return jax.vjp(lambda *arrays: aj.attention(*arrays, implementation="tiled"), *arrays)[1](
            doutput
        )

    query, key, value, doutput = (np.float64(array) for array in arrays)
    weights = np.exp(query @ key.T / np.sqrt(size))
    weights /= weights.sum(1, keepdims=True)
    dlogits = weights * (doutput @ value.T - ((weights @ value) * doutput).sum(1, keepdims=True))
    expected = (dlogits @ key / np.sqrt(size), dlogits.T @ query / np.sqrt(size))
    for got, right in zip(gradients(*arrays), (*expected, weights.T @ doutput), strict=True):
        np.testing.assert_allclose(got, right, atol=5e-3 * np.abs(right).max() + 1e-30)
