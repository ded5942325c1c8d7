"""Collectives counted from a small program's text, by hand."""

import pytest
from compilation.collectives import Collective, collectives, summary

PROGRAM = """HloModule m, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(a, b)
}

%all-reduce-scatter.1 (p: f32[64,8]) -> f32[8,8] {
  %all-reduce.1 = f32[64,8]{1,0:T(8,128)} all-reduce(p), replica_groups=[1,8]<=[8], to_apply=%sum
  ROOT %slice = f32[8,8] dynamic-slice(%all-reduce.1, p)
}

%condition (p: s32[]) -> pred[] {
  %limit = s32[] constant(5)
}

%body (p: s32[]) -> s32[] {
  %permute = bf16[4,2] collective-permute(p), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (p: s32[]) -> s32[] {
  %while.1 = s32[] while(p), condition=%condition, body=%body
  %fusion.1 = f32[8,8] fusion(p), kind=kCustom, calls=%all-reduce-scatter.1
  %start = (f32[2,8], f32[16,8]) all-gather-start(p), replica_groups=mesh['a'=1,'b'=8] {'a','b'}
  %done = f32[16,8] all-gather-done(%start)
  %gather = f32[6,8] all-gather(p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %scatter = (f32[4]{0}, pred[2]{0}) reduce-scatter(p, p), replica_groups={}, to_apply=%sum
  %sent = (s8[3], s8[3], u32[], u32[]) collective-permute-start(p), source_target_pairs={{0,1}}
  ROOT %exchanged = f32[24] all-to-all(p), replica_groups=[4,2]<=[8]
}
"""

FOUND = {
    Collective("reduce-scatter", 64 * 8 * 4, 8),
    Collective("collective-permute", 4 * 2 * 2, 8, runs=5),
    Collective("all-gather", 16 * 8 * 4, 8),
    Collective("all-gather", 6 * 8 * 4, 4),
    Collective("reduce-scatter", (4 * 4 + 2) * 8, 8),
    Collective("collective-permute", 3, 8),
    Collective("all-to-all", 24 * 4, 2),
}


def test_every_collective_is_found_once():
    found = collectives(PROGRAM)
    assert len(found) == len(FOUND)
    assert set(found) == FOUND


def test_a_ring_sends():
    assert Collective("all-reduce", 800, 8).sent_bytes == 2 * 700
    assert Collective("all-gather", 800, 8).sent_bytes == 700
    assert Collective("reduce-scatter", 800, 8).sent_bytes == 700
    assert Collective("all-to-all", 800, 2).sent_bytes == 400
    assert Collective("collective-permute", 800, 8, runs=3).sent_bytes == 2400
    assert Collective("all-reduce", 800, 1).sent_bytes == 0


def test_the_sums_of_each_kind():
    kinds = summary(collectives(PROGRAM))
    assert list(kinds) == ["all-gather", "reduce-scatter", "collective-permute", "all-to-all"]
    assert kinds["all-gather"] == {"count": 2, "bytes": 512 + 192, "sent_bytes": 448 + 144}
    assert kinds["collective-permute"] == {"count": 6, "bytes": 83, "sent_bytes": 83}


def test_an_unknown_way_to_write_groups_is_refused():
    with pytest.raises(ValueError, match="replica_groups is written in an unknown way"):
        collectives(PROGRAM.replace("[4,2]<=[8]", "?"))


def test_the_links_of_a_chain_count_once():
    link = """%fused.{0} (p: pred[2]) -> pred[16] {{
  ROOT %all-gather.{0} = pred[16] all-gather(p), channel_id={1}, replica_groups={{}}, x={{chain_id="0"}}
}}
"""  # noqa: E501
    fusions = "\n".join(f"  %f.{i} = pred[16] fusion(p), calls=%fused.{i}" for i in range(3))
    text = "HloModule m, num_partitions=8\n" + link.format(0, 1) + link.format(1, 1)
    text += link.format(2, 5) + "ENTRY %main (p: pred[2]) -> pred[16] {\n" + fusions + "\n}\n"
    assert collectives(text) == 2 * [Collective("all-gather", 16, 8)]
