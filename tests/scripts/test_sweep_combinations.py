"""The combinations of a sweep: parsed like the command line of train.py, in folders that differ."""

import pytest
from sweep_combinations import combinations_of, folder_name
from user_tasks import Rotate


def combinations(tmp_path, *settings, common=(), scores=("dot",)):
    made = combinations_of("reversal", scores, settings, tmp_path, common)
    return [combination.arguments.settings for combination in made]


def test_settings_are_parsed_like_options(tmp_path):
    settings = ["model.dim=16,8", "decoder-self-attention=true,False", "train.steps=3"]
    configs = combinations(tmp_path, *settings, common=["--seeds", "3", "--norm", "post"])
    assert [(config.model.dim, config.model.decoder_self_attention) for config in configs] == [
        (16, True),
        (16, False),
        (8, True),
        (8, False),
    ]
    assert {(config.train.steps, config.train.seeds) for config in configs} == {(3, 3)}
    assert {config.model.norm for config in configs} == {"post"}


def test_a_value_may_be_none(tmp_path):
    configs = combinations(tmp_path, "positions=learned,rotary", "num_key_heads=None,1")
    assert [config.model.positions for config in configs] == ["learned"] * 2 + ["rotary"] * 2
    assert [config.model.num_key_heads for config in configs] == [None, 1] * 2


def test_commas_in_parentheses_do_not_separate(tmp_path):
    text = "self_attention_score=f(a=1,b=(2,3)),dot"
    with pytest.raises(ValueError, match=r"f\(a=1,b=\(2,3\)\)"):
        combinations(tmp_path, text)


def test_normalizers_with_arguments(tmp_path):
    values = "normalizer=softmax,log_scaled(normalizer=entmax,start=8)"
    common = ["--self-attention-normalizer", "softmax(sink=True)", "--output-gate"]
    configs = [c.model for c in combinations(tmp_path, values, common=common)]
    names = [config.normalizer for config in configs]
    assert names == ["softmax", "log_scaled(normalizer=entmax,start=8)"]
    assert {config.self_attention_normalizer for config in configs} == {"softmax(sink=True)"}
    assert all(config.output_gate for config in configs)


def test_kinds_without_a_normalizer_have_softmax(tmp_path):
    tasks = combinations(tmp_path, "attention=global,local-p,monotonic")
    names = [task.network.normalizer for task in tasks]
    assert names == ["log_scaled(start=9)", "softmax", "softmax"]
    with pytest.raises(ValueError, match="normalizer must be softmax with attention 'local-p'"):
        combinations(tmp_path, "attention=local-p", common=["--normalizer", "entmax"])


def test_a_users_task_has_its_own_settings(tmp_path):
    made = combinations_of("user_tasks:Rotate", ["dot"], ["by=1,2"], tmp_path, ["--dim", "8"])
    assert [type(each.arguments.settings) for each in made] == [Rotate] * 2
    assert [each.arguments.settings.by for each in made] == [1, 2]
    assert [each.label for each in made] == ["dot, by 1", "dot, by 2"]


def test_folders_are_safe_distinct_and_independent_of_the_order(tmp_path):
    settings = {"dim": 8, "positions": "learned"}
    texts = [
        "additive",
        "additive(a=1)",
        "additive(a=2)",
        "additive[a=1]",
        "a:b",
        "../b",
        "." * 300,
    ]
    names = [folder_name(text, settings) for text in texts]
    assert len(set(names)) == len(texts)
    for name in names:
        assert len(name) <= 100
        assert not set(name) & set(" /:()[]*$'\"")
        assert not name.startswith((".", "-"))

    def folders(*settings):
        made = combinations_of("reversal", ["dot"], settings, tmp_path, ())
        return {combination.arguments.workdir.name for combination in made}

    assert folders("dim=8", "learning_rate=1e-3") == folders("learning_rate=0.001", "dim=8")
    assert folders("dim=8") == {"dot,dim=8"}
