"""What length_ablations.py found, as text."""

from __future__ import annotations

import numpy as np

from experiments.experiment import JSON
from experiments.reversal.length_ablation_parts import PARTS

SHOWN = (40, 100, 500, 2000, 5000)  # the lengths in the table, of those that were tested
_WHERE, _SEEN, _ENTERS, _SCALED, _ADDITIVE, _OTHER = PARTS

# A sentence, and the part, arm and length of each percentage in it.
FINDINGS: tuple[tuple[str, tuple[tuple[str, str, int], ...]], ...] = (
    (
        "**A shared encoding does the work.** The source is counted from its end and the target"
        " from its start: the i-th letter of the answer is the i-th letter from the end, and the"
        " model learns to look where the encodings of query and key agree. This inductive bias is"
        " put in by hand and is right for reversal; not every task has such an order. Counted from"
        " its start, the source has {:.0f} % at length 40 and {:.0f} % at 500: without another"
        " attention nothing tells a query which letter is its own.",
        ((_WHERE, "its start", 40), (_WHERE, "its start", 500)),
    ),
    (
        "**Positions must be drawn at random in training.** Trained on 0, 1, 2, ... the model has"
        " {:.0f} % at length 500. With random subsets of the whole range, in the test too, it has"
        " {:.1f} %.",
        ((_SEEN, "0, 1, 2, ...", 500), (_SEEN, "random subsets of 8,192", 500)),
    ),
    (
        "**Sharpness limits length.** At lengths 500 / 2,000 / 5,000 scaled dot with logits as they"
        " are has {:.0f} / {:.0f} / {:.1f} %, and additive {:.0f} / {:.0f} / {:.1f} %. A learned"
        " factor, the same at all lengths, has {:.0f} and {:.0f} % at 2,000.",
        (
            *((_SCALED, "as they are", length) for length in (500, 2000, 5000)),
            *((_ADDITIVE, "as they are", length) for length in (500, 2000, 5000)),
            (_SCALED, "learned factor", 2000),
            (_ADDITIVE, "learned factor", 2000),
        ),
    ),
    (
        "**The kind of encoding.** At length 500 learned encodings have {:.1f} %, rotary {:.1f} %"
        " and no positions {:.0f} %. The sines of 2017, whose neighbours hardly differ, were"
        " expected to get worse with length: they have {:.1f} % at length 60 and {:.1f} % at"
        " 5,000.",
        (
            *((_ENTERS, arm, 500) for arm in ("learned", "rotary", "none")),
            *((_ENTERS, "sinusoidal, 2017's", length) for length in (60, 5000)),
        ),
    ),
    (
        "**Other attention.** With the decoder's self attention {:.1f} % remain at length 500, with"
        " an encoder too {:.1f} %. With both, the positions of 2017 counted from the start, and no"
        " factor of the logits, {:.0f} % remain.",
        (
            (_OTHER, "the decoder's self attention", 500),
            (_OTHER, "that and an encoder", 500),
            (_OTHER, "that, and positions from the start", 500),
        ),
    ),
)


def report(numbers: JSON) -> str:
    """Returns one table of all arms, and what each part does."""
    parts, config = numbers["parts"], numbers["config"]
    lengths = [length for length in config["lengths"] if length in SHOWN] or config["lengths"]
    lines = [
        f"{config['seeds']} seeds of {config['steps']:,} steps, trained on lengths 1-40. Letters"
        " right when the earlier ones are given, by length (%):",
        "",
        "| part | arm |" + "".join(f" {length:,} |" for length in lengths),
        "| --- | --- |" + " --- |" * len(lengths),
    ]
    for part, arms in parts.items():
        for arm in arms:
            cells = "".join(f" {_percent(parts, part, arm, length):.1f} |" for length in lengths)
            lines.append(f"| {part} | {arm} |{cells}")
    lines.append("")
    for sentence, places in FINDINGS:
        if all(_measured(parts, *place) for place in places):
            lines.append(f"- {sentence.format(*(_percent(parts, *place) for place in places))}")
    return "\n".join(lines)


def _measured(parts: JSON, part: str, arm: str, length: int) -> bool:
    return str(length) in parts.get(part, {}).get(arm, {}).get("tokens", {})


def _percent(parts: JSON, part: str, arm: str, length: int) -> float:
    """The mean over seeds."""
    return float(100 * np.mean(parts[part][arm]["tokens"][str(length)]))
