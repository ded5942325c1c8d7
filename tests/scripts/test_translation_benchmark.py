"""benchmarks/translation.py and translation_parts.py: contestants, parts and their operations."""

import dataclasses

import jax
import pytest
from benchmarks import translation, translation_parts
from benchmarks.measure import Compiled, Options

SHRUNK = Options(scores=("additive",), shrink=32, repeats=1)


def test_a_part_is_left_out_alone(monkeypatch):
    """The operations that a part takes away are those of its products, from the formulas."""
    small = dataclasses.replace(
        translation._task("scaled"),
        vocabulary_size=64,
        model=dataclasses.replace(
            translation._task("scaled").model,
            dim=16,
            hidden_dim=64,
            num_heads=2,
            dropout_rate=0.2,
            encoder_layers=1,
            decoder_layers=1,
        ),
    )
    monkeypatch.setattr(
        translation_parts,
        "interleaved_seconds",
        lambda contestants, repeats: {name: [1.0] * repeats for name in contestants},
    )
    monkeypatch.setattr(  # operations are counted before a step is compiled
        translation_parts, "compile_cold", lambda *_: Compiled(lambda state, _: state, 0.0, 0.0, 0)
    )
    monkeypatch.setattr(translation_parts, "_SIDE", 8)
    batch = translation._batch(2)
    rows = {row["part"]: row for row in translation_parts.report(SHRUNK, small, batch).rows}
    d, length, pairs = 16, translation._WIDTH, 2
    tokens = pairs * length  # of each side
    train = 3 * 2  # forward and two products backward, multiply and add
    attention = 4 * d * d * tokens + 2 * d * length * tokens  # projections, logits and output
    products = {
        "cross attention": train * attention,
        "self attention": train * 2 * attention,  # encoder and decoder
        "feed-forward layers": train * 2 * 2 * d * 4 * d * tokens,
        "output layer and loss": train * d * 64 * tokens,
    }
    for part, operations in products.items():
        found = rows[part]["gflop"] * 1e9
        assert operations <= found <= 1.6 * operations, part  # softmax, biases, norms, dropout
    assert 0 < rows["dropout"]["gflop"] < rows["the whole step"]["gflop"]
    parameters = rows["Adam and clipping"]["gflop"] * 1e9
    assert parameters > 0
    total = sum(row["gflop"] for part, row in rows.items() if not part.startswith("for comp"))
    assert total == pytest.approx(2 * rows["the whole step"]["gflop"])


@pytest.mark.slow
def test_a_step_is_timed_with_every_score_and_in_parts():
    translation.check(SHRUNK)
    report, parts = translation.run(SHRUNK)
    by_variant = {row["variant"]: row for row in report.rows}
    assert list(by_variant) == ["ours", "without cross attention", "optax loss", "nnx.Dropout"]
    assert by_variant["ours"]["times_ours"] == 1
    assert by_variant["ours"]["cross_attention_share"] > 0
    memory = {variant: row["temporary_mib"] for variant, row in by_variant.items()}
    assert memory["without cross attention"] < memory["ours"]
    assert [row["part"] for row in parts.rows[1:-2]] == list(translation_parts.PARTS)
    assert all(row["milliseconds"] > 0 for row in (parts.rows[0], parts.rows[-1]))
    assert jax.tree.leaves(parts.settings)
