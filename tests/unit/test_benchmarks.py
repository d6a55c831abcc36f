"""The pure parts of the benchmarks: statistics, counts of arithmetic, the report."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("common")


@pytest.fixture
def bench(common: Any) -> Any:
    return importlib.import_module("grpo_vs_trl")


def record(common: Any, side: str, step: int, **values: Any) -> Any:
    defaults: dict[str, Any] = {
        "seconds": 10.0,
        "generation": 4.0,
        "training": 5.0,
        "phases": {"forward, backward": 4.5},
        "prompt_tokens": 160,
        "sampled_tokens": 840,
        "tokens_read": 1000,
        "head_rows": 840,
        "attention_pairs": 50_000,
        "reward": 0.25,
        "peak_memory": 2000.0,
        "foreign": 0.0,
    }
    return common.StepRecord(side=side, step=step, **{**defaults, **values})


def smol(common: Any) -> Any:
    return common.ModelShape(layers=30, hidden=576, heads=9, kv_heads=3, head_size=64, intermediate=1536, vocabulary=49152)


def settings(bench: Any, **values: Any) -> Any:
    options = bench.parse(["--steps", "3"])
    return replace(bench.settings_of(options, "float32", "/model", "/folder"), **values)


def result(common: Any, bench: Any, **values: Any) -> Any:
    steps = (2, 3, 4)
    return common.Result(
        settings=settings(bench),
        ready={side: common.Ready(1000.0, [[1]], [2], {}) for side in common.SIDES},
        records={
            "trl": [record(common, "trl", step, seconds=40.0, generation=15.0, training=24.0) for step in steps],
            "strop": [record(common, "strop", step) for step in steps],
        },
        **{
            "rates": {"2048 x 2048 x 2048": 200.0, "whole step, training shapes": 180.0},
            "shape": smol(common),
            "held_out": {"before": (0.1, 0.01)},
            "profile": None,
            **values,
        },
    )


def test_distinct_tokens_count_a_prompt_once(common: Any) -> None:
    step = record(common, "trl", 1)
    assert step.distinct_tokens == 1000
    assert step.other == pytest.approx(1.0)


def test_ratios_go_pair_by_pair(common: Any) -> None:
    trl = [record(common, "trl", 1, seconds=30.0), record(common, "trl", 2, seconds=50.0)]
    strop = [record(common, "strop", 1, seconds=10.0), record(common, "strop", 2, seconds=10.0)]
    assert common.pair_ratios(trl, strop, lambda step: step.seconds) == [3.0, 5.0]
    with pytest.raises(ValueError, match="same steps"):
        common.pair_ratios(trl, strop[:1], lambda step: step.seconds)


def test_ratios_per_token_take_out_the_sampled_lengths(common: Any) -> None:
    trl = [record(common, "trl", 1, seconds=40.0, sampled_tokens=1840)]
    strop = [record(common, "strop", 1, seconds=10.0)]
    assert common.pair_ratios(trl, strop, lambda step: step.seconds, per_token=True) == [2.0]


def test_neither_side_always_goes_first(common: Any) -> None:
    assert [common.order(pair)[0] for pair in range(4)] == ["trl", "strop", "trl", "strop"]


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1234.5, "1234"), (12.345, "12.3"), (0.012345, "0.0123"), (1.0, "1.00")])
def test_numbers_have_three_digits(common: Any, value: float, text: str) -> None:
    assert common.number(value) == text


def test_flops_of_one_layer_by_hand(common: Any) -> None:
    shape = common.ModelShape(layers=1, hidden=4, heads=2, kv_heads=1, head_size=2, intermediate=8, vocabulary=16)
    assert shape.layer_parameters == 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8
    found = common.training_flops(shape, tokens_read=10, head_rows=5, attention_pairs=7)
    assert found == 6 * shape.layer_parameters * 10 + 8 * 4 * 16 * 5 + 12 * 1 * 4 * 7


def test_the_shape_counts_the_parameters_of_the_real_architecture(common: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=24, num_attention_heads=3, num_key_value_heads=1, intermediate_size=40, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    shape = common.ModelShape(layers=2, hidden=24, heads=3, kv_heads=1, head_size=8, intermediate=40, vocabulary=64)
    matrices = [module.weight.numel() for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    assert shape.layer_parameters == sum(matrices)


def test_pairs_of_a_tree_are_those_of_its_mask(common: Any) -> None:
    # A prompt of 3 with completions of 2 and 4, and a second prompt of 1.
    assert common.tree_pairs([3, 2, 4, 1], [-1, 0, 0, -1]) == 6 + (2 * 3 + 3) + (4 * 3 + 10) + 1
    assert common.padded_pairs(2, 3) == 18


def test_operators_are_told_apart(common: Any) -> None:
    kinds = {
        "aten::addmm": "matrix products",
        "aten::mm": "matrix products",
        "mkldnn::_linear_pointwise": "matrix products",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::bmm": "attention",
        "aten::_softmax": "attention",
        "aten::_log_softmax": "softmax and reductions",
        "aten::_fused_adamw_": "optimizer",
        "aten::copy_": "casts and copies",
        "aten::index_select": "gather and scatter",
        "aten::exp_": "softmax and reductions",
        "aten::expand": "everything else",
        "aten::silu_backward": "elementwise",
    }
    assert {name: common.operator_kind(name) for name in kinds} == kinds
    assert list(common.by_kind({"aten::mul": 1.0, "aten::mm": 2.0, "aten::addmm": 3.0}).items()) == [
        ("matrix products", 5.0),
        ("elementwise", 1.0),
    ]


def test_laps_add_up(common: Any) -> None:
    laps = common.TurnTimer()
    with laps("a"):
        pass
    with laps("a"):
        pass
    seconds, parts = laps.stop()
    assert 0 <= parts["a"] <= seconds
    assert 0 <= laps.since("a") <= seconds
    assert laps.foreign() >= 0
    laps.start()
    assert laps.parts == {}


def test_memory_is_that_of_this_process(common: Any) -> None:
    assert 10 < common.memory() < 1_000_000
    assert common.memory("VmRSS") <= common.memory() + 1


def test_the_report_says_what_was_measured(common: Any, bench: Any) -> None:
    text = common.report(result(common, bench))
    assert "4.00 (4.00 to 4.00)" in text  # 40 s against 10 s
    assert "before 0.100 +- 0.010" in text
    assert "QUIET" not in text
    profiled = common.report(result(common, bench, profile=common.Profile({"training": {"aten::mm": 1.5}})))
    assert "matrix products 1.50" in profiled


def test_a_shared_machine_is_said_to_be_one(common: Any, bench: Any) -> None:
    found = result(common, bench)
    found.records["trl"][1] = replace(found.records["trl"][1], foreign=1.1)
    text = common.report(found)
    assert "NOT A QUIET MACHINE: other processes used up to 1.1 cores" in text
    assert "over the 2 of 3 pairs that nobody disturbed" in text


def test_everything_measured_is_json(common: Any, bench: Any) -> None:
    written = json.loads(json.dumps(common.as_json(result(common, bench))))
    assert written["ratios"]["seconds per step"]["as measured"]["median"] == 4.0
    assert len(written["steps"]["trl"]) == 3


def test_a_third_side_has_ratios_of_its_own(common: Any, bench: Any) -> None:
    found = result(common, bench)
    slower = [record(common, "trl_malloc", step, seconds=30.0) for step in (2, 3, 4)]
    found = replace(
        found,
        settings=settings(bench, trl_malloc=True),
        ready={side: common.Ready(1000.0, [[1]], [2], {}) for side in ("trl", "trl_malloc", "strop")},
        records={**found.records, "trl_malloc": slower},
    )
    assert [common.order(pair, found.settings.sides)[0] for pair in range(2)] == ["trl", "strop"]
    text = common.report(found)
    assert "TRL with Strop's malloc / Strop" in text and "3.00 (3.00 to 3.00)" in text
    assert common.as_json(found)["ratios_trl_malloc"]["seconds per step"]["as measured"]["median"] == 3.0


def test_the_same_work_is_checked_step_by_step(common: Any, bench: Any) -> None:
    asked = settings(bench, same_work=True)
    bench.check_work(record(common, "trl", 1, sampled_tokens=4 * 8 * 64), asked)
    with pytest.raises(common.SideFailed, match="the trl side sampled 2047 tokens in step 1, not 2048"):
        bench.check_work(record(common, "trl", 1, sampled_tokens=2047), asked)
    assert bench.parse(["--same-work"]).held_out == 0


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["aten::mm", "_TiledLogprobsBackward"], "output layer"),
        (["aten::mm", "MmBackward0"], "products of the layers"),
        (["aten::bmm", "aten::matmul"], "attention"),
        (["aten::mul", "MulBackward0"], "elementwise"),
        (["aten::copy_", "aten::to"], "elementwise"),
        (["graph_0_cpp_fused_add_mul_2"], "elementwise"),
        (["aten::_fused_adamw_"], "the rest"),
        (["aten::index_select"], "the rest"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operators_belong_to_parts_of_the_training_phase(common: Any, names: list[str], part: str) -> None:
    assert importlib.import_module("training_phase").part_of(names) == part


def test_trl_makes_one_optimizer_step_of_one_generation(bench: Any) -> None:
    whole = bench.trl_configuration(settings(bench))
    assert whole["per_device_train_batch_size"] == 32
    assert whole["gradient_accumulation_steps"] == whole["steps_per_generation"] == 1
    parts = bench.trl_configuration(settings(bench, trl_rows=8))
    assert parts["gradient_accumulation_steps"] == parts["steps_per_generation"] == 4
    assert not whole["bf16"]
    assert not whole["gradient_checkpointing"]
    assert bench.trl_configuration(settings(bench, dtype="bfloat16"))["bf16"]


def test_both_sides_are_configured_alike(bench: Any, tmp_path: Path) -> None:
    common_settings = settings(bench, model=str(tmp_path), folder=str(tmp_path), learning_rate=3e-6)
    strop = bench.strop_config(common_settings, str(tmp_path))
    trl = bench.trl_configuration(common_settings)
    kwargs = strop.policy.optimizer.kwargs
    assert kwargs["lr"] == trl["learning_rate"] == 3e-6
    assert kwargs["betas"] == [trl["adam_beta1"], trl["adam_beta2"]]
    assert kwargs["eps"] == trl["adam_epsilon"]
    assert kwargs["weight_decay"] == trl["weight_decay"]
    assert strop.policy.max_grad_norm == trl["max_grad_norm"]
    assert strop.loss_fn.reference_policy_kl_penalty == trl["beta"]
    assert strop.loss_fn.ratio_clip_min == strop.loss_fn.ratio_clip_max == trl["epsilon"]
    assert strop.policy.generation.max_new_tokens == trl["max_completion_length"]
    assert strop.policy.generation.temperature == trl["temperature"]
    assert strop.policy.scheduler is None
    assert strop.grpo.num_generations_per_prompt == trl["num_generations"]


def test_both_sides_get_the_same_prompts_in_the_same_order(bench: Any, tmp_path: Path) -> None:
    rows = bench.training_rows(settings(bench, model=str(tmp_path), folder=str(tmp_path)))
    assert len(rows) == 4 * (3 + 1)
    question = rows[0]["prompt"][0]["content"]
    left, right = (int(part) for part in question.removeprefix("What is ").partition("?")[0].split(" + "))
    assert left + right == int(rows[0]["answer"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--warmup", "0"],
        ["--completions", "1"],
        ["--trl-rows", "5"],
        ["--trl-bf16-weights"],
        ["--trl-malloc", "--trl-reuse-memory"],
    ],
)
def test_what_cannot_be_measured_is_refused(bench: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(arguments)
