"""What `compile_report.py` reads of a compiler's text, by hand."""

import json

import pytest
from command_lines import call, load

from benchmarks.compilation import gpu_kernels, targets, tpu_kernels
from benchmarks.targets import targets_of

LISTING = """
.L_x_1:
   -:-:-:Y:01   /*0010*/                   FFMA R1, R2, R3, 1
   -:-:-:Y:01   /*0020*/              @!P0 FFMA R4, R2, R3, 1
   -:-:-:Y:01   /*0030*/                   FMUL R4, R4, R1
   -:-:-:Y:01   /*0040*/                   MUFU.RCP R5, R4
   -:-:-:Y:01   /*0050*/               @P1 BRA `(.L_x_1)
.L_x_2:
   -:-:-:Y:01   /*0060*/                   FFMA R1, R2, R3, 1
   -:-:-:Y:01   /*0070*/                   MUFU.EX2 R5, R4
   -:-:-:Y:01   /*0080*/                   MUFU.RCP R5, R4
   -:-:-:Y:01   /*0090*/               @P1 BRA `(.L_x_2)
"""


def test_a_listing_has_the_loops_without_exponentials(tmp_path):
    file = tmp_path / "forward_0.ptxas"
    file.write_text("ptxas info: 0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
                    "ptxas info: Used 42 registers, used 1 barriers\n")  # fmt: skip
    (tmp_path / "forward_0.sass").write_text(LISTING)
    assert gpu_kernels._kernel(file) == {
        "registers": 42, "spills": 12, "special": [0.5], "instructions": [5],
    }  # fmt: skip


def test_the_targets_of_an_h100():
    def row(kernel, spills, *special):
        return {"program": "additive", "kernel": kernel, "registers": 99, "spills": spills,
                "special": special}  # fmt: skip

    rows = [row("attention_forward", 0, 0.7), row("attention_gradient_of_keys", 8, 0.5, 0.5)]
    cudnn = {"program": "dot, cuDNN", "kernel": "fmhaSoftmax"}
    found = targets_of("compiled-h100", gpu_kernels.judged_rows([*rows, cudnn]))
    assert [(check["found"], check["met"]) for check in found] == [
        (0, "yes"), (0.7, "MISS"), (8, "MISS"),
    ]  # fmt: skip


def test_a_tpu_kernel_has_the_loop_with_the_most_bundles(tmp_path):
    bundles = "0x0 : > x\n0x1 LB: > > x\n0x2 : > > x\n0x3 LB: > > x\n  no bundle\n0x4 : > x\n"
    (tmp_path / "7-attention_forward.3-70-final_bundles.txt").write_text(bundles)
    file = tmp_path / "7-attention_forward.3-71-final_hlo-static-per-bundle-utilization.txt"
    file.write_text("title\nEUP, VSTORE:SPILL\n-\n-\n0 0\n1 1\n1 0\n1 0\n\n0 5\n")
    row = tpu_kernels.kernel_row(tmp_path / "7-attention_forward.3-70-final_bundles.txt")
    loops = row.pop("loops")
    assert row == {"kernel": "attention_forward", "bundles": 2, "fills": 0, "spills": 1}
    assert [(loop["depth"], loop["bundles"], loop.get("EUP", 0)) for loop in loops] == [
        (1, 1, 0), (2, 2, 2), (2, 1, 1), (1, 1, 0),
    ]  # fmt: skip


FORWARD = [
    {"depth": 1, "bundles": 50},
    {"depth": 2, "bundles": 1100, "EUP": 1024, "VSTORE:SPILL": 1},
    {"depth": 1, "bundles": 60, "VSTORE:SPILL": 9},
]
BACKWARD = [
    *FORWARD,
    {"depth": 2, "bundles": 300},
    {"depth": 3, "bundles": 270, "EUP": 128},
    {"depth": 3, "bundles": 290, "EUP": 128, "VSTORE:SPILL": 2},
    {"depth": 1, "bundles": 2},
    {"depth": 2, "bundles": 100, "VSTORE:SPILL": 5},
    {"depth": 1, "bundles": 40},
]


def test_a_tile_has_bundles_for_1024_pairs():
    kernels = [{"loops": FORWARD}, {"loops": BACKWARD}]
    found = tpu_kernels.tile_row("additive", (64, 32), kernels)
    forward = (50 + 60) / 2 + 128 * 1100 / 1024
    assert (found["score"], found["tile"], found["forward"]) == ("additive", [64, 32], forward)
    assert found["backward"] == forward + (2 + 40) / 2 + 128 * 4880 / 2048
    # A kernel without inner loops starts once for a row of tiles.
    loops = [{"depth": 0, "bundles": 7}, {"depth": 1, "bundles": 900}, {"depth": 1, "bundles": 64}]
    found = tpu_kernels.tile_row("scaled dot", (512, 1024), [{"loops": loops}])
    assert found["forward"] == round((900 + 64 / 4) / 512, 2)


def test_the_targets_of_a_tpu():
    def kernels(program, *bundles, loops=((), (), ())):
        about = {"program": f"{program}, T 4,096", "target": "v5e", "kernel": "k"}
        return [about | {"bundles": n, "loops": of} for n, of in zip(bundles, loops, strict=False)]

    rows = kernels("scaled dot", 110, 300) + kernels("splash attention", 100, 120, 130)
    rows += kernels("splash attention with its fused backward", 100, 200)
    rows += kernels("additive", 0, 0, loops=(FORWARD, BACKWARD))
    rows.append({"program": "scaled dot, T 16,384", "target": "v5e", "argument_mib": 1.0,
                 "output_mib": 2.0, "temporary_mib": 41.0})  # fmt: skip
    judged = targets_of("compiled", tpu_kernels.judged_rows(rows))
    found = [(check["found"], check["met"]) for check in judged]
    assert found == [
        (1.1, "yes"), (1.2, "yes"), (1.5, "MISS"), (1100 / 1024, "yes"), (1, "MISS"),
        (4880 / 2048 / 1.75, "yes"), (2, "MISS"), (41.0, "MISS"),
    ]  # fmt: skip


@pytest.mark.parametrize("part", ["kernels", "h100"])
def test_without_the_compiler_every_row_says_so(part, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(targets, "missing_compiler", lambda target: "it is not installed")
    out, report = tmp_path / "report.json", load("benchmarks/compilation/compile_report.py")
    assert call(report, "--part", part, "--out", out, monkeypatch=monkeypatch) == 0
    reports = json.loads(out.read_text())["benchmarks"]
    rows = [row for report in reports.values() for row in report["rows"]]
    assert len(rows) == len(capsys.readouterr().out.splitlines()) > 5
    assert all("it is not installed" in row["error"] for row in rows)
    assert call(report, "--only", "v5e", "--out", out, monkeypatch=monkeypatch) == 2
