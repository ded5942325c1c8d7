"""Captured attention as a page to explore: tokens, matrices and numbers."""

import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from attention_jax.analysis.attention_page import page, page_data
from attention_jax.analysis.attention_page.entries import Tokens, attention_entries
from attention_jax.core.checks import check_choice
from attention_jax.runs.run_folder import check_output, write_text, writing

JSON = dict[str, Any]

_HEIGHT = 720  # of a notebook's frame, in pixels


@dataclasses.dataclass(frozen=True, repr=False)
class AttentionView:
    """A page that shows attention; a notebook displays it.

    The page draws lines between tokens, all matrices by layer and head, and the row under the
    pointer as bars with its numbers. It shows weights, logits, entropy, the gradient of the logits
    and rollout, as far as they were captured. It is one HTML file that loads nothing else.

    Attributes:
        data: the page's data, JSON as the README of `attention_page` describes it; every array is
            [N, T, S] for N heads, and the entropy [N, T].

    >>> weights = [[0.25, 0.75], [1.0, 0.0]]
    >>> page = view({"attention": {"weights": weights}}, ["a", "b"], example=())
    >>> page.data["captures"][0]["attentions"][0]["key_tokens"]
    ['a', 'b']
    >>> page.to_html()[:15]
    '<!doctype html>'
    """

    data: JSON

    @classmethod
    def side_by_side(cls, views: Mapping[str, Self]) -> Self:
        """The views as panels with linked pointers: two scores, two seeds, two steps.

        Args:
            views: by label, which replaces the labels of the panels in each view.
        """
        return cls._joined(views, "panel")

    @classmethod
    def step_by_step(cls, views: Mapping[str, Self]) -> Self:
        """The views under a slider, such as the checkpoints of one run.

        Args:
            views: by the name of the step, in the slider's order, which starts at the last step.
        """
        return cls._joined(views, "step")

    @classmethod
    def by_example(cls, views: Mapping[str, Self]) -> Self:
        """The views in a list from which one chooses an example.

        Args:
            views: by the name of the example.
        """
        return cls._joined(views, "example")

    @classmethod
    def _joined(cls, views: Mapping[str, Self], field: str) -> Self:
        if not views:
            raise ValueError("views must be at least one; got none")
        captures = [
            {**capture, field: str(name)}
            for name, shown in views.items()
            for capture in shown.data["captures"]
        ]
        places = {tuple(each[name] for name in ("panel", "step", "example")) for each in captures}
        if len(places) < len(captures):
            raise ValueError(
                "captures in views must differ in panel, step or example; their"
                f" {field} is replaced by the name of the view"
            )
        first = next(iter(views.values()))
        return cls({**first.data, "captures": captures})

    def to_html(self) -> str:
        """The page: a whole HTML document."""
        return page.document(self.data)

    def save(self, path: str | Path) -> Path:
        """Writes the page, whole or not at all; returns the path.

        Args:
            path: a file that ends in .html, in a folder that exists.

        Raises:
            ValueError: the file cannot be written.
        """
        path = Path(path)
        check_output(path, ".html", name="html")
        with writing("page", path):
            write_text(path, self.to_html())
        return path

    def __repr__(self) -> str:
        return f"AttentionView({self.data['title']!r}, {len(self.data['captures'])} captures)"

    def _repr_html_(self) -> str:
        return self.to_frame()

    def to_frame(self, height: int = _HEIGHT) -> str:
        """The page as an element of another HTML page, which it cannot read or change.

        Args:
            height: in pixels.
        """
        return (
            f'<iframe sandbox="allow-scripts" title="{html.escape(self.data["title"])}"'
            f' srcdoc="{html.escape(self.to_html())}"'
            f' style="width: 100%; height: {height}px; border: 1px solid #999; resize: vertical;">'
            "</iframe>"
        )


def view(
    attentions: Any,
    tokens: Tokens = None,
    *,
    inputs: Sequence[Any] | None = None,
    example: int | tuple[int | slice, ...] = 0,
    title: str = "Attention",
    precision: str | None = None,
) -> AttentionView:
    """Captured attention as a page, which a notebook displays and `save` writes as one HTML file.

    Rollout is computed for self attentions whose names differ only in the number of the layer, if
    each is the only attention of its block, and for cross attention to such an encoder.

    Args:
        attentions: what `capture` or `capture_gradients` returned with matrices, or only the
            attentions in it; or a function or Flax module, with its `inputs`; or, by name, arrays:
            {name: {"weights": [*B, T, S], "logits": [*B, T, S], "dlogits": [*B, T, S],
            "mask": bool [*B, T, S]}}, of which one quantity is enough.
        tokens: labels. A sequence of T for the queries and the keys of every attention; or
            {pattern: (labels of queries, labels of keys)}, where the pattern is a name or a
            wildcard such as "encoder_*", and the first that matches is used; None for numbers. Rows
            and columns without a label, such as padding, are left out.
        inputs: arguments for `capture`, if `attentions` is a function or module.
        example: the index into the first batch axis, or one index for each of the first axes, ()
            for arrays without batch axes. A slice keeps an axis. The remaining axes in front of T
            and S count as heads.
        title: of the page.
        precision: "float32", or "float16" for numbers of three digits; None for "float32" up to
            160,000 numbers.

    Returns:
        `AttentionView`.

    Raises:
        ValueError: an argument has the wrong type, shape or value.

    >>> import jax.numpy as jnp
    >>> from attention_jax import nn
    >>> from flax import nnx
    >>> attend = nn.MultiHeadAttention("dot", 8, num_heads=2, rngs=nnx.Rngs(0))
    >>> shown = view(attend, ["the", "red", "fox"], inputs=[jnp.ones((1, 3, 8))])
    >>> attention = shown.data["captures"][0]["attentions"][0]
    >>> attention["name"], attention["arrays"]["weights"]["shape"]
    ('attention', [2, 3, 3])

    Source: the views follow Vig 2019, "A multiscale visualization of attention in the Transformer
    model" (lines are the attention-head view, the grid is the model view).
    """
    if precision is not None:
        check_choice("precision", precision, page_data.Precision)
    entries = attention_entries(attentions, tokens, inputs, example, precision)
    captured = {"panel": "", "step": "", "example": "", "attentions": entries}
    return AttentionView(
        {
            "schema": page_data.SCHEMA,
            "version": page_data.VERSION,
            "title": title,
            "captures": [captured],
        }
    )
