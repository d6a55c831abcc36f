"""``strop plan`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.cli.commands import main

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def model_config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["plan", *arguments, "--json"])
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if made["fits"] else 1)
    return made


def test_a_plan_has_the_memory_of_each_phase_of_a_layout_that_nobody_has(capsys, model_config):
    arguments = (str(CONFIGS / "grpo_math_8B.yaml"), "--hardware", "h100", "--model-config", str(model_config))
    small, large = (plan_json(capsys, *arguments, "--devices", count) for count in ("8", "1024"))

    assert {phase["phase"] for phase in small["memory"]} == {"generation", "logprobs", "training", "weight sync"}
    assert (small["training_devices"], large["training_devices"]) == (8, 1024)
    optimizer = [made["memory"][2]["parts_bytes"]["optimizer"] for made in (small, large)]
    assert optimizer[1] == pytest.approx(optimizer[0] / 128, rel=0.01)


def test_devices_are_in_nodes_of_the_configured_size_or_of_eight_and_the_plan_says_which(capsys, model_config):
    def assumed(*arguments: str) -> str:
        made = plan_json(capsys, *arguments, "--hardware", "h100", "--model-config", str(model_config))
        return next(each for each in made["assumptions"] if each.startswith("a node has"))

    config = str(CONFIGS / "grpo_math_8B.yaml")
    assert assumed(config, "cluster.gpus_per_node=4", "--devices", "12") == "a node has 4 GPUs (cluster.gpus_per_node)"
    alone = assumed(str(CONFIGS / "sft.yaml"), "--devices", "16")
    assert alone == "a node has 8 GPUs (the configuration is for one device, and says nothing of nodes)"
    assert main(["plan", config, "cluster.gpus_per_node=4", "--devices", "10"]) == 2
    assert "not a multiple of 4 GPUs of a node (cluster.gpus_per_node)" in capsys.readouterr().err


def test_teachers_and_a_critic_are_counted_with_sizes_of_their_own(capsys, model_config, tmp_path):
    def planned(config: str, *overrides: str) -> dict[str, Any]:
        arguments = ("--devices", "8", "--hardware", "h100", "--model-config", str(tmp_path / "small.json"))
        return plan_json(capsys, str(CONFIGS / config), *overrides, *arguments)

    def part(made: dict[str, Any], phase: str, name: str) -> float:
        return next(each["parts_bytes"].get(name, 0) for each in made["memory"] if each["phase"] == phase)

    (tmp_path / "small.json").write_text(
        json.dumps({**MODEL, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8})
    )
    alike = planned("distillation_math.yaml")
    larger = planned("distillation_math.yaml", f"teacher.model_name={tmp_path}")
    assert part(larger, "logprobs", "teacher") > 10 * part(alike, "logprobs", "teacher") > 0
    assert "the teacher is as large as the policy: the config.json of Qwen/Qwen3-4B is not here" in alike["assumptions"]
    assert not any("as large as the policy" in each for each in larger["assumptions"])
    apart = planned("distillation_math.yaml", f"teacher.model_name={tmp_path}", "teacher.hosts=2")
    assert part(apart, "logprobs", "teacher") == 0 < part(apart, "teacher", "weights")
    divided = planned("distillation_math_megatron.yaml", f"teacher.model_name={tmp_path}")
    assert part(divided, "logprobs", "teacher") == pytest.approx(part(apart, "teacher", "weights") / 4, rel=0.01), (
        "2 x 2 ranks share it"
    )

    alike = planned("ppo_math_1B.yaml", "policy.sequence_packing.train_mb_tokens=16384")
    larger = planned("ppo_math_1B.yaml", "policy.sequence_packing.train_mb_tokens=16384", f"value.model_name={tmp_path}")
    assert part(larger, "training", "critic") > 10 * part(alike, "training", "critic") > 0
    assert part(larger, "critic training", "gradients of the critic") > 10 * part(
        alike, "critic training", "gradients of the critic"
    )


def test_the_cpu_memory_of_a_node_is_a_row_and_does_not_fit_where_there_is_less(capsys, model_config):
    arguments = (str(CONFIGS / "grpo_math_8B.yaml"), "--hardware", "h100", "--model-config", str(model_config))
    two = ("--devices", "16")
    plain = plan_json(capsys, *arguments, *two)["node_memory"]
    assert plain["limit_bytes"] is None and plain["fits"] and set(plain["parts_bytes"]) == {"what leaves for the engines"}
    assert plan_json(capsys, *arguments, "--devices", "64")["node_memory"]["loading"], "then less leaves than is read at first"

    offloading = (
        "policy.dtensor_cfg.cpu_offload=true",
        "checkpointing.async_save=true",
        "policy.dtensor_cfg.activation_offload=true",
    )
    parts = plan_json(capsys, *arguments, *two, *offloading)["node_memory"]["parts_bytes"]
    assert {"weights, gradients and optimizer", "checkpoint", "activations"} <= set(parts)
    weights = 8.03e9
    assert parts["checkpoint"] == pytest.approx(weights * 4 * 3 / 2, rel=0.01)
    assert parts["weights, gradients and optimizer"] == pytest.approx(weights * 4 * 4 / 2, rel=0.01)

    assert main(["plan", *arguments, *two, "--node-memory", "16"]) == 1
    out = capsys.readouterr().out
    assert "CPU memory of a node: 59.8 GiB of 16  DOES NOT FIT" in out
    assert (
        "set         policy.offload=false: a node's CPU memory does not fit, and most of it is what leaves for the engines" in out
    )
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *arguments, *two, "--node-memory", "0"])
    assert "--node-memory takes a positive number" in capsys.readouterr().err
    started = plan_json(capsys, str(CONFIGS / "dpo.yaml"), "--devices", "8", *arguments[1:])["node_memory"]
    assert started["loading"] and set(started["parts_bytes"]) == {"policy, as it is loaded", "reference, as it is copied"}


def test_a_run_that_does_not_fit_exits_with_1_and_says_what_would(capsys, model_config):
    path = str(CONFIGS / "grpo_math_8B.yaml")
    made = plan_json(capsys, path, "--hardware", "rtx4090", "--devices", "1", "--model-config", str(model_config))

    assert not made["fits"]
    assert made["advice"]
    assert "does not fit" in made["breaks_first"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hardware", "h1000"), "there is no device 'h1000'"),
        (("--devices", "12"), "not a multiple of 8"),
        (("--model-config", "missing.json"), "missing.json"),
    ],
    ids=["hardware", "devices", "file"],
)
def test_what_cannot_be_planned_is_said_in_one_sentence(capsys, arguments, message):
    assert main(["plan", str(CONFIGS / "grpo_math_8B.yaml"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_disk_that_checkpoints_take_is_a_row(capsys, model_config):
    arguments = (str(CONFIGS / "grpo_math_8B.yaml"), "--devices", "8", "--model-config", str(model_config))
    weights = 8.03e9  # with a float32 weight and two float32 moments each
    for words, each, count in (
        (("grpo.max_num_steps=100", "checkpointing.save_period=10", "checkpointing.keep_top_k=3"), 12, 5),
        (("grpo.max_num_steps=20", "checkpointing.save_period=10", "checkpointing.keep_top_k=3"), 12, 2),
        (("grpo.max_num_steps=100", "checkpointing.save_period=10", "checkpointing.keep_top_k=null"), 12, 10),
        (("checkpointing.save_optimizer=false", "grpo.max_num_steps=100"), 4, 5),
        (("policy.weights_dtype=bfloat16", "grpo.max_num_steps=100"), 14, 5),  # bfloat16 weights and their masters
    ):
        disk = plan_json(capsys, *arguments, *words)["disk"]
        assert disk["checkpoint_bytes"] == pytest.approx(each * weights, rel=0.01) and disk["checkpoints"] == count, words
    assert main(["plan", *arguments, "grpo.max_num_steps=100"]) == 0
    assert "disk for checkpoints: 89.7 GiB each, at most 5 at a time: 448.7 GiB" in capsys.readouterr().out
    main(["plan", *arguments, "checkpointing.enabled=false"])
    assert "disk" not in capsys.readouterr().out


def test_a_plan_refuses_what_a_run_refuses_in_the_same_words(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4}\n"
        "policy:\n  model_name: m\n  max_total_sequence_length: 512\n  train_global_batch_size: 5\n"
        "data: {train: {dataset_name: on/another_machine.jsonl}}\nenv: {math: {}}\n"
    )
    assert main(["plan", str(file)]) == main(["grpo", "--config", str(file), "--dry-run", "--assume-gpus", "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("run.yaml, line 5: policy.train_global_batch_size: found 5, but a step has 8 prompts x 4") == 2
    assert "another_machine" not in said, "the data of other machines need not be here"
