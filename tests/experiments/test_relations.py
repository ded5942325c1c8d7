"""The relations of the leaderboard, and weights by hand for what a score can express."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import SCORES, get_score
from experiments import lab
from experiments.bench import one_attention, relations
from experiments.bench.expression import EXPRESSION
from experiments.bench.one_attention import MATRIX, RELATIONS

DIM, KEYS = 16, 8


@pytest.fixture(scope="module")
def batches():
    """500 samples of each relation, in float64: some weights are near a limit."""
    with jax.enable_x64(True):
        arrays = one_attention.samples(jax.random.key(1), 500, KEYS)
        assert arrays[0].dtype == jnp.float64
        return {name: [np.asarray(x[i]) for x in arrays] for i, name in enumerate(RELATIONS)}


def test_one_key_is_right(batches):
    """Weights by hand, below, meet each relation."""
    for name, (query, keys, right) in batches.items():
        values = jax.vmap(RELATIONS[name])(query, keys)
        best = values == values.max(axis=1, keepdims=True)
        assert np.all(np.argwhere(best)[:, 1] == right)
        assert np.all(np.isfinite(values.max(axis=1)))  # predecessor: some key is below the query
    query, keys, _ = batches["parity"]
    assert {*np.abs(query[:, :2]).ravel(), *np.abs(keys[..., :2]).ravel()} == {1.0}
    assert not np.any(query[:, 2:])
    assert not np.any(keys[..., 2:])


def test_a_tie_counts_as_a_share_and_nan_as_wrong():
    score, query, keys = SCORES["dot"], np.ones((1, 4), np.float32), np.ones((1, 8, 4), np.float32)
    params = one_attention.init(score, jax.random.key(0), DIM)
    batch = query, keys, np.array([3])
    loss, share = one_attention.measure(score, params, jnp.float32(1), batch)
    assert float(share) == pytest.approx(1 / 8)
    assert float(loss) == pytest.approx(np.log(8), rel=1e-5)
    assert float(one_attention.measure(score, params, jnp.float32(np.nan), batch)[1]) == 0


# --- the sweep: one program, three seeds choose, and its edges are seen ---

FEW = relations.Config(
    ("scaled",), (0,), (0.03, 0.1), (0.25, 1.0, 4.0), 3, 2, steps=3, batch=8, tests=16
)


def test_all_settings_and_seeds_are_as_each_by_itself():
    """[settings, seeds, R]; the second setting has another rate and factor in each relation."""
    score, rngs = get_score("scaled"), jax.random.split(jax.random.key(0), 3)
    rates, factors = np.full((2, 9), 0.03, np.float32), np.ones((2, 9), np.float32)
    rates[1], factors[1] = np.linspace(0.01, 0.3, 9), np.linspace(0.1, 8, 9)
    together = relations.train_all(score, FEW, rngs, rates, factors)
    alone = relations.train(score, FEW, rngs[2], jnp.array(rates[1]), jnp.array(factors[1]))
    for found, expected in zip(together, alone, strict=True):
        assert found.shape == (2, 3, 9)
        np.testing.assert_allclose(found[1, 2], expected, rtol=1e-4)
        assert not np.allclose(found[0, 2], expected)


def test_the_median_of_three_seeds_chooses_and_mean_losses_decide_ties(monkeypatch):
    """The first seed and the mean would choose the second of six settings."""
    right = np.full((6, 3, 9), 0.5)
    right[1] = np.array([1.0, 0.6, 0.6])[:, None]
    right[2:5] = np.array([0.7, 0.7, 0.0])[:, None]
    loss = np.array([0.0, 0, 2, 3, 1, 0])[:, None, None] + np.zeros((6, 3, 9))
    asked = []

    def train_all(score, config, rngs, rates, factors):
        asked.append((len(rngs), jax.random.key_data(rngs).tolist(), rates, factors))
        return (loss, right) if len(asked) == 1 else (loss[:1, :2], right[:1, :2])

    monkeypatch.setattr(relations, "train_all", train_all)
    rows = relations._rows_of(FEW, "scaled", 0)
    assert [count for count, *_ in asked] == [3, 2]
    assert not any(seed in asked[0][1] for seed in asked[1][1])
    assert {(row["rate"], row["factor"], row["interior"]) for row in rows} == {(0.1, 1.0, False)}
    assert np.all(asked[1][3] == 1.0)
    assert rows[0]["validation"] == [[0.5, 0.6, 0.7], [0.7, 0.7, 0.5]]
    assert rows[0]["parameters"] == 2 * (4 * 16 + 16)
    more = dataclasses.replace(FEW, rates=(0.01, 0.03, 0.1), factors=(1.0, 4.0))
    asked.clear()
    assert not relations._rows_of(more, "general", 0)[0]["interior"]  # of two factors none is
    assert relations.edge_gain({"validation": [[0, 9, 0], [1, 3, 2], [0, 0, 4]]}) == 6
    assert relations.edge_gain({"validation": [[0, 0, 0], [1, 3, 2], [0, 0, 0]]}) == 0


def test_both_bases_of_a_score_are_one_part_and_rows_are_kept(tmp_path, monkeypatch):
    config = dataclasses.replace(FEW, scores=("dot", "general"), bases=(0, 1), workdir=tmp_path)
    measured = []

    def rows_of(config, name, base):
        measured.append((name, base))
        return [{"score": name, "base": base}]

    monkeypatch.setattr(relations, "_rows_of", rows_of)
    rows, missing = lab.rows_of(relations, config, "2/2")
    assert measured == [("general", 0), ("general", 1)]
    assert (len(rows), missing) == (2, 2)
    assert len(lab.rows_of(relations, config, None)[0]) == len(measured) == 4


# --- what can be expressed: weights by hand ---


def side(*columns):
    """A projection of 4 + 1 inputs (the last is 1, for the bias), zero beyond these features."""
    columns = np.array([np.asarray(column, float) for column in columns])
    weights = np.zeros((5, DIM))
    weights[:, : len(columns)] = columns.T
    return {"kernel": weights[:4], "bias": weights[4]}


def x(i, factor=1.0):
    """The column that reads `factor` times the i-th input; `const` reads a constant."""
    return factor * np.eye(5)[i]


def const(number):
    return number * np.eye(5)[4]


ZERO = const(0)
BITS = [(x(0) - x(1)), (x(0) + x(1))]  # of even bits the first is 0, of odd ones the second


def turned(name):
    """Columns of the query whose product with the key is the relation's value."""
    return (
        [x(i) for i in range(4)]
        if name == "inner"
        else [np.append(MATRIX[:, j].astype(float), 0) for j in range(4)]
    )


KEY = [x(i) for i in range(4)]


def product(name, score):
    """inner and bilinear."""
    query, c = turned(name), 1e3
    if score in ("cosine", "ngpt"):  # the key hardly changes the length
        return side(*query), side(*KEY, const(c))
    if score in ("distance", "l2", "elliptical"):  # |k|^2 is small beside q . k
        return side(*(c * each for each in query)), side(*(each / c for each in KEY))
    if score == "hyperbolic":
        return side(*query), side(*KEY, const(1e4))
    if score in ("power", "yat", "indexer"):  # q . k + 900 is above 0; yat's distance is constant
        query, far = [*query, const(30)], const(1e5) if score == "yat" else ZERO
        return side(*query, far, ZERO), side(*KEY, const(30), ZERO, far)
    return side(*query), side(*KEY)


def nearest(_, score):
    lift = const(1e3) if score in ("cosine", "ngpt", "yat") else ZERO
    small = 1e-4 if score == "hyperbolic" else 1
    return side(*(small * each for each in KEY), lift), side(*(small * each for each in KEY), lift)


def farthest(_, score):
    query, key = nearest(_, score)
    return jax.tree.map(np.negative, query), key


def longest(_, score):
    return side(*[ZERO] * 4, const(-1)), side(*KEY, const(1))


def manhattan(_, score):
    if score == "tropical":  # the largest of all signed sums is the sum of sizes
        signs = np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1).T
        return (side(*(np.append(each, 0) for each in signs)),) * 2
    if score == "neural":
        query = [sign * each for sign in (1, -1) for each in KEY]
        key = [-sign * each for sign in (1, -1) for each in KEY]
        return side(*query), side(*key), {"v": np.array([-1.0] * 8 + [0] * 8)}
    return side(*KEY), side(*KEY)


def predecessor(_, score):
    steep, slow, c = 1e6, 1e-3, 100
    if score == "manhattan":  # both slopes are steep, and a straight line takes the left one away
        return side(x(0, steep), const(-steep * c)), side(x(0, steep), x(0, steep - slow))
    if score == "tropical":
        low = const(-2e7)
        return side(x(0, -steep), x(0, slow), low), side(x(0, -steep), x(0, slow), ZERO)
    if score == "indexer":
        key, heads = side(x(0), const(1)), np.zeros((DIM, 4, DIM))
        # The query's features are its first input and 1; the heads read steep (k - q) and k + c.
        heads[1, 0, 0], heads[0, 0, 1] = steep, -steep
        heads[1, 1, 0], heads[1, 1, 1] = slow, slow * c
        weights = np.zeros((DIM, 4))
        weights[1, :2] = -1, 1
        return side(x(0), const(1)), key, _indexer(heads, weights)
    near, v = ([1 / c], [c * slow]) if score != "neural" else ([1], [slow])
    query = side(x(0, -steep), ZERO if score != "neural" else const(c))
    return query, side(x(0, steep), x(0, near[0])), {"v": np.array([-1.0, *v] + [0] * 14)}


def parity(_, score):
    (d, s), zeros = BITS, [0.0] * 12
    if score == "manhattan":
        return side(d, -d, s, -s), side(d, d, s, s)
    if score == "tropical":
        features = [s, -s, d, -d]
        return side(*features, *(-f for f in features)), side(d, d, s, s, -d, -d, -s, -s)
    if score == "indexer":  # |q . k| in two heads
        heads, weights = np.zeros((DIM, 4, DIM)), np.zeros((DIM, 4))
        heads[0, 0, 0] = heads[1, 0, 1] = 1
        heads[0, 1, 0] = heads[1, 1, 1] = -1
        weights[2, :2] = 1
        return side(x(0), x(1), const(1)), side(x(0), x(1)), _indexer(heads, weights)
    if score in ("additive", "concat"):  # steps of the sum of four bits: -4 to 4, up and down
        steps = [const(-3), const(-1), const(1), const(3)]
        query = side(*(100 * (s - each) for each in steps))
        return query, side(*[100 * s] * 4), {"v": np.array([-1.0, 1, -1, 1, *zeros])}
    if score == "neural":
        query = side(*(s + const(c) for c in (4, 2, 0, -2)))
        return query, side(*[s] * 4), {"v": np.array([-0.5, 1, -1, 1, *zeros])}
    return side(x(0), x(1)), side(x(0), x(1))


def squares(name, score):
    """tanh(b + z) + tanh(b - z) of small z is a constant minus a multiple of z^2."""
    small, b = 1e-3, const(1)
    pairs = {
        "nearest": [(x(i), x(i, -1), 1) for i in range(4)],
        "farthest": [(x(i), x(i, -1), -1) for i in range(4)],
        "longest": [(ZERO, x(i), -1) for i in range(4)],
    }
    if name in pairs:
        pairs = pairs[name]
    else:  # 4 q k = (q + k)^2 - (q - k)^2
        pairs = [
            (query, sign * key, -sign)
            for query, key in zip(turned(name), KEY, strict=True)
            for sign in (1, -1)
        ]
    query = [b + sign * small * q for q, _, _ in pairs for sign in (1, -1)]
    key = [sign * small * k for _, k, _ in pairs for sign in (1, -1)]
    v = [float(sign) for _, _, sign in pairs for _ in range(2)]
    return side(*query), side(*key), {"v": np.array([*v, *[0.0] * (DIM - len(v))])}


def _indexer(heads, weights):
    """Parameters of an indexer whose head h reads the query by heads[:, h]."""
    return {
        "query_kernel": heads.reshape(DIM, -1),
        "weight_kernel": weights,
        "key_kernel": np.eye(DIM),
    }


SUMS = ("distance", "l2", "elliptical", "hyperbolic")

WEIGHTS = {
    **{"inner": product, "bilinear": product, "cosine": nearest, "nearest": nearest},
    **{"farthest": farthest, "longest": longest, "manhattan": manhattan},
    **{"predecessor": predecessor, "parity": parity},
}


def by_hand(score, relation):
    """The parameters of an attention that expresses a relation."""
    builder = WEIGHTS[relation]
    if score in ("additive", "concat") and relation not in ("predecessor", "parity"):
        builder = squares
    if score in ("cosine", "ngpt") and relation == "cosine":
        return {"query": side(*KEY), "key": side(*KEY), "score": own(score, {})}
    query, key, *rest = builder(relation, score)
    given = rest[0] if rest else {}
    if score == "indexer" and not rest:  # one head reads the query as it is; its last input is 30
        heads, weights = np.zeros((DIM, 4, DIM)), np.zeros((DIM, 4))
        heads[:, 0], weights[4, 0] = np.eye(DIM), 1
        given = _indexer(heads, weights)
    return {"query": query, "key": key, "score": own(score, given)}


def own(score, given):
    """The parameters of the score itself: those given, and neutral ones."""
    eye = np.eye(DIM)
    neutral = {
        **{"general": {"kernel": eye}, "cosine": {"log_scale": np.zeros(())}},
        **{"ngpt": {"s": np.ones(DIM)}, "elliptical": {"log_m": np.zeros(DIM)}},
        "hyperbolic": {"log_beta": np.zeros(())},
        "additive": {"query_kernel": eye, "key_kernel": eye},
        "concat": {"kernel": np.concatenate([eye, eye])},
        "neural": {"query_kernel": eye, "key_kernel": eye, "bias": np.zeros(DIM)},
    }
    return {**neutral.get(score, {}), **given}


@pytest.mark.parametrize("score", EXPRESSION)
def test_weights_by_hand_express_each_relation_that_has_a_plus(batches, score):
    assert score in SCORES
    assert len(EXPRESSION[score]) == len(RELATIONS)
    with jax.enable_x64(True):
        for relation, sign in zip(RELATIONS, EXPRESSION[score], strict=True):
            if sign == "+":
                params, batch = by_hand(score, relation), batches[relation]
                measured = one_attention.measure(SCORES[score], params, np.float64(1), batch)
                assert float(measured[1]) >= 0.99, relation


# --- what cannot: lines on which a relation peaks or dips, and a score does not ---

NO_PEAK = (*relations.PRODUCTS, "power")
NO_DIP = (*relations.PRODUCTS, *SUMS, "manhattan", "tropical")


RANDOM = np.random.default_rng(0)
ENDS, QUERY = 3 * RANDOM.standard_normal((2, 200, 4)), RANDOM.standard_normal(4)
LINES = np.concatenate([ENDS[0], ENDS.mean(0), ENDS[1]])  # a key between each two
BITS_OF_4 = np.array([[a, b, 0, 0] for a, b in ((1, 1), (-1, -1), (1, -1), (-1, 1))], float)


@functools.cache
def logits_at(score):
    """Logits [1 + 4, 3 * 200 + 4] in float64, with fresh parameters and random biases."""
    queries, keys = (np.concatenate([each, BITS_OF_4]) for each in (QUERY[None], LINES))
    with jax.enable_x64(True):
        params = one_attention.init(SCORES[score], jax.random.key(2), DIM)
        for index, name in enumerate(("query", "key")):
            params[name]["bias"] = jax.random.normal(jax.random.key(index), (DIM,))
        return np.stack([one_attention.logits_of(SCORES[score], params, q, keys) for q in queries])


@pytest.mark.parametrize("score", dict.fromkeys([*NO_PEAK, *NO_DIP]))
def test_on_a_line_a_score_does_not_peak_or_dip(score):
    first, middle, last = logits_at(score)[0, : len(LINES)].reshape(3, -1)
    if score in NO_PEAK:
        assert np.all(middle <= np.maximum(first, last) + 1e-9)
    if score in NO_DIP:
        assert np.all(middle >= np.minimum(first, last) - 1e-9)


def test_relations_that_peak_or_dip_have_a_minus_where_the_score_does_not():
    query, along, across = np.array([2.0, 1, 0, 0]), np.eye(4)[0], np.array([-1.0, 2, 0, 0])
    peaks = {  # the middle of three keys on a line, and the way to the ends
        "nearest": (query, along),
        "manhattan": (query, along),
        "cosine": (query, across),
        "predecessor": (query - along, 1.5 * along),
    }
    dips = {"farthest": (query, along), "longest": (0 * query, along), "cosine": (-query, across)}
    for lines, sign, scores in ((peaks, 1, NO_PEAK), (dips, -1, NO_DIP)):
        for name, (middle, way) in lines.items():
            keys = jnp.array(np.stack([middle - way, middle, middle + way]), jnp.float32)
            first, value, last = RELATIONS[name](jnp.array(query, jnp.float32), keys)
            assert min(sign * (value - first), sign * (value - last)) > 0.1
            index = [*RELATIONS].index(name)
            assert {EXPRESSION[score][index] for score in scores} == {"-"}


@pytest.mark.parametrize("score", [*relations.PRODUCTS, *SUMS])
def test_even_keys_are_above_odd_ones_for_all_queries_or_for_none(score):
    """In the sum over keys, once the monotone function is undone."""
    undo = {
        "softcap": lambda x: 50 * np.arctanh(x / 50),
        "softplus": lambda x: np.log(np.expm1(np.exp(x))),
        "hyperbolic": lambda x: -np.cosh(x),
    }.get(score, lambda x: x)
    values = undo(logits_at(score)[1:, len(LINES) :])
    even_minus_odd = values[:, :2].sum(1) - values[:, 2:].sum(1)
    if score in relations.PRODUCTS:
        np.testing.assert_allclose(even_minus_odd, 0, atol=1e-9)
    else:
        assert len({*np.sign(even_minus_odd)}) == 1
        assert np.all(np.abs(even_minus_odd) > 1e-3)
    assert EXPRESSION[score][[*RELATIONS].index("parity")] == "-"
