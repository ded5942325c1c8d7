"""Results of gradient_analysis.py: compared with theory, and written out in sentences."""

from __future__ import annotations

import math

import numpy as np

from experiments.experiment import JSON, Expectation, near, spread
from experiments.gradients import gradient_questions as questions
from experiments.gradients.gradient_questions import standard_error


def expectations(numbers: JSON) -> list[Expectation]:
    """What theory predicts for the numbers."""
    return [
        *_of_random(numbers["config"], numbers["random"]),
        _learns_less(numbers["config"], numbers["training"]),
        *_of_kernels(numbers["config"], numbers["kernels"]),
        *_of_padding(numbers["padding"]),
        Expectation(
            "an eigenvalue lies near every largest one that Lanczos found (residual / eigenvalue)",
            "",
            max(
                float(np.max(np.divide(of_score["largest_residual"], of_score["largest"])))
                for of_score in numbers["curvature"].values()
            ),
            0,
            0.01,
            "1 %; Lanczos finds the edges first",
        ),
    ]


def _of_random(config: JSON, random: JSON) -> list[Expectation]:
    dot, scaled = random["scores"]["dot"], random["scores"]["scaled"]
    dims, n, keys = np.array(config["dims"]), config["samples"], config["source_length"]
    # For a query q the expected variance of a row is |q|^2, which has mean d and variance 2 d; its
    # estimate from S keys has variance 2 |q|^4 / (S - 1).
    error = np.sqrt((2 * dims + (dims**2 + 2 * dims) * 2 / (keys - 1)) / n)
    deviations = np.abs(np.array(dot["logit_variance"]["mean"]) - dims) / error
    density, dim = random["gap_density"], float(dims[-1])
    excess = [
        abs(mean) / error
        for of_score in (dot, scaled)
        for mean, error in zip(of_score["excess"]["mean"], of_score["excess"]["error"], strict=True)
    ]
    return [
        Expectation(
            "the variance of unscaled logits is d: largest deviation, in standard errors",
            "d (Vaswani et al., footnote 4; chapter 38, §38.3)",
            float(deviations.max()), 0, 4, "4 standard errors of normal queries and keys",
        ),
        near(
            f"entropy of scaled dot at d = {dim:.0f} is that of standard normal logits, in nats",
            "hugs log S (chapter 38, §38.5)",
            scaled["entropy"]["mean"][-1], random["limit_of_entropy"],
            4 * scaled["entropy"]["error"][-1] + 1 / dim,
            "4 standard errors, and 1/d, because |q|^2/d is 1 only on average",
        ),
        near(
            f"unscaled dot's mean Jacobian norm at d = {dim:.0f}, times sqrt(d), nears f(0)",
            "gradients vanish (chapter 38, §38.3)",
            dot["jacobian_norm"]["mean"][-1] * math.sqrt(dim), density,
            4 * dot["jacobian_norm"]["error"][-1] * math.sqrt(dim)
            + 2 * math.log(2) * density**2 / math.sqrt(dim),
            "4 standard errors, and the next term for a gap of density f(0) exp(-f(0) gap)",
        ),
        Expectation(
            "mean |dlogits|^2 is mean |J|^2: largest deviation, in standard errors",
            "", float(max(excess)), 0, 4.5, "4.5 standard errors, for the largest of many",
        ),
        Expectation(
            f"median |dlogits| at d = {dim:.0f}, unscaled / scaled",
            "extremely small gradients (Vaswani et al., section 3.2.1)",
            dot["dlogits_norm"]["median"][-1] / scaled["dlogits_norm"]["median"][-1],
            0, 4 * math.exp(-math.sqrt(dim) * math.log(2) / density) / 0.25,
            "4 exp(-sqrt(d) gap) over a |J| of 1/4; median gap log(2) / f(0), as if exponential",
        ),
    ]  # fmt: skip


def _learns_less(config: JSON, training: JSON) -> Expectation:
    dot, scaled = (np.array(training[score]["loss"][-1]) for score in questions.PRODUCTS)
    return Expectation(
        f"at dim {config['trained_dim']} unscaled dot's loss ends above scaled dot's, in nats",
        "would not train at all (chapter 38, §38.6)",
        float(dot.mean() - scaled.mean()),
        2 * math.sqrt(float(standard_error(dot) ** 2 + standard_error(scaled) ** 2)),
        math.inf,
        "2 standard errors of the difference over seeds",
    )


def _of_kernels(config: JSON, kernels: JSON) -> list[Expectation]:
    additive, scale = kernels["additive"], config["kernel_scales"][-1]
    bound = math.atanh(questions.TANH_BOUND)
    # Half of a unit's argument comes from the query. The unit's signs for two keys therefore have
    # the covariance 2/pi arcsin(1/2) = 1/3 over queries, and its sign has the variance 2/3 within a
    # row. v^2 sums to 1/0.394.
    keys = config["source_length"]
    limit = (keys - 1) / keys * (2 / 3) / 0.394294
    variance = additive["logit_variance"]
    return [
        Expectation(
            "no additive logit exceeds sum |v|: largest share of it",
            "", max(additive["largest_logit_of_bound"]["largest"]), 0, 1, "exact",
        ),
        near(
            f"share of units beyond {questions.TANH_BOUND} at scale {scale:g}",
            "", additive["saturated_units"]["mean"][-1], math.erfc(bound / scale / math.sqrt(2)),
            4 * additive["saturated_units"]["error"][-1],
            "4 standard errors; arguments are normal of deviation `scale`",
        ),
        near(
            f"variance of additive logits within a row at scale {scale:g} is that of signs",
            "", variance["mean"][-1], limit,
            4 * variance["error"][-1] + limit * 4 / (scale * math.sqrt(2 * math.pi)),
            "4 standard errors, and twice 1 - E tanh^2",
        ),
    ]  # fmt: skip


def _of_padding(padding: JSON) -> list[Expectation]:
    masked = next(arm for name, arm in padding.items() if name.startswith("masked"))
    received = [
        masked[attention][what]
        for attention in (questions.CROSS, questions.SELF)
        for what in ("weights", "gradient")
    ]
    unmasked = next(arm for name, arm in padding.items() if name.startswith("unmasked"))
    gap = np.subtract(unmasked["bare"][-1], unmasked["padded"][-1])
    return [
        Expectation(
            "share of weights and gradient at padding with the mask, largest of all",
            "masked logits get zero weight and zero gradient (topic 7)",
            float(np.max(received)), 0, 0, "exact",
        ),
        Expectation(
            "with the mask, padding changes no loss: largest difference on the shortest strings",
            "", float(np.max(np.abs(np.subtract(masked["bare"], masked["padded"])))),
            0, 2e-4, "losses are kept to five digits",
        ),
        Expectation(
            "without it, a model needs its padding: loss on the shortest strings, bare - padded",
            "scaled .40 / .17 / .31 of letters right, bare (chapter 38, §38.6)",
            float(gap.mean()), 2 * float(standard_error(gap)), math.inf,
            "2 standard errors over seeds",
        ),
    ]  # fmt: skip


def report(numbers: JSON) -> str:
    """Returns one paragraph per question."""
    return "\n\n".join(
        (
            _say_dimension(numbers["config"], numbers),
            _say_tanh(numbers["config"], numbers["kernels"]),
            _say_padding(numbers["padding"]),
            _say_curvature(numbers["config"], numbers["curvature"]),
        )
    )


def _say_dimension(config: JSON, numbers: JSON) -> str:
    dot, scaled = (numbers["random"]["scores"][score] for score in questions.PRODUCTS)
    dim, trained = config["dims"][-1], numbers["training"]

    def last(of_score: JSON, name: str, statistic: str = "mean") -> str:
        return f"{of_score[name][statistic][-1]:.2g}"

    initial = "; ".join(
        f"{spread(model['dot']['jacobian_norm'])} and"
        f" {spread(model['scaled']['jacobian_norm'])} at dimension {dim_}"
        for dim_, model in numbers["models"].items()
    )
    return (
        f"1. Dimension. At d = {dim} the softmax's Jacobian norm is {last(dot, 'jacobian_norm')} in"
        f" the mean and {last(dot, 'jacobian_norm', 'median')} in the median with unscaled dot,"
        f" {last(scaled, 'jacobian_norm')} and {last(scaled, 'jacobian_norm', 'median')} with"
        f" scaled dot; entropy is {last(dot, 'entropy')} and {last(scaled, 'entropy')} nats."
        f" The gradient into the query (rms of a component) is {last(dot, 'dquery_rms')} and"
        f" {last(scaled, 'dquery_rms')} in the mean, {last(dot, 'dquery_rms', 'median')} and"
        f" {last(scaled, 'dquery_rms', 'median')} in the median: a tenth of the queries get"
        f" {_percent(dot['share_of_top_tenth'][-1])} of the logits' gradient, with scaled dot"
        f" {_percent(scaled['share_of_top_tenth'][-1])}. Untrained reversal models have Jacobian"
        f" norms, unscaled and scaled, of {initial}. Trained for {config['trained_steps']} steps at"
        f" dimension {config['trained_dim']}, unscaled dot's loss ends at"
        f" {spread(trained['dot']['loss'][-1])} and scaled dot's at"
        f" {spread(trained['scaled']['loss'][-1])}, with entropies of"
        f" {spread(trained['dot']['entropy'][-1])} and"
        f" {spread(trained['scaled']['entropy'][-1])} nats."
    )


def _say_tanh(config: JSON, kernels: JSON) -> str:
    additive, dot = kernels["additive"], kernels["scaled"]
    scales = config["kernel_scales"]

    def fall(of_score: JSON, name: str, statistic: str = "mean") -> str:
        values = np.array(of_score[name][statistic])
        return f"{values[-1] / values.max():.2g} of its largest ({scales[values.argmax()]:g} times)"

    return (
        f"2. Tanh. With kernels {scales[-1]:g} times their initial size"
        f" {_percent(additive['saturated_units']['mean'][-1])} of additive's units are beyond"
        f" {questions.TANH_BOUND}; its logits have deviation"
        f" {additive['logit_variance']['mean'][-1] ** 0.5:.2f} within a row (scaled dot"
        f" {dot['logit_variance']['mean'][-1] ** 0.5:.0f}), at most"
        f" {_percent(max(additive['largest_logit_of_bound']['largest']))} of sum |v|, and its"
        f" entropy is {additive['entropy']['mean'][-1]:.2f} of"
        f" {math.log(config['source_length']):.2f} nats (scaled dot"
        f" {dot['entropy']['mean'][-1]:.2g}). The gradient of the logits is"
        f" {fall(additive, 'dlogits_norm')}, that into the query kernel"
        f" {fall(additive, 'query_kernel')}, into the key kernel {fall(additive, 'key_kernel')},"
        f" into v {fall(additive, 'v')}. With scaled dot that of the logits is"
        f" {fall(dot, 'dlogits_norm')}, that into the query kernel {fall(dot, 'query_kernel')} in"
        f" the mean and {fall(dot, 'query_kernel', 'median')} in the median."
    )


def _say_padding(padding: JSON) -> str:
    sentences = []
    for name, arm in padding.items():
        mask, width = name.split(", ")
        shares = "; ".join(
            f"{place}, weights {spread(arm[key]['weights'][0])} then"
            f" {spread(arm[key]['weights'][-1])}, gradient {spread(arm[key]['gradient'][0])} then"
            f" {spread(arm[key]['gradient'][-1])}, keys {np.mean(arm[key]['keys'][0]):.2f}"
            for place, key in (("cross", questions.CROSS), ("encoder", questions.SELF))
        )
        noise = ", ".join(
            f"{group} {spread(ratio[0])} then {spread(ratio[-1])}"
            for group, ratio in arm["signal_to_noise"].items()
        )
        sentences.append(
            f"{mask.capitalize()}, padded to {width}: shares at padding, before and after training:"
            f" {shares}. Signal to noise: {noise}. Loss on the shortest strings after training:"
            f" {spread(arm['padded'][-1])} padded, {spread(arm['bare'][-1])} bare."
        )
    return "3. Padding. " + " ".join(sentences)


def _say_curvature(config: JSON, curvature: JSON) -> str:
    sentences = []
    for score, arm in curvature.items():
        largest, rms = np.array(arm["largest"]), np.array(arm["rms"])
        mean = np.array(arm["trace"]) / np.array(arm["parameters"])
        sentences.append(
            f"{score}: largest eigenvalue {spread(largest[0])} then {spread(largest[-1])},"
            f" smallest {spread(arm['smallest'][0])} then {spread(arm['smallest'][-1])}, trace per"
            f" parameter {spread(mean[0], 2)} then {spread(mean[-1], 2)}, largest over"
            f" mean {spread(largest[0] / mean[0])} then {spread(largest[-1] / mean[-1])}, over"
            f" root mean square {spread(largest[0] / rms[0])} then"
            f" {spread(largest[-1] / rms[-1])}, loss {spread(arm['loss'][-1])}."
        )
    best = min(curvature, key=lambda score: np.mean(curvature[score]["largest"][-1]))
    return (
        f"4. Curvature, at initialisation then after {config['curvature_steps']} steps. "
        + " ".join(sentences)
        + f" The smallest of the largest eigenvalues after training is that of {best}."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
