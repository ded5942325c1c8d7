"""The report of softmax_saturation.py, written from its numbers alone."""

from __future__ import annotations

import math

import numpy as np

from experiments.experiment import JSON

# The share of the largest possible norm, sqrt(2) / 4, that counts as no gradient.
NO_GRADIENT = 0.01
NO_GRADIENT_NORM = NO_GRADIENT * math.sqrt(2) / 4


def report(numbers: JSON) -> str:
    """Returns what was found, as Markdown."""
    return "\n\n".join([_even(numbers), _random(numbers), _curves(numbers)])


def _even(numbers: JSON) -> str:
    even, keys = numbers["even"], numbers["config"]["keys"]
    of_peak = {scale: f"{100 * share:.0f} %" for scale, share in even["of_peak"].items()}
    return (
        f"§38.4 reads from its curve ({keys} scores evenly from -1 to 1, times a scale) that the"
        f" gradient peaks near scale 1 and is near zero from 10 on. The curve peaks at"
        f" {even['peak_scale']:.2f}. It has {of_peak['1']} of the peak at scale 1,"
        f" {of_peak['unit variance']} at unit variance, {of_peak['10']} at scale 10 and"
        f" {of_peak['20']} at scale 20. A small scale gives a small gradient because near-uniform"
        f' attention changes no single weight much. The gradient of the softmax is not "largest'
        f' when the distribution is uniform" (§38.5) either: the norm of the Jacobian is'
        f" {even['jacobian_norm'][0]:.2f} there and up to {max(even['jacobian_norm']):.2f} on this"
        f" curve."
    )


def _random(numbers: JSON) -> str:
    random, scales = numbers["random"], numbers["scales"]
    mean, median = np.array(random["mean"]), np.array(random["median"])
    return (
        f"Over random scores the mean norm is largest at a deviation of"
        f" {scales[int(mean.argmax())]:.1f} ({mean.max():.2f}). At a deviation of"
        f" {scales[-1]:.0f}, as of raw dot products with d_k = {scales[-1] ** 2:.0f}, the mean is"
        f" {mean[-1]:.3f} and the median {median[-1]:.4f}: the mean falls as 1 / c, the median"
        f" vanishes. {100 * random['without_gradient'][-1]:.0f} % of the queries have less than"
        f" {NO_GRADIENT_NORM:.4f} there, {100 * NO_GRADIENT:.0f} % of the largest possible norm."
        f" Saturation takes the gradient from most queries and leaves it to the few whose two"
        f" largest scores nearly tie."
    )


def _curves(numbers: JSON) -> str:
    config = numbers["config"]
    lines = [
        f"Mean largest weight of {config['curve_keys']} random keys, and mean norm of the"
        f" softmax's Jacobian:\n",
        "| d_k | weight, raw | weight, scaled | Jacobian, raw | Jacobian, scaled |",
        "| --- | --- | --- | --- | --- |",
    ]
    for dim, arms in zip(config["curve_dims"], numbers["curves"], strict=True):
        weights = [f"{arms[arm]['mean'][0]:.3f}" for arm in ("raw", "scaled")]
        norms = [f"{arms[arm]['jacobian_norm']:.3f}" for arm in ("raw", "scaled")]
        lines.append(f"| {dim} | {' | '.join(weights + norms)} |")
    return "\n".join(lines)
