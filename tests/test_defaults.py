"""Every public default stands here once more: whoever changes one has to mean it.

A default of None needs no entry: it leaves a part out, or the choice to the library. Neither does a
function; those of initialisers, which are functions, are drawn in test_default_numbers.py.
"""
# ruff: noqa: C408 -- dict(dropout_rate=0.0) reads like the signature that it pins

import dataclasses
import importlib
import inspect
import math
import pkgutil
import string
from pathlib import Path
from types import MappingProxyType

import command_lines
import jax.numpy as jnp
from flax import nnx

import attention_jax as aj
from attention_jax import analysis, interop, nn
from attention_jax.kernels.choice import Table
from attention_jax.nn import ModelConfig
from attention_jax.scores import literature
from attention_jax.tasks.gradients import GradientAnalysis
from attention_jax.tasks.translation.translate import Search
from attention_jax.training.task import TrainConfig

ROOT = Path(__file__).parents[1]
FLOAT32 = dict(param_dtype=jnp.float32)
LENGTHS = dict(min_length=3, max_length=8, source_start=True, coverage_weight=1.0)
ANY_LENGTH = dict(
    positions="sinusoidal", position_anchor="end", position_draw="window", position_limit=8192,
    max_wavelength=100.0, min_wavelength=0.4, position_scale=8.0,
)  # fmt: skip
STRINGS = ModelConfig(encoder_layers=0, decoder_self_attention=False, normalizer=None, **ANY_LENGTH)
ONE_SEQUENCE = dict(
    model=ModelConfig("decoder", decoder_layers=2, positions="learned", position_limit=128),
    train=TrainConfig(seeds=3, steps=600, batch_size=32),
)


def table(*numbers):
    """An entry of `kernels.choice.TABLES`: three per `tile_cost`, and numbers of a tile."""
    costs = "elementwise", "matmul", "materialized"
    return Table(*(dict(zip(costs, row, strict=False)) for row in numbers[:3]), *numbers[3:])


# fmt: off
DEFAULTS = {  # public names -> what inspect finds
    # attention and its functions
    "array_field": dict(default=dataclasses.MISSING, kw_only=False),
    "attention": dict(score="scaled", normalizer="softmax", dropout_rate=0.0,
                      return_statistics=False),
    "attention_weights": dict(score="scaled", normalizer="softmax"),
    "ring_attention": dict(axis_name="context", return_statistics=False),
    "coverage_attention": dict(score="scaled", return_weights=True),
    "monotonic_attention": dict(score="scaled", offset=0.0, noise_scale=1.0, hard=False,
                                return_weights=True),
    "hard_monotonic_positions hard_monotonic_weights": dict(start=0),
    "masked_softmax": dict(axis=-1),
    "beam_search": dict(length_penalty=0.0),
    "custom_vjp": dict(nondiff_argnums=()),
    "dot_product_attention": dict(is_causal=False, return_residual=False, score="scaled"),
    "flax_attention_fn from_torch": dict(score="scaled"),
    "BlockSizes": dict(query=512, key=512),
    # masks and biases
    "causal_mask": dict(offset=0),
    "Shifts": dict(piece_lengths=(1, 1)),
    "t5_bias": dict(bidirectional=True, max_distance=128),
    "relative_position_bucket": dict(buckets=32, max_distance=128, bidirectional=True),
    # scores and normalisers
    "Additive Concat": dict(key_part=True),
    "Multiplied": dict(score=aj.ScaledDot(), factor=1.0),
    "SoftCap": dict(score=aj.ScaledDot(), cap=50.0),
    "Softmax": dict(sink=False),
    "Sigmoid": dict(learned=False),
    "Entmax": dict(alpha=1.5),
    "LogScaled": dict(normalizer=aj.Softmax(), scale=1.0, learned=False),
    # modules
    "Attention": dict(normalizer="softmax", dropout_rate=0.0, **FLOAT32, keep_rngs=True),
    "MultiHeadAttention": dict(use_bias=False, normalize_qk=False, normalizer="softmax",
                               output_gate=False, dropout_rate=0.0, **FLOAT32,
                               keep_rngs=True),
    "LocalMAttention": dict(alignment="monotonic"),
    "Block": dict(is_cross=False),
    "FeedForward": dict(activation="relu"),
    "Attention.__call__ MultiHeadAttention.__call__": dict(return_weights=False),
    "ScoreModule.attend Block.attend MultiHeadAttention.attend": dict(
        first=0, return_weights=False),
    "Model.__call__": dict(return_weights=False),
    "Generator.greedy_decode": dict(return_weights=False),
    "Generator.sample_decode sample_search": dict(temperature=1.0),
    "Generator.beam_decode": dict(length_penalty=0.0),
        "rotary": dict(max_wavelength=10000.0),
    "sinusoidal_encoding": dict(max_wavelength=10000.0, min_wavelength=1.0),
    # settings of models
    "ModelConfig": dict(
        architecture="encoder-decoder", score="scaled", self_attention_score="scaled",
        encoder_layers=1, decoder_layers=1, decoder_self_attention=True, dim=64, hidden_dim=64,
        num_heads=1, activation="relu", norm="pre", normalize_qk=False,
        self_attention_normalizer="softmax", output_gate=False, tied_embeddings="none",
        dropout_rate=0.0, dtype="float32", remat=False, fast_variance=False, attention="global",
        radius=2, alignment="reversed", normalizer="softmax", mask_padding=True,
        positions="sinusoidal",
        position_anchor="start", position_draw="none", position_limit=512, max_wavelength=10000.0,
        min_wavelength=1.0, position_scale=1.0),
    # analysis
    "attention_gradients logit_scale_sweep": dict(score="scaled"),
    "attention_memory": dict(backward=False),
    "attention_rollout": dict(residual=0.5, head_reduction="mean", return_layers=False),
    "cross_rollout": dict(head_reduction="mean"),
    "attention_summary saturation": dict(bound=0.99),
    "capture capture_gradients": dict(matrices=True),
    "hessian_trace": dict(samples=32),
    "hessian_spectrum_edges": dict(iterations=30),
    "learning_statistics": dict(depth=3),
    "logit_size": dict(axis=()),
    "logit_variance": dict(per_row=False),
    "view": dict(example=0, title="Attention"),
    "AttentionView.to_frame": dict(height=720),
    "ScoreCost.flops_per_query": dict(target_length=1),
    # training and tasks
    "leaves_of option_types": dict(prefix=""),
    "TrainConfig": dict(seeds=5, first_seed=0, steps=2500, batch_size=64,
                        optimizer="adam", learning_rate=0.003,
                        schedule="cosine", warmup_steps=0, warmup_from_0=False,
                        clip_norm=1.0, weight_decay=0.0, beta2=0.999, epsilon=1e-8,
                        accumulate=1, log_every=25, checkpoint_every=500, keep=2, keep_best=0,
                        validate_on=0),
    "SequenceTask Sort": dict(model=ModelConfig(), train=TrainConfig(), **LENGTHS),
    "Reversal": dict(model=STRINGS, train=TrainConfig(weight_decay=0.3), **LENGTHS, letters=26),
    "Copy": dict(model=dataclasses.replace(STRINGS, position_anchor="start"), train=TrainConfig(),
                 **LENGTHS),
    "TokenTask": dict(**ONE_SEQUENCE, length=32),
    "Recall": dict(**ONE_SEQUENCE, length=32, vocabulary_size=64, pairs=4),
    "NoisyRecall": dict(
        model=ONE_SEQUENCE["model"], train=TrainConfig(seeds=3, steps=600, batch_size=64),
        length=64, keys=8, noise_tokens=16, noise=0.2),
    "SelectiveCopy": dict(**ONE_SEQUENCE, length=32, letters=14, copied=6),
    "Regression": dict(
        model=ONE_SEQUENCE["model"], train=TrainConfig(seeds=3, steps=1000, batch_size=64),
        features=2, points=7),
    "Translation": dict(
        vocabulary_size=4000, max_tokens=60,
        model=ModelConfig(dim=128, hidden_dim=512, num_heads=4, dropout_rate=0.2,
                            encoder_layers=3, decoder_layers=3, tied_embeddings="all"),
        train=TrainConfig(seeds=1, steps=9000, batch_size=None, learning_rate=0.002,
                          warmup_steps=1000, schedule="inverse-sqrt", beta2=0.98, epsilon=1e-9,
                          keep_best=1),
        batch_tokens=2560, buckets=8, label_smoothing=0.1, validation_metric="bleu"),
    "Text": dict(
        model=ModelConfig("decoder", dim=128, hidden_dim=512, num_heads=4, decoder_layers=2,
                          dropout_rate=0.1, positions="rotary"),
        train=TrainConfig(seeds=1, steps=2000, batch_size=32, warmup_steps=100, weight_decay=0.1),
        length=128, held_out=0.1, documents=False),
    "GradientAnalysis": dict(iterations=20, samples=8),
    "Search": dict(beams=1, length_penalty=1.0),
    "MeshShape": dict(seed=1, data=1),
    "Batches": dict(buckets=6, multiple_of=1),
    "Vocabulary": dict(alphabet=string.ascii_lowercase),
    "output_cross_entropy": dict(label_smoothing=0.0),
    "train_run prepare": dict(resume=False),
    "load_run": dict(step="newest"),
    "load_model": dict(seed=0, step="newest"),
    "export": dict(seed_index=0),
    "first_params": dict(resumes=False),
    "evaluated_run results_of": dict(lengths=()),
    "mean_interval": dict(low=-math.inf, high=math.inf),
    "ResultsTable ResultsTable.of": dict(choose_on=0),
    "say": dict(error=False),
    "last_line": dict(step=math.inf),
    "check_output": dict(suffix="", name="out"),
    "environment": dict(packages=()),
    "TrainedRun": dict(interrupted=0),
    "Program": dict(trace=dict, sample=list),
    "Feed": dict(digests=MappingProxyType({}), files=MappingProxyType({}), note=""),
    "Result": dict(low=0.0),
    "answers_view": dict(seed_index=0, compare=(), all_steps=False),
    "accuracies": dict(strings=1000),
    "best_answers": dict(beams=1, length_penalty=0.0, sos=1),
    "Task.answers SequenceTask.answers Text.answers Translation.answers TokenTask.answers"
    " Regression.answers": dict(inputs=(), beams=1),
    "Task.evaluate SequenceTask.evaluate Text.evaluate Translation.evaluate TokenTask.evaluate"
    " Regression.evaluate": dict(lengths=()),
    "start_of Task.feed Text.feed Translation.feed": dict(multiple_of=1),
    "padded_batch": dict(batch_size=0, source_width=0, target_width=0),
    "padded_rows": dict(width=0),
    "translator_of": dict(seed_index=0),
    "translate": dict(search=Search()),
    "translated_ids": dict(search=Search()),
    # runs and figures
    "Model.features": dict(return_weights=False),
    "PositionEncoding.ids": dict(packed=False),
    "Checkpoints": dict(keep=2, keep_best=0, read_only=False),
    "Checkpoints.save": dict(temporary=False),
    "Checkpoints.restore": dict(step="newest"),
    "index_of": dict(labels=()),
    "new_figure": dict(rows=1, columns=1, grid=False),
    "printable": dict(keep="\n\t"),
    "weight_heatmaps": dict(ylabel="query", xlabel="key", size=3.1),
    "draw_band": dict(log=False, limits=(-math.inf, math.inf)),
}

OPTIONS = {  # scripts/NAME.py: options besides those of the settings above
    "train.Arguments": dict(task_name="reversal", resume=False, log_to=()),
    "evaluate.Arguments": dict(step="newest", lengths=()),
    "translate.Arguments": dict(search=Search(beams=4), step="newest", seed_index=0),
    "answers.Arguments": dict(inputs=(), step="newest", seed_index=0, beams=1, compare=(),
                              all_steps=False),
    "export.Arguments": dict(step="newest", seed_index=0),
    "analyze_gradients.Arguments": dict(compare=(), analysis=GradientAnalysis()),
    "sweep.Arguments": dict(scores=("scaled",), settings=(), task="reversal", lengths=(), table=(),
                            choose_on=0),
    "bench.Arguments": dict(tasks=(), quick=False, workdir=Path("runs/bench")),
    "reproduce.Arguments": dict(names=(), quick=False, force=False),
    "compile_report.Arguments": dict(part="kernels", only=""),
    "check_device.Arguments": dict(minutes=8.0, parts=("machine", "right", "scaled", "additive",
                                                       "tiles", "training", "tasks")),
    "benchmark.Arguments": dict(benchmarks=("attention", "local", "decoding", "reversal",
                                            "translation"),
                                scores=("additive", "dot", "general", "scaled"), works=(),
                                shrink=1, repeats=7),
}

CONSTANTS = {  # defaults in disguise, by their place in attention_jax
    "SCORES": {
        "additive": aj.Additive(), "concat": aj.Concat(), "cosine": aj.Cosine(), "dot": aj.Dot(),
        "distance": aj.NegativeSquaredDistance(), "general": aj.General(), "scaled": aj.ScaledDot(),
        "softcap": aj.SoftCap(), "elliptical": literature.Elliptical(scale=None),
        "hyperbolic": literature.Hyperbolic(), "indexer": literature.Indexer(num_heads=4),
        "l2": literature.L2(scale=None), "manhattan": literature.Manhattan(),
        "neural": literature.Neural(hidden_dim=None), "ngpt": literature.NGPT(),
        "power": literature.Power(aj.Dot(), degree=2.0),
        "softplus": literature.Softplus(aj.ScaledDot()), "tropical": literature.Tropical(),
        "yat": literature.Yat(epsilon=1e-5)},
    "NORMALIZERS": {
        "entmax": aj.Entmax(), "log_scaled": aj.LogScaled(), "sigmoid": aj.Sigmoid(),
        "softmax": aj.Softmax(),
        "sparsemax": aj.Entmax(alpha=2.0), "ssmax": aj.LogScaled(learned=True)},
    "Score.needs_equal_dims": False, "Score.tile_cost": "materialized", "Score.finite_slopes": None,
    "Normalizer.sums_to_one": True, "Normalizer.convex": False, "Normalizer.steep": False,
    "Normalizer.uses_num_keys": False, "Normalizer.is_softmax": False,
    "nn.ANY_LENGTH": ANY_LENGTH,
    "kernels.choice.TABLES": {
        "cpu": table((2**27, 2**27, 2**24), (2**10, 2**18, 2**16), (1024, 512, 512), 2**20, 4),
        "gpu": table((2**27, 2**27, 2**27), (), (1024, 2048, 512), 2**24)},
    "kernels.choice.Table._field_defaults": table(
        (2**26, 2**26, 2**26), (), (1024, 512, 512), 2**20, 1)._asdict(),
    "kernels.choice.SMALLEST_BLOCK": {"elementwise": 64, "matmul": 64, "materialized": 16},
    "kernels.choice.KEYS_PER_QUERY": 64,
    "experimental.mosaic_tpu.TILES": {
        "matmul": aj.BlockSizes(512, 512), "elementwise": aj.BlockSizes(256, 512),
        "materialized": aj.BlockSizes(128, 128)},
    "kernels.cudnn.CUDNN_GENERATION": 8.0,
    "kernels.choice.EXAMPLES_OF_ANY_BATCH": 8,
    "whole.query_chunks.SMALLEST_CHUNK": 64,
}
# fmt: on

PUBLIC = (aj, nn, analysis, interop)  # by `__all__`
ROOMS = ("positions", "training", "tasks", "runs", "reports")  # every name without an underscore


def public_objects():
    for module in PUBLIC:
        yield from (getattr(module, name) for name in module.__all__)
    for room in ROOMS:
        package = importlib.import_module(f"attention_jax.{room}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                if name[0] != "_" and getattr(value, "__module__", None) == module.__name__:
                    yield value


def public_functions():
    """(name, function): functions, classes, and the methods that this library defines."""
    for value in public_objects():
        if inspect.isfunction(value) or hasattr(value, "__wrapped__"):
            yield value.__name__, value
        elif inspect.isclass(value):
            if not issubclass(value, BaseException):
                yield value.__name__, value.__init__ if issubclass(value, nnx.Module) else value
            for name in dir(value):
                method = getattr(value, name)
                here = getattr(method, "__module__", None) or ""
                is_function = inspect.isroutine(method) and hasattr(method, "__qualname__")
                ours = is_function and here.startswith("attention_jax")
                if ours and (name == "__call__" or name[0] != "_"):
                    yield method.__qualname__, method


def defaults_of(function):
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default not in (p.empty, None)}
    return {name: value for name, value in defaults.items() if not inspect.isfunction(value)}


def as_text(defaults):
    """1, 1.0 and True are equal, and yet different defaults."""
    return f"dict({', '.join(f'{name}={value!r}' for name, value in sorted(defaults.items()))})"


def assert_pinned(found, table):
    pinned = {name: defaults for names, defaults in table.items() for name in names.split()}
    found = {name: as_text(defaults) for name, defaults in found.items() if defaults}
    pinned = {name: as_text(defaults) for name, defaults in pinned.items()}
    wrong = [
        f"{name} has {found.get(name, 'no defaults')}, pinned is {pinned.get(name, 'nothing')}"
        for name in sorted({*found, *pinned})
        if found.get(name) != pinned.get(name)
    ]
    assert not wrong, "\n".join([f"mend the default, or its entry in {__file__}:", *wrong])


def test_functions_classes_and_settings():
    found = {}
    for name, function in public_functions():
        defaults = defaults_of(function)
        assert found.setdefault(name, defaults) == defaults, f"two public names {name}"
    assert_pinned(found, DEFAULTS)


def test_command_lines():
    found = {}
    author_tool = ROOT / "benchmarks/compilation/compile_report.py"
    for path in [author_tool, *(ROOT / "scripts").glob("*.py")]:
        script = command_lines.load(str(path.relative_to(ROOT)))
        for name, value in vars(script).items():
            if inspect.isclass(value) and name.endswith(("Arguments", "Options")):
                found[f"{path.stem}.{name}"] = defaults_of(value)
    assert_pinned(found, OPTIONS)


def test_constants():
    found = {place: pkgutil.resolve_name(f"attention_jax.{place}") for place in CONSTANTS}
    assert found == CONSTANTS
