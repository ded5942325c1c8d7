"""Words for the command lines: good words in any combination, and words that are always wrong."""

from __future__ import annotations

from typing import Any

Words = list[str]


def options(**values: list[Any]) -> list[Words]:
    """Returns ["--name", *words] for each value."""
    return [
        [f"--{name.replace('_', '-')}", *(value if isinstance(value, list) else [value])]
        for name, pool in values.items()
        for value in pool
    ]


NO_NUMBERS = ["", "x", "1.5.2", "one", "0x", "--", "1e", "None", "ten", "½", "[1]"]
NO_COUNTS = ["0", "-1", "1.5", "1e3", "nan", *NO_NUMBERS]
NO_RATES = ["0", "-0.1", "nan", *NO_NUMBERS]
UNKNOWN = [["--bogus"], ["--bogus", "3"]]

GOOD_TRAIN = [
    *options(
        score=["additive", "dot", "general", "scaled", "cosine"],
        self_attention_score=["dot", "None"],
        seeds=["1", "3"],
        first_seed=["0", "9"],
        steps=["50", "7"],
        batch_size=["1", "5"],
        dim=["8", "16"],
        hidden_dim=["3"],
        learning_rate=["0.1", "1e-3"],
        clip_norm=["2", "inf"],
        weight_decay=["0", "0.5"],
        letters=["1", "26"],
        min_length=["1", "3"],
        max_length=["9", "8"],
        encoder_layers=["0", "2"],
        decoder_layers=["2"],
        dropout_rate=["0", "0.5"],
        norm=["pre", "post"],
        activation=["relu", "gelu", "swiglu"],
        positions=[["sinusoidal"], ["learned"], ["none"], ["sinusoidal", "anchor=end"]],
        log_gradients=[[], "every=25"],
    ),
    *(["--resume"], ["--no-mask-padding"], ["--normalize-qk"], ["--no-source-start"]),
]
COUNTS = (
    "seeds", "steps", "batch_size", "hidden_dim", "dim", "letters", "decoder_layers", "num_heads",
    "log_every", "min_length", "checkpoint_every", "max_length",
)  # fmt: skip
BAD_TRAIN = [
    *options(
        **dict.fromkeys(COUNTS, NO_COUNTS),
        **dict.fromkeys(("learning_rate", "clip_norm"), NO_RATES),
        score=["skaled", "", ":", "nowhere:Score", "os:path", "3", "None"],
        dropout_rate=["1", "-0.1", "nan", *NO_NUMBERS],
        encoder_layers=["-1", "1.5", *NO_NUMBERS],
        first_seed=["-1", "2147483648", "1.5", *NO_NUMBERS],
        norm=["Pre", "", "none"],
        activation=["tanh", ""],
        attention=["all", ""],
        positions=[
            [], ["polar"], [""], ["learned", "limit=0"], ["learned", "limit=x"], ["none", "a=1"],
            ["sinusoidal", "scale=nan"], ["sinusoidal", "scale=0"], ["learned", "limit=3"],
            ["sinusoidal", "anchor"], ["rotary", "anchor=end", "anchor=end"],
        ],
        log_gradients=[
            "every=0", "every=7", "every=", "every=x", "7", "-1", ["every=25", "every=50"],
        ],
        coverage_weight=["-1", "nan", "x"],
        weight_decay=["-1", "nan", "x"],
        normalizer=["", "softmx", "log_scaled(start=0)", "softmax(", "None"],
        num_key_heads=["0", "3", "x"],
    ),
    *options(letters=["27"], checkpoint_every=["30"], log_every=["7"], dim=["7"], num_heads=["3"]),
    *(["word"], ["--steps"], ["--score"], ["--resume", "yes"], ["--mask-padding", "no"]),
    *UNKNOWN,
]  # fmt: skip

GOOD_EVALUATE = options(
    lengths=[["3"], ["1", "2"], ["10"]],
    strings=["1", "7"],
    seed=["0", "7", str(2**32 - 1)],
    beams=["1", "2"],
    out=["out.json"],
)
BAD_EVALUATE = [
    *options(
        lengths=[["0"], ["3", "-1"], ["x"], ["3.5"], []],
        strings=[*NO_COUNTS, []],
        beams=NO_COUNTS,
        seed=["-1", str(2**32), "x", "1.5"],
        out=[".", "nowhere/out.json", "run", []],
    ),
    ["word"],
    *UNKNOWN,
]

GOOD_REVERSE = [
    *options(seed_index=["0", "1"], beams=["1", "3"], figure=["a.png", "new/folder/a.png"]),
    *(["abc"], ["z", "hello"]),
]
BAD_REVERSE = [
    *options(
        seed_index=["2", "-1", "x", "0.5"],
        beams=NO_COUNTS,
        figure=["a.jpg", "a", ".png/", "run", []],
    ),
    *(["Hello"], ["a b"], ["a1"], ["é"], [""]),
    *UNKNOWN,
]

GOOD_ANALYZE = options(
    compare=[["run"], ["run", "run"]],
    words=[["abc"], ["a", "reverse"]],
    strings=["1", "64"],
    iterations=["0", "3"],
    samples=["2", "9"],
    out=["page.html"],
)
BAD_ANALYZE = [
    *options(
        compare=[["nowhere"], ["run", "nowhere"]],
        words=[["Abc"], [""], ["a", "1"], []],
        strings=[*NO_COUNTS, []],
        iterations=["-1", "x", "1.5"],
        samples=["1", "0", "x"],
        out=["page.txt", "page", "nowhere/page.html", "."],
    ),
    ["word"],
    *UNKNOWN,
]

GOOD_BENCHMARK = options(
    benchmarks=[["local"], ["decoding"], ["attention", "local"]],
    shrink=["8", "64"],
    repeats=["1"],
    steps=["2"],
    seeds=["1"],
    scores=[["dot"], ["dot", "additive"]],
    implementation=["reference", "tiled"],
    out=["out.json"],
)
BAD_BENCHMARK = [
    *options(
        benchmarks=[["x"], ["local", "x"], [""]],
        shrink=NO_COUNTS,
        repeats=NO_COUNTS,
        steps=NO_COUNTS,
        seeds=NO_COUNTS,
        scores=[["x"], ["dot", "skaled"], []],
        out=["nowhere/out.json", ".", []],
    ),
    ["word"],
    *UNKNOWN,
]

GOOD_REPRODUCE = [["worked_example"], ["geometry", "rollout"], ["--quick"], ["--force"]]
BAD_REPRODUCE = [
    *(["x"], ["worked_example", "x"], [""], ["Worked_Example"]),
    *(["--quick", "yes"], ["--names", "x"]),
    *UNKNOWN,
]
