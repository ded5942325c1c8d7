"""What `compile_report.py` computes from a compiler's text, by hand."""

import pytest
from compilation import tables
from compilation.xla_cycles import estimated_cycles

PROGRAM = """HloModule m

%condition (p: s32[]) -> pred[] {
  %limit = s32[] constant(5)
}

%body (p: s32[]) -> s32[] {
  %fusion.1 = f32[] fusion(p), backend_config={"estimated_cycles":"10"}
  %none = f32[] fusion(p), backend_config={"estimated_cycles":"9223372036854775807"}
}

%long (p: s32[]) -> s32[] {
  %fusion.2 = f32[] fusion(p), backend_config={"estimated_cycles":"7"}
}

%short (p: s32[]) -> s32[] {
  %fusion.3 = f32[] fusion(p), backend_config={"estimated_cycles":"2"}
}

ENTRY %main (p: s32[]) -> s32[] {
  %while.1 = s32[] while(p), condition=%condition, body=%body
  %while.2 = s32[] while(p), condition=%long, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %choice = s32[] conditional(p), branch_computations={%short, %long}
  %call.1 = s32[] call(p), to_apply=%short
  ROOT %fusion.4 = f32[] fusion(p), backend_config={"estimated_cycles":"100"}
}
"""  # noqa: E501


def test_cycles_of_loops_and_branches():
    assert estimated_cycles(PROGRAM) == 5 * 10 + 3 * 10 + 7 + 2 + 100


def test_a_loop_without_a_count_is_refused():
    with pytest.raises(ValueError, match=r"trip count of a loop is unknown: %while\.1"):
        estimated_cycles(PROGRAM.replace("constant(5)", "parameter(0)"))


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


def test_a_pass_contains_its_loops_over_features():
    forward = {"bundles": 1100, "tanhs": 1024, "spills": 1}
    backward = {"bundles": 300 + 8 * (270 + 290) + 100, "tanhs": 8 * 256, "spills": 2}
    assert tables.passes(FORWARD) == [forward]
    assert tables.passes(BACKWARD) == [forward, backward]


def test_the_cycles_of_kernels_over_those_of_tiles():
    def kernel(name, loops):
        row = {"program": "additive, T 4,096", "target": "v5e", "kernel": name}
        return {**row, "loops": loops, "bundles": 0, "spills": 0}

    tiles = {"program": tables.TILES, "target": "v5e", "xla_cycles": 10**8}
    rows = [kernel("forward", FORWARD), kernel("backward", BACKWARD), tiles]
    # For 1,024 pairs: the steps, one for each of 4096^2 / (256 x 512) tiles, and the features.
    steps = (2 * (50 + 60) + 2 + 40) * 128
    features = 128 * (2 * 1100 / 1024 + 4880 / 2048) * 4096**2 / 1024
    cycles = round(steps + features)
    (found,) = tables.against_tiles(rows)
    assert found == {
        "target": "v5e", "xla_cycles": 10**8, "kernel_cycles": cycles, "ratio": 10**8 / cycles,
    }  # fmt: skip
    ratio = next(row for row in tables.targets(rows) if row["claim"] == "additive, backward, v5e")
    assert ratio["found"] == pytest.approx(4880 / 2048 / 1.75)


def test_a_tile_has_bundles_for_1024_pairs():
    kernels = [{"loops": FORWARD}, {"loops": BACKWARD}]
    found = tables.tile_row("additive", (64, 32), kernels)
    forward = (50 + 60) / 2 + 128 * 1100 / 1024
    assert found == {
        "score": "additive", "tile": [64, 32], "forward": forward,
        "backward": forward + (2 + 40) / 2 + 128 * 4880 / 2048,
    }  # fmt: skip


def test_a_kernel_without_inner_loops_starts_once_for_a_row_of_tiles():
    loops = [{"depth": 0, "bundles": 7}, {"depth": 1, "bundles": 900}, {"depth": 1, "bundles": 64}]
    found = tables.tile_row("scaled dot", (512, 1024), [{"loops": loops}])
    assert found["forward"] == round((900 + 64 / 4) / 512, 2)


def test_the_backward_pass_is_compared_with_both_of_splash_attention():
    def kernels(program, *bundles):
        row = {"program": f"{program}, T 4,096", "target": "v5e", "loops": [], "spills": 0}
        return [{**row, "kernel": str(index), "bundles": n} for index, n in enumerate(bundles)]

    rows = kernels("scaled dot", 110, 300) + kernels("splash attention", 100, 120, 130)
    rows += kernels(tables.FUSED, 100, 200)
    found = {row["what"]: (row["found"], row["met"]) for row in tables.targets(rows)[1:]}
    assert found == {
        "bundles of a tile of 512 x 512, over splash attention": (1.2, "yes"),
        "bundles of a tile of 512 x 512, over splash attention with its fused backward": (
            1.5,
            "MISS",
        ),
    }
