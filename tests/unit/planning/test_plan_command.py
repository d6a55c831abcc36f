"""``strop plan`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.cli.commands import main
from strop.planning import measured_machine

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


def test_a_plan_has_memory_time_and_cost_of_a_layout_that_nobody_has(capsys, model_config):
    arguments = (
        str(CONFIGS / "grpo_math_8B.yaml"),
        "grpo.max_num_steps=100",
        "--hardware",
        "h100",
        "--model-config",
        str(model_config),
        "--no-choices",
    )
    small, large = (plan_json(capsys, *arguments, "--devices", count, "--price", "2") for count in ("8", "1024"))

    assert {phase["phase"] for phase in small["memory"]} == {"generation", "logprobs", "training", "weight sync"}
    assert (small["training_devices"], large["training_devices"]) == (8, 1024)
    assert large["seconds"]["training"] < small["seconds"]["training"] / 50
    assert small["cost"]["price"] == pytest.approx(2 * small["cost"]["device_hours"])
    assert small["cost"]["device_hours"] == pytest.approx(8 * 100 * small["seconds"]["step"] / 3600)


def test_devices_are_in_nodes_of_the_configured_size_or_of_eight_and_the_plan_says_which(capsys, model_config):
    def assumed(*arguments: str) -> str:
        made = plan_json(capsys, *arguments, "--hardware", "h100", "--model-config", str(model_config), "--no-choices")
        return next(each for each in made["assumptions"] if each.startswith("a node has"))

    config = str(CONFIGS / "grpo_math_8B.yaml")
    assert assumed(config, "cluster.gpus_per_node=4", "--devices", "12") == "a node has 4 GPUs (cluster.gpus_per_node)"
    alone = assumed(str(CONFIGS / "sft.yaml"), "--devices", "16")
    assert alone == "a node has 8 GPUs (the configuration is for one device, and says nothing of nodes)"
    assert main(["plan", config, "cluster.gpus_per_node=4", "--devices", "10"]) == 2
    assert "not a multiple of 4 GPUs of a node (cluster.gpus_per_node)" in capsys.readouterr().err


def test_a_run_that_does_not_fit_exits_with_1_and_says_what_would(capsys, model_config):
    path = str(CONFIGS / "grpo_math_8B.yaml")
    made = plan_json(capsys, path, "--hardware", "rtx4090", "--devices", "1", "--model-config", str(model_config))

    assert not made["fits"]
    assert made["advice"]
    assert "does not fit" in made["breaks_first"]


def test_text_names_every_phase_and_what_was_assumed(capsys, model_config, tmp_path):
    picture = tmp_path / "plan.png"
    arguments = ["--hardware", "h100", "--devices", "8", "--model-config", str(model_config), "--picture", str(picture)]

    assert main(["plan", str(CONFIGS / "sft.yaml"), *arguments]) == 0
    text = capsys.readouterr().out
    assert "training" in text
    assert "generation" not in text.split("\n\n")[1]
    assert "tokens on average (--completion-tokens)" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


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


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(measured_machine, "SECONDS", 0.01)
    monkeypatch.setattr(measured_machine, "SIDE", 128)
    device = measured_machine.measure_machine(threads=1)

    assert device.measured
    assert device.fp32_tflops > 0
    assert device.bandwidth_gb > 0
