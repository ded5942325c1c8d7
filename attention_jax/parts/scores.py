"""`known_score`: a score of a user, traced and checked, in a form that is equal by its program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.names import is_of_library
from attention_jax.parts.programs import Known, Size, StaticContract
from attention_jax.parts.samples import close, on_numbers
from attention_jax.parts.user_code import is_array, is_users, is_wide
from attention_jax.scores.contract import Params, Score
from attention_jax.scores.wrapped import WrappedScore

_FACTS = ("needs_equal_dims", "tile_cost", "finite_slopes", "translation_invariant")
_REMEDY = (
    "take it as a parameter, and give attention params=, or score=jax.tree_util.Partial(f, array)"
    " of a function f(array, q, k)"
)
_CONTRACT = "pair must give logits [t, s] of q_features [t, ...] and k_features [s, ...]"


def known_score(
    score: Score,
    params: Params | None,
    query_dim: int,
    key_dim: int,
    dtype: Any = jnp.float32,
    lengths: tuple[Any, Any] | None = None,
) -> Score:
    """The score, traced for tokens of these sizes; one of this library is returned unchanged.

    The result is equal to another only if the two programs are equal, the numbers of closures,
    globals and attributes included. A program that was not seen before is run on a few random
    tokens: a logit must not depend on positions or on other tokens, a `pair_vjp` must be the
    derivative of `pair`, and a `tile_params` must not change its logits.

    Args:
        score: from `get_score`.
        params: its parameters, of which only the shapes are read; None for those that `init` makes.
        query_dim: Dq.
        key_dim: Dk.
        dtype: float32 or float64, in which the score computes.
        lengths: T and S of the call; None outside of one.

    Raises:
        ValueError: a method fails or breaks the contract of `Score`; one line names it.
    """
    if type(score) is Known or is_of_library(score):
        return score
    arguments = (params, query_dim, key_dim, dtype)
    try:
        return ScoreContract(score, *arguments).known(lengths)
    except Exception:
        if isinstance(score, WrappedScore) and type(score).init is WrappedScore.init:
            known_score(score.score, *arguments, lengths)  # names the part inside
        raise


class ScoreContract(StaticContract):
    """What a score must keep, for tokens of these sizes. For the arguments see `known_score`."""

    def __init__(self, score: Score, params: Any, query_dim: int, key_dim: int, dtype: Any):
        super().__init__("score", score, _REMEDY)
        self.check_signatures(score)
        self.dims, self.dtype = (query_dim, key_dim), dtype
        self.params = self.call("init", score.param_shapes, params, *self.dims)
        # Transposed features and logits have other shapes.
        target, source = [size for size in (3, 5, 7, 11) if size not in self.dims][:2]
        self.small = target, source
        self.sampled = (3, query_dim), (4, key_dim)
        self.facts = tuple(getattr(score, name) for name in _FACTS)

    def init(self, rng: Any) -> Params:
        return self.part.init(rng, *self.dims)

    def arrays(self, size: Size) -> Any:
        return zip(size, self.dims, strict=True)

    def results(self, params: Any, query: Any, key: Any) -> Any:
        """The logits, and what the other methods of the user make of them."""
        score, width = self.part, f"{jnp.dtype(self.dtype)} or more"
        both = []
        for name, tokens in (("project_query", query), ("project_key", key)):
            features = self.call(name, getattr(score, name), params, tokens, of=(tokens,))
            rows = (np.shape(leaf)[:1] == tokens.shape[:1] for leaf in jax.tree.leaves(features))
            widths = (is_wide(leaf, self.dtype) for leaf in jax.tree.leaves(features))
            contract = f"{name} must return one row per token, [{tokens.shape[0]}, ...], in {width}"
            self.require(all(rows) and all(widths), contract, features)
            both.append(features)
        logits = self.call("pair", score.pair, params, *both, of=both, cure=_CONTRACT)
        shape = target, source = query.shape[0], key.shape[0]
        self.require(
            is_array(logits, jnp.floating, self.dtype) and logits.shape == shape,
            f"pair must return float logits {[*shape]} of {target} queries, {source} keys,"
            f" in {width}",
            logits,
        )
        others = [
            ("pair_vjp", (params, *both, logits)),
            ("tile_params", (params, both[0])),
            ("round", (both[0], "query", jnp.bfloat16)),
            ("round", (both[1], "key", jnp.bfloat16)),
        ]
        return logits, [
            self.call(name, getattr(score, name), *given, of=both)
            for name, given in others
            if is_users(score, name)
        ]

    def tile_size_of(self, name: str, arguments: Any, size: Size) -> Size:
        leaves = jax.tree.leaves(arguments[1:3])
        rows, columns = leaves[0].shape[0], leaves[-1].shape[0]
        if name == "project_query":  # of a single token: a stand-in, of which no number counts
            return (size[0] if rows == 1 else rows), size[1]
        if name == "project_key":
            return size[0], (size[1] if columns == 1 else columns)
        return rows, columns

    def check_numbers(self) -> None:
        """Raises ValueError unless logits and derivatives of random tokens are as they must be."""
        score, random = self.part, np.random.default_rng(0)
        params, query, key = self.shapes((7, 5))

        def normal(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(query.dtype)

        def positive(leaf: Any) -> np.ndarray:  # as a width or a temperature must be
            return random.uniform(0.1, 0.6, leaf.shape).astype(leaf.dtype)

        def features_of(params: Any, query: Any, key: Any) -> Any:
            return score.project_query(params, query), score.project_key(params, key)

        def logits_of(*tokens: Any) -> Any:  # unlike score(), without an origin
            return on_numbers(lambda *all: score.pair(all[0], *features_of(*all)), params, *tokens)

        def with_tile_params(params: Any, *tokens: Any) -> Any:
            features = features_of(params, *tokens)
            return score.pair(score.tile_params(params, features[0]), *features)

        def derivatives(params: Any, *tokens_and_dlogits: Any) -> Any:
            """By the user's method, and by JAX."""
            *tokens, dlogits = tokens_and_dlogits
            given = params, *features_of(params, *tokens), dlogits
            return score.pair_vjp(*given), Score.pair_vjp(score, *given)

        params = jax.tree.map(positive, params)
        query, key = normal(*query.shape), normal(*key.shape)
        rows, columns = random.permutation(7)[:5], random.permutation(5)[:4]
        all_logits = logits_of(query, key)
        logits = all_logits[np.ix_(rows, columns)]
        self.require(
            close(logits, logits_of(query[rows], key[columns])),
            "it must give each pair a logit that depends on its query and its key alone; it depends"
            " on positions or on other tokens: use a bias for positions, and params for what all"
            " tokens share",
        )
        if score.translation_invariant:
            offset = np.linspace(-0.5, 0.5, key.shape[1], dtype=key.dtype)
            moved = query[rows] + offset, key[columns] + offset
            self.require(
                score.needs_equal_dims and close(logits, logits_of(*moved)),
                "it must not be translation_invariant: its logits change with an offset of all"
                " tokens",
            )
        if is_users(score, "tile_params"):
            self.require(
                close(all_logits, on_numbers(with_tile_params, params, query, key)),
                "it must have a tile_params that adds what pair would decide by itself; with it,"
                " pair gives other logits",
            )
        if is_users(score, "pair_vjp"):
            own, expected = on_numbers(derivatives, params, query, key, normal(7, 5))
            (own, structure), (expected, of_expected) = map(jax.tree.flatten, (own, expected))
            self.require(
                structure == of_expected  # type: ignore[operator]
                and all(map(close, own, expected))
                and all(is_wide(leaf, query.dtype) for leaf in own),
                "it must have a pair_vjp that is the derivative of its pair; this one gives other"
                f" numbers, narrower ones than {query.dtype}, or another structure",
            )
