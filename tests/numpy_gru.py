"""The GRU encoder-decoder of the published comparison on reversal, in NumPy."""

import numpy as np
from oracles import softmax


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(x, h, weights_x, weights_h, bias_x, bias_h):
    """One step of Cho et al. 2014; gates in the order reset, update, new."""
    reset_x, update_x, new_x = np.split(x @ weights_x.T + bias_x, 3, axis=-1)
    reset_h, update_h, new_h = np.split(h @ weights_h.T + bias_h, 3, axis=-1)
    update = sigmoid(update_x + update_h)
    new = np.tanh(new_x + sigmoid(reset_x + reset_h) * new_h)
    return (1 - update) * new + update * h


def numpy_logits(score, state, source, target_inputs, lengths=None):
    """The model's logits, row by row.

    Args:
        score: one of the four of the literature.
        state: the parameters by their names in PyTorch.
        source: int [B, S].
        target_inputs: int [B, T].
        lengths: how many tokens of each row of `source` the decoder may attend to; None for all.
    """
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    encoder = [state[f"encoder.{name}_l0"] for name in names]
    decoder = [state[f"decoder.{name}"] for name in names]
    start = np.zeros(decoder[1].shape[1])
    logits = np.zeros((*target_inputs.shape, len(state["logits.bias"])))
    for row in range(len(source)):
        h, memory = start, []
        for token in source[row]:
            h = gru(state["source_embedding.weight"][token], h, *encoder)
            memory.append(h)
        h = start
        for t, token in enumerate(target_inputs[row]):
            energies = []
            for k in memory[: None if lengths is None else lengths[row]]:
                if score == "additive":
                    hidden = np.tanh(state["score.hidden.weight"] @ np.concatenate([h, k]))
                    energies.append(state["score.v.weight"][0] @ hidden)
                elif score == "general":
                    energies.append(h @ state["score.weight"] @ k)
                else:
                    energies.append(h @ k / (len(start) ** 0.5 if score == "scaled" else 1))
            context = softmax(np.array(energies)) @ np.array(memory[: len(energies)])
            x = np.concatenate([state["target_embedding.weight"][token], context])
            h = gru(x, h, *decoder)
            both = np.concatenate([h, context])
            logits[row, t] = state["logits.weight"] @ both + state["logits.bias"]
    return logits
