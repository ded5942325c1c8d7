"""All experiments by subject, in the order of the page: from one score by hand to whole models."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

SUBJECTS = {
    "scores": (
        "worked_example",
        "score_variance",
        "softmax_saturation",
        "entropy_vs_dimension",
        "attention_masks",
        "geometry",
        "qkv_walkthrough",
    ),
    "costs": ("complexity_ledger", "weak_scaling"),
    "reversal": (
        "reversal_comparison",
        "padding_mask",
        "gru_padding",
        "scale_and_dimension",
        "attention_family",
        "local_attention",
        "coverage_and_repetition",
        "rollout",
        "length_generalization",
        "length_ablations",
        "length_normalizers",
    ),
    "gradients": ("gradient_analysis",),
    "translation": (
        "translation_budget",
        "translation_budget_additive",
        "translation_comparison",
        "translation_seeds",
        "translation_settings",
    ),
}
FOLDER = Path(__file__).parent
SUBJECT_OF = {name: subject for subject, names in SUBJECTS.items() for name in names}


def load(name: str) -> ModuleType:
    """Imports an experiment."""
    return importlib.import_module(f"experiments.{SUBJECT_OF[name]}.{name}")


def folder_of(name: str) -> Path:
    """Returns the folder of an experiment, its numbers and its figures."""
    return FOLDER / SUBJECT_OF[name]
