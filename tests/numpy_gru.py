"""The GRU encoder-decoder of the published comparison on reversal, in NumPy."""

import numpy as np
from numpy_model import PAIRS
from oracles import softmax

from attention_jax.tasks.vocabulary import PAD


def gru(x, h, params):
    """One step of Cho et al. 2014; gates in the order reset, update, new."""
    of_x = np.split(x @ params["input_kernel"] + params["input_bias"], 3)
    of_h = np.split(h @ params["state_kernel"] + params["state_bias"], 3)
    reset, update = (1 / (1 + np.exp(-(of_x[n] + of_h[n]))) for n in (0, 1))
    return (1 - update) * np.tanh(of_x[2] + reset * of_h[2]) + update * h


def numpy_logits(params, source, target_inputs, lengths):
    """The model's logits [B, T, V], row by row.

    Args:
        params: the parameters, in float64.
        source: int [B, S].
        target_inputs: int [B, T].
        lengths: how many tokens of each row of `source` the decoder may attend to.
    """
    embeddings = [params[f"{side}_embedding"].copy() for side in ("source", "target")]
    for table in embeddings:
        table[PAD] = 0
    start, logits = np.zeros(len(params["decoder"]["state_kernel"])), []
    pair = PAIRS["general" if "kernel" in params["score"] else "additive"]
    for row, inputs, length in zip(source, target_inputs, lengths, strict=True):
        h, memory = start, []
        for token in row:
            h = gru(embeddings[0][token], h, params["encoder"])
            memory.append(h)
        h = start
        for token in inputs:
            seen = np.array(memory[:length])
            context = softmax(pair(params["score"], h, seen)) @ seen
            h = gru(np.concatenate([embeddings[1][token], context]), h, params["decoder"])
            both = np.concatenate([h, context])
            logits.append(both @ params["logits"]["kernel"] + params["logits"]["bias"])
    return np.reshape(logits, (*target_inputs.shape, -1))
