"""The rows and targets of kernels compiled for an H100, without a compiler."""

from benchmarks.tables import table
from compilation import columns, gpu_kernels, h100, targets

LISTING = """
.L_x_1:
        /*0010*/                   FFMA R1, R2, R3, 1 ;
        /*0020*/              @!P0 FFMA R4, R2, R3, 1 ;
        /*0030*/                   FMUL R4, R4, R1 ;
        /*0040*/                   MUFU.RCP R5, R4 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   FFMA R1, R2, R3, 1 ;
        /*0070*/                   MUFU.EX2 R5, R4 ;
        /*0080*/                   MUFU.RCP R5, R4 ;
        /*0090*/               @P1 BRA `(.L_x_2) ;
"""


def test_a_listing_has_the_loops_without_exponentials(tmp_path):
    file = tmp_path / "forward_0.ptxas"
    file.write_text("ptxas info: 0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
                    "ptxas info: Used 42 registers, used 1 barriers\n")  # fmt: skip
    (tmp_path / "forward_0.sass").write_text(LISTING)
    (loop,) = h100._kernel(file).loops
    assert (h100._kernel(file).registers, h100._kernel(file).spills) == (42, 12)
    assert (loop.instructions, loop.features_of_pairs, loop.special) == (5, 2, 1)
    assert loop.special_per_feature == 0.5


def test_spills_and_special_functions_have_targets():
    def row(kernel, spills, *special):
        numbers = {"registers": 99, "spills": spills, "special": [*special], "instructions": [5]}
        return {"program": "additive", "kernel": kernel, **numbers}

    rows = [row("attention_forward", 0, 0.7), row("attention_gradient_of_keys", 8, 0.5, 0.5)]
    found = gpu_kernels.targets_of([*rows, {"program": "dot, cuDNN", "kernel": "fmhaSoftmax"}])
    assert [(check["what"], check["found"], check["met"]) for check in found] == [
        ("bytes of spilled registers", 0, "yes"),
        ("special functions per pair and feature", 0.7, "MISS"),
        ("bytes of spilled registers", 8, "MISS"),
    ]
    line = "| additive | attention_gradient_of_keys | 99 | 8 | 0.5, 0.5 | 5 |"
    assert line in table(columns.TABLES["compiled-h100"], rows)


def test_without_the_compiler_every_row_says_so(monkeypatch):
    monkeypatch.setattr(targets, "missing_compiler", lambda target: "it is not installed")
    rows = gpu_kernels.rows()
    assert len(rows) == 6
    assert {row["error"] for row in rows} == {"not compiled here: it is not installed"}
    text = table(columns.TABLES["compiled-h100"], rows)
    assert "| not compiled here: it is not installed | - |" in text
