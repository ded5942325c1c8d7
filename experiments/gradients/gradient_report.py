"""What the numbers of gradient_analysis.py say, as one paragraph or table per question."""

from __future__ import annotations

import math

import numpy as np

from experiments.experiment import JSON, spread
from experiments.gradients import gradient_questions as questions
from experiments.reversal.arms import loss_of_guessing


def report(numbers: JSON) -> str:
    """Returns one part per question."""
    config = numbers["config"]
    seeds = f"± is one standard deviation over {config['seeds']} seeds."
    return "\n\n".join(
        (
            seeds,
            _dimension(config, numbers),
            _tanh(config, numbers["kernels"]),
            _padding(config, numbers["padding"]),
            _curvature(config, numbers["curvature"]),
        )
    )


def _dimension(config: JSON, numbers: JSON) -> str:
    dot, scaled = (numbers["random"]["scores"][score] for score in questions.PRODUCTS)
    dim, trained = config["dims"][-1], numbers["training"]
    norms = [
        " and ".join(f"{of_score['jacobian_norm'][what][-1]:.2g}" for what in ("mean", "median"))
        for of_score in (dot, scaled)
    ]
    shares = [_percent(of_score["share_of_top_tenth"][-1]) for of_score in (dot, scaled)]
    losses = [spread(trained[score]["loss"][-1]) for score in questions.PRODUCTS]
    entropy, uniform = scaled["entropy"]["mean"][-1], math.log(config["source_length"])
    return (
        f"*Why does unscaled dot stop learning at large d?* At d = {dim:,} and"
        f" {config['source_length']} keys, the norm of the softmax's Jacobian is {norms[0]} (mean"
        f" and median over queries) with unscaled dot, and {norms[1]} with scaled dot. Unscaled"
        " dot's mean falls only as 1 / √d, and its mean gradient into the query stays above scaled"
        f" dot's. But few queries receive it: a tenth of them get {shares[0]} of the gradient in"
        f" the logits, and {shares[1]} with scaled dot. Scaled dot's entropy is {entropy:.2f} nats,"
        f" that of standard normal logits, not log S = {uniform:.2f}. A reversal model of dimension"
        f" {config['trained_dim']} has a loss of {losses[0]} with unscaled dot and of {losses[1]}"
        f" with scaled dot after {config['trained_steps']} steps. Guessing letters costs"
        f" {loss_of_guessing():.2f}: unscaled dot learns much less, but it learns something."
    )


def _tanh(config: JSON, kernels: JSON) -> str:
    additive, dot = kernels["additive"], kernels["scaled"]
    scale = config["kernel_scales"][-1]
    deviations = [of["logit_variance"]["mean"][-1] ** 0.5 for of in (additive, dot)]
    entropies = [of["entropy"]["mean"][-1] for of in (additive, dot)]
    peaks = {
        name: _percent(additive[name]["mean"][-1] / max(additive[name]["mean"]))
        for name in ("query_kernel", "key_kernel", "v")
    }
    return (
        f"*How does additive's tanh saturate?* With kernels {scale:g} times their initial size,"
        f" {_percent(additive['saturated_units']['mean'][-1])} of the units are beyond"
        f" {questions.TANH_BOUND}. The logits of a row have a standard deviation of"
        f" {deviations[0]:.2f} (scaled dot {deviations[1]:.0f}), and the softmax stays soft: its"
        f" entropy is {entropies[0]:.2f} of {math.log(config['source_length']):.2f} nats (scaled"
        f" dot {entropies[1]:.2g}). The gradient into the query kernel is {peaks['query_kernel']}"
        f" of its peak, into the key kernel {peaks['key_kernel']}, and into v {peaks['v']}."
    )


def _padding(config: JSON, padding: JSON) -> str:
    steps = config["padding_steps"]
    lines = [
        "*What does a missing padding mask do?* Strings of at most 8 letters, padded. With the"
        " mask, padding gets no weight and no gradient. Without it, the model comes to need the"
        " padding:",
        "",
        "| model | gradient at padding, cross attention | encoder | signal to noise"
        " | loss on the shortest strings, padded | without padding |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, arm in padding.items():
        shares = [
            f"{spread(arm[place]['gradient'][0], 2)}, {spread(arm[place]['gradient'][-1], 2)}"
            for place in (questions.CROSS, questions.SELF)
        ]
        noise = spread(arm["signal_to_noise"]["all parameters"][0], 2)
        losses = [spread(arm[what][-1], 2) for what in ("padded", "bare")]
        lines.append(f"| {name} | {' | '.join([*shares, noise, *losses])} |")
    lines += [
        "",
        f"Gradients are shares, at initialisation and after {steps} steps. The signal-to-noise"
        " ratio is that of all gradients of a batch at initialisation. Losses are those after"
        " training.",
    ]
    return "\n".join(lines)


def _curvature(config: JSON, curvature: JSON) -> str:
    lines = [
        "*Which score has the best conditioned loss?* Eigenvalues of the Hessian in all parameters"
        f" after {config['curvature_steps']} steps:",
        "",
        "| score | largest | smallest | largest / root mean square | trace per parameter | loss |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for score, arm in curvature.items():
        last = {name: np.array(looks[-1]) for name, looks in arm.items()}
        cells = (
            spread(last["largest"], 2),
            spread(last["smallest"], 2),
            spread(last["largest"] / last["rms"]),
            spread(last["trace"] / last["parameters"], 2),
            spread(last["loss"], 2),
        )
        lines.append(f"| {score} | {' | '.join(cells)} |")
    flattest, lowest = (
        min(curvature, key=lambda score: np.mean(curvature[score][name][-1]))
        for name in ("largest", "loss")
    )
    lines += [
        "",
        f"The smallest of the largest eigenvalues is that of {flattest}; the lowest loss is that of"
        f" {lowest}.",
    ]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
