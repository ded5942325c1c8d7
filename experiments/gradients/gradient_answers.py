"""Claims about the numbers of gradient_analysis.py: those of the sources, and those of theory."""

from __future__ import annotations

import math

import numpy as np

from experiments.experiment import JSON, Expectation, near
from experiments.gradients import gradient_questions as questions
from experiments.gradients.gradient_questions import standard_error
from experiments.reversal.arms import loss_of_guessing


def expectations(numbers: JSON) -> list[Expectation]:
    """What theory predicts for the numbers."""
    return [
        *_of_random(numbers["config"], numbers["random"]),
        *_of_training(numbers["config"], numbers["training"]),
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
            contradicts=True,  # it stays below log S
        ),
        near(
            f"unscaled dot's mean Jacobian norm at d = {dim:.0f}, times sqrt(d), nears f(0)",
            "gradients vanish (chapter 38, §38.3)",
            dot["jacobian_norm"]["mean"][-1] * math.sqrt(dim), density,
            4 * dot["jacobian_norm"]["error"][-1] * math.sqrt(dim)
            + 2 * math.log(2) * density**2 / math.sqrt(dim),
            "4 standard errors, and the next term for a gap of density f(0) exp(-f(0) gap)",
            contradicts=True,  # the mean falls as slowly as 1 / sqrt(d)
        ),
        Expectation(
            f"mean gradient into the query at d = {dim:.0f}, unscaled / scaled",
            "", dot["dquery_rms"]["mean"][-1] / scaled["dquery_rms"]["mean"][-1], 1, math.inf,
            "unscaled dot's is not the smaller one",
        ),
        Expectation(
            f"share of the logits' gradient that a tenth of the queries get at d = {dim:.0f},"
            " unscaled - scaled",
            "", dot["share_of_top_tenth"][-1] - scaled["share_of_top_tenth"][-1], 0, 1,
            "fewer queries receive unscaled dot's gradient",
        ),
        Expectation(
            f"median |dlogits| at d = {dim:.0f}, unscaled / scaled",
            "extremely small gradients (Vaswani et al., section 3.2.1)",
            dot["dlogits_norm"]["median"][-1] / scaled["dlogits_norm"]["median"][-1],
            0, 4 * math.exp(-math.sqrt(dim) * math.log(2) / density) / 0.25,
            "4 exp(-sqrt(d) gap) over a |J| of 1/4; median gap log(2) / f(0), as if exponential",
        ),
    ]  # fmt: skip


def _of_training(config: JSON, training: JSON) -> list[Expectation]:
    dot, scaled = (np.array(training[score]["loss"][-1]) for score in questions.PRODUCTS)
    return [
        Expectation(
            f"at dim {config['trained_dim']} unscaled dot's loss ends above scaled dot's, in nats",
            "", float(dot.mean() - scaled.mean()),
            2 * math.sqrt(float(standard_error(dot) ** 2 + standard_error(scaled) ** 2)),
            math.inf, "2 standard errors of the difference over seeds",
        ),
        Expectation(
            f"at dim {config['trained_dim']} unscaled dot's loss ends below that of guessing",
            "would not train at all (chapter 38, §38.6)",
            loss_of_guessing() - float(dot.mean()),
            2 * float(standard_error(dot)), math.inf, "2 standard errors over seeds",
            contradicts=True,
        ),
    ]  # fmt: skip


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
        Expectation(
            f"entropy of the weights at scale {scale:g}, additive - scaled dot, in nats",
            "", additive["entropy"]["mean"][-1] - kernels["scaled"]["entropy"]["mean"][-1],
            4 * additive["entropy"]["error"][-1], math.inf, "4 standard errors",
        ),
    ]  # fmt: skip


def _of_padding(padding: JSON) -> list[Expectation]:
    unmasked = next(arm for name, arm in padding.items() if name.startswith("unmasked"))
    gap = np.subtract(unmasked["bare"][-1], unmasked["padded"][-1])
    return [
        Expectation(
            "without it, a model needs its padding: loss on the shortest strings, bare - padded",
            "scaled .40 / .17 / .31 of letters right, bare (chapter 38, §38.6)",
            float(gap.mean()), 2 * float(standard_error(gap)), math.inf,
            "2 standard errors over seeds",
        ),
    ]  # fmt: skip
