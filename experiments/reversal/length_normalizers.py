"""Which normaliser keeps attention sharp on long strings, with which score, and at what cost?

Source:   ours; the normalisers are those of Martins and Astudillo 2016 (sparsemax), Peters et al.
          2019 (entmax), Ramapuram et al. 2024 (sigmoid), Agarwal et al. 2025 (sinks) and Nakanishi
          2025 (SSMax). "Long-Context Generalization with Sparse Attention" (arXiv 2506.16640,
          ICLR 2026) trains on reversal, too; its table stands beside ours.
Command:  .venv/bin/python -m experiments.reversal.length_normalizers
Time:     20 minutes on 2 CPU cores beside other jobs.
Expected: trained on 3 to 8 letters, log n keeps every score at 97 % of the strings of 200 letters;
          additive attention, whose logits are bounded, has at most 20 % with softmax, with a sink
          and with sigmoid, in which n keys share the weight. Entmax, sparsemax and SSMax leave more
          weight on the right letter than softmax, with each score. Trained on 1 to 40 letters, log
          n, SSMax and entmax reverse 90 % of the strings of 640 letters with additive attention,
          and softmax reverses 90 % at twice the length of training.

Every arm has the task's default settings except its score, its normaliser and fewer steps (`MODEL`
in `attention_jax/tasks/reversal.py`): one cross attention and no other, shared positions, SOS
in the source, weight decay. The decay also pulls the parameters of normalisers to 0: SSMax's factor
and the logit of the sink.

- "softmax, log n" is the default recipe: softmax, whose logits grow with log n beyond the lengths
  of training.
- SSMax is softmax of s log(n) x, with a learned s, at all lengths.
- The sink is one more key with a learned logit and the value 0.
- Sigmoid attention has the bias -log n.

Left out, for the time they take: entmax with logits that grow, which is nearest to the source's
ASEntmax; other alphas; and, trained on 1 to 40 letters, three scores and three normalisers. With
`--long-scores` and `--long-normalizers` they can be trained.

Sharpness is the share of a row's weights that the right key has: the key of the letter to be
written, and SOS for the end. The earlier letters are given. For weights that sum to 1 the share is
the weight itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from matplotlib.figure import Figure

from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal import Reversal
from experiments.experiment import JSON, ScoreNames, rounded, run_experiment, significant
from experiments.reversal.arms import trained_arm
from experiments.reversal.length_evaluation import share_of_right_key, strings_right
from experiments.reversal.length_figures import panels_figure
from experiments.reversal.length_generalization import recipe
from experiments.reversal.length_normalizers_report import expectations, report
from experiments.reversal.training_settings import TrainingSettings
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

# {name: the normaliser, as in `get_normalizer`, with the first length that is not trained}
NORMALIZERS = {
    "softmax": "softmax",
    "softmax, log n": "log_scaled(start={start})",
    "SSMax": "ssmax",
    "softmax, sink": "softmax(sink=True)",
    "sigmoid": "sigmoid",
    "entmax 1.5": "entmax",
    "sparsemax": "sparsemax",
}


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training, which are those of the short strings.

    Attributes:
        normalizers: names in `NORMALIZERS`, or normalisers as in `get_normalizer`.
        scores: scores trained on short strings, each as in `get_score`.
        lengths: tested lengths of the models that are trained on short strings.
        strings: test strings of each of `lengths`, for each seed.
        long_scores, long_normalizers: what is trained on 1 to 40 letters; none to leave that out.
        long_lengths, long_strings: the same for the models that are trained on 1 to 40 letters.
        long_steps, long_batch_size: of their training.
        drawn: test strings per length on which sharpness is measured.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    normalizers: tuple[str, ...] = tuple(NORMALIZERS)
    steps: int = 1500
    learning_rate: float = Reversal.train.learning_rate
    scores: ScoreNames = ("additive", "dot", "general", "scaled")
    lengths: tuple[int, ...] = (3, 5, 8, 10, 20, 50, 200)
    strings: tuple[int, ...] = (100, 100, 100, 100, 100, 50, 20)
    long_scores: ScoreNames = ("additive",)
    long_normalizers: tuple[str, ...] = ("softmax", "softmax, log n", "SSMax", "entmax 1.5")
    long_lengths: tuple[int, ...] = (20, 40, 80, 160, 320, 640)
    long_strings: tuple[int, ...] = (50, 50, 50, 50, 10, 10)
    long_steps: int = 1000
    long_batch_size: int = 32
    drawn: int = 2
    workdir: Path = Path("runs/length_normalizers")

    def __post_init__(self) -> None:
        check_some(self, "normalizers", "scores")
        check_least(self, lengths=1, strings=1, long_lengths=1, long_strings=1, drawn=1)
        for lengths, strings in (("lengths", "strings"), ("long_lengths", "long_strings")):
            if len(getattr(self, strings)) != len(getattr(self, lengths)):
                raise ValueError(
                    f"{strings} must be one for each of {lengths} {getattr(self, lengths)};"
                    f" got {getattr(self, strings)}"
                )
        for score, normalizer, long in self.arms():
            self.training(score, normalizer, long=long)
        check_folder("workdir", self.workdir)

    def arms(self) -> list[tuple[str, str, bool]]:
        """Returns (score, normaliser, whether it is trained on 1 to 40 letters) of each arm."""
        short = itertools.product(self.scores, self.normalizers, [False])
        return [*short, *itertools.product(self.long_scores, self.long_normalizers, [True])]

    def training(self, score: str, normalizer: str, *, long: bool) -> Reversal:
        """Returns the settings of one run."""
        base = recipe(score) if long else Reversal()
        start = base.max_length + 1  # tokens of the longest source, SOS included
        text = NORMALIZERS.get(normalizer, normalizer).replace("{start}", str(start))
        training = self.training_of(base, score=score, normalizer=text)
        if not long:
            return training
        train = dataclasses.replace(
            training.train, steps=self.long_steps, batch_size=self.long_batch_size
        )
        return dataclasses.replace(training, train=train)


QUICK = Config(
    normalizers=("softmax", "entmax 1.5"), scores=("scaled",), long_scores=(), seeds=2, steps=100,
    lengths=(8, 20), strings=(20, 10),
)  # fmt: skip


def run(config: Config) -> JSON:
    """Trains and evaluates every score with every normaliser."""
    trainings: JSON = {}
    for score, normalizer, long in config.arms():
        arm = _arm(config, score, normalizer, long=long)
        lengths = config.training(score, normalizer, long=long)
        name = f"{lengths.min_length}-{lengths.max_length}"
        trainings.setdefault(name, {}).setdefault(score, {})[normalizer] = arm
    return {"trainings": trainings}


def _arm(config: Config, score: str, normalizer: str, *, long: bool) -> JSON:
    training = config.training(score, normalizer, long=long)
    letters = f"{training.min_length}-{training.max_length}"
    words = "".join(letter if letter.isalnum() else "-" for letter in normalizer)
    folder = config.workdir / f"{letters}-{score_folder(score)}-{words}"
    trained, measured = trained_arm(training, folder)
    lengths = config.long_lengths if long else config.lengths
    strings = config.long_strings if long else config.strings
    exact = strings_right(trained, dict(zip(lengths, strings, strict=True)))
    share = share_of_right_key(trained, dict.fromkeys(lengths, config.drawn))
    print(
        f"{letters} letters, {score}, {normalizer}:"
        f" {[round(float(shares.mean()), 3) for shares in exact.values()]}",
        flush=True,
    )
    return {
        "loss": significant(measured["loss"][-1]),
        "steps_per_second": significant(measured["steps_per_second"] or 0.0),
        "exact": {str(length): rounded(shares) for length, shares in exact.items()},
        "share": {str(length): rounded(shares) for length, shares in share.items()},
    }


CAPTIONS = {
    "length_normalizers": "Share of whole strings that are right, in free-running decoding, by"
    " length; one panel per score and training, one colour per normaliser. Points are means over"
    " seeds, side by side at each length; lengths are evenly spaced.",
    "length_normalizers_sharpness": "Share of a row's weights that the right key has, by length;"
    " the same panels and colours. It falls where n keys share the weight.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    measures = {
        "length_normalizers": ("exact", "strings right (%)"),
        "length_normalizers_sharpness": ("share", "weight of the right key (%)"),
    }
    figures = {}
    for stem, (measure, label) in measures.items():
        panels = {
            f"{score}, trained on {letters} letters": {
                normalizer: arm[measure] for normalizer, arm in arms.items()
            }
            for letters, scores in numbers["trainings"].items()
            for score, arms in scores.items()
        }
        trained = [
            int(letters.partition("-")[2])
            for letters, scores in numbers["trainings"].items()
            for _ in scores
        ]
        figures[stem] = panels_figure(panels, trained=trained, ylabel=label, many_curves=True)
    return figures


if __name__ == "__main__":
    run_experiment(__name__)
