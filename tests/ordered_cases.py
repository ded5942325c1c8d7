"""Coverage and monotonic attention as plain programs, without chunks, Score and Mask.

Also arguments for both: more queries than a chunk holds, and not a whole number of chunks.
"""

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj

T, S, D, DV = 67, 7, 3, 5


def monotonic(arrays, allowed, hard=False):
    """Monotonic attention by its formula: dot scores, a sigmoid, a scan over queries and keys."""
    logits = arrays["query"] @ arrays["key"].T + arrays["bias"] + arrays["offset"]
    p = jnp.where(allowed, 1 / (1 + jnp.exp(-jnp.where(allowed, logits, 0))), 0)
    if hard:
        p = jnp.where(p >= 0.5, 1.0, 0.0)

    def query(previous, p):
        def key(reached, now):
            p, previous = now
            reached = reached + previous
            return (1 - p) * reached, p * reached

        weights = jax.lax.scan(key, jnp.zeros((), p.dtype), (p, previous))[1]
        return weights, weights

    last, weights = jax.lax.scan(query, arrays["initial"], p)
    return {"output": weights @ arrays["value"], "weights": weights, "last": last}


def coverage(arrays, allowed):
    """Coverage attention by its formula, one query after another."""

    def step(covered, row):
        query, allowed, bias = row
        seen = jnp.where(allowed, covered, 0)
        logits = (arrays["key"] + seen[:, None] * arrays["kernel"][None, :]) @ query + bias
        exponentials = jnp.where(allowed, jnp.exp(jnp.where(allowed, logits, 0)), 0)
        weights = exponentials / jnp.where(allowed.any(), exponentials.sum(), 1)
        # As in the library, where a masked tie gets no gradient.
        loss = jnp.where(weights <= seen, weights, seen).sum()
        return covered + weights, (weights, loss)

    rows = (arrays["query"], allowed, arrays["bias"])
    covered, (weights, loss) = jax.lax.scan(step, arrays["initial"], rows)
    return {
        "output": weights @ arrays["value"], "weights": weights, "coverage": covered, "loss": loss
    }  # fmt: skip


def library_monotonic(arrays, allowed, hard=False):
    options = {name: arrays[name] for name in ("query", "key", "value", "bias", "offset")}
    options |= {"initial": arrays["initial"], "score": "dot", "mask": allowed, "hard": hard}
    output, weights = aj.monotonic_attention(**options)
    again, last = aj.monotonic_attention(**options, return_weights="last")
    return {"output": (output + again) / 2, "weights": weights, "last": last}


def library_coverage(arrays, allowed):
    options = {name: arrays[name] for name in ("query", "key", "value", "bias")}
    result = aj.coverage_attention(
        **options, coverage=arrays["initial"], coverage_kernel=arrays["kernel"], score="dot",
        mask=allowed,
    )  # fmt: skip
    return result._asdict()


BOTH = {
    "monotonic": (library_monotonic, monotonic),
    "coverage": (library_coverage, coverage),
}


def arrays(seed=3, dtype=np.float32):
    """Returns the arguments of one example, by name."""
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (T, D), "key": (S, D), "value": (S, DV), "bias": (T, S), "kernel": (D,),
        "initial": (S,),
    }  # fmt: skip
    found = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    found["initial"] = rng.uniform(0.01, 1 / S, size=S).astype(dtype)
    # The walk is so slow that many queries find a key.
    return found | {"offset": np.asarray(2.5, dtype)}


def allowed(hidden):
    """Returns a mask, bool [T, S]: queries in `hidden` have no key, all others at least one."""
    table = np.random.default_rng(5).random((T, S)) < 0.7
    table[:, 3] = True
    table[:, S - 1] = False  # a key that no query may attend to
    table[np.asarray(hidden, int)] = False
    return table
