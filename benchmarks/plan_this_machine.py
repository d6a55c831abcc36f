"""Steps of GRPO on this machine's CPU beside what ``strop plan`` computes for them, with the rates that it measures here.

    python benchmarks/plan_this_machine.py [--threads 2] [--steps 4] [--json FILE]

Models of several shapes with random weights answer with as many tokens as they may, with the embedded engine, and train on them. The rates
are measured before and after each run, and the steps after the first are compared by their median.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

from strop.data.sources.source import DataSource  # noqa: E402
from strop.environments.base import Environment, GeneratedTasks, reward  # noqa: E402
from strop.hardware.devices import Device  # noqa: E402
from strop.planning.plan_inputs import AverageLengths  # noqa: E402
from strop.planning.run_plan import RunPlan  # noqa: E402
from strop.types import Rollout, Task  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Letters(Environment[Task]):
    """Rewards letters, after a question of ``words`` words."""

    words: int = 8

    def tasks(self, data: DataSource) -> GeneratedTasks[Task]:
        text = " ".join(f"word{index}" for index in range(self.words))
        return GeneratedTasks(data.size or 10_000, lambda index: Task(id=str(index), question=f"{index} {text}"))

    @reward(weight=1.0, accuracy=True)
    async def letters(self, task: Task, rollout: Rollout) -> float:
        return rollout.text.count("a") / max(len(rollout.text), 1)


@dataclass(frozen=True, kw_only=True)
class MachineCase:
    """A run."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    key_value_heads: int
    vocabulary: int
    precision: str = "bfloat16"
    prompts: int = 4
    completions: int = 8
    tokens: int = 64  # of a completion
    words: int = 8  # of a question
    tokens_read: int = 2048  # of a micro-batch

    def __str__(self) -> str:
        return (
            f"{self.layers} x {self.hidden}, MLP {self.mlp}, vocabulary {self.vocabulary}, {self.precision}; {self.prompts} x "
            f"{self.completions} rollouts of {self.tokens} tokens"
        )


LLAMA_135M = {"layers": 30, "hidden": 576, "mlp": 1536, "heads": 9, "key_value_heads": 3, "vocabulary": 49152}
CASES = (
    MachineCase(layers=4, hidden=256, mlp=704, heads=4, key_value_heads=2, vocabulary=4096),
    MachineCase(layers=4, hidden=256, mlp=704, heads=4, key_value_heads=2, vocabulary=4096, precision="float32", completions=16),
    MachineCase(layers=8, hidden=512, mlp=1408, heads=8, key_value_heads=4, vocabulary=8192),
    MachineCase(layers=8, hidden=512, mlp=1408, heads=8, key_value_heads=4, vocabulary=8192, precision="float32", words=60),
    MachineCase(layers=12, hidden=768, mlp=2048, heads=12, key_value_heads=4, vocabulary=16384, tokens=128, completions=4),
    MachineCase(**LLAMA_135M, tokens=20, prompts=8),
    MachineCase(**LLAMA_135M, precision="float32", prompts=2),
)


@dataclass(frozen=True, kw_only=True)
class MachineStep:
    """Seconds of a step, measured and planned."""

    case: MachineCase
    measured: dict[str, float]
    planned: dict[str, float]

    def error(self, phase: str) -> float:
        return self.planned[phase] / self.measured[phase] - 1


def configure(case: MachineCase, model: Path, folder: Path, threads: int, steps: int) -> Any:
    from strop.config import TRAINING_RUNS, load_config

    settings: dict[str, Any] = {
        "policy.model_name": str(model),
        "policy.device": "cpu",
        "policy.num_threads": threads,
        "policy.precision": case.precision,
        "policy.max_total_sequence_length": 1024,
        "policy.sequence_packing.train_mb_tokens": case.tokens_read,
        "policy.generation.backend": "torch",
        "policy.generation.max_new_tokens": case.tokens,
        "data.train.env_name": "letters",
        "env.letters.type": f"{Path(__file__).resolve()}:Letters",
        "env.letters.words": case.words,
        "grpo.num_prompts_per_step": case.prompts,
        "grpo.num_generations_per_prompt": case.completions,
        "grpo.max_num_steps": steps,
        "grpo.max_num_epochs": None,
        "grpo.val_period": 0,
        "loss_fn.reference_policy_kl_penalty": 0.0,
        "checkpointing.enabled": False,
        "logger.log_dir": str(folder),
        "logger.console": "none",
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(None, overrides, root=TRAINING_RUNS["grpo"]).config


def save_model(case: MachineCase, folder: Path) -> Path:
    """Save a model with random weights, and a tokenizer that knows all of its tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from support.tokenizer import build_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.hidden, intermediate_size=case.mlp, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, num_key_value_heads=case.key_value_heads, tie_word_embeddings=True, eos_token_id=2,
        bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"t{index}a " if index % 2 else f"t{index} " for index in range(len(tokenizer), case.vocabulary)])
    tokenizer.save_pretrained(folder)
    return folder


def measure(case: MachineCase, threads: int, steps: int) -> MachineStep:
    """Run the steps of a case, and plan one of them with the lengths that its rollouts had."""
    from strop.build.training_run import run_training
    from strop.monitoring.trackers.jsonl import read_metrics
    from strop.planning.measured_machine import measure_machine

    with tempfile.TemporaryDirectory() as name:
        model = save_model(case, Path(name) / "model")
        config = configure(case, model, Path(name) / "logs", threads, steps)
        before = measure_machine(threads)
        if run_training(config):
            raise SystemExit(f"the run of {case} failed")
        device = _average(before, measure_machine(threads))
        lines = [line for _, line in read_metrics(Path(name) / "logs" / "metrics.jsonl")][1:]
        values = json.loads((model / "config.json").read_text())
    keys = {"generation": "generation", "training": "policy_training", "weight sync": "weight_sync", "step": "total_step_time"}
    measured = {phase: median(line.get(f"timing/train/{key}", 0.0) for line in lines) for phase, key in keys.items()}
    completion = median(line["train/mean_gen_tokens_per_sample"] for line in lines)
    rollouts = case.prompts * case.completions
    prompt = (median(line["train/tokens_read"] for line in lines) - rollouts * completion) / case.prompts
    made = plan(config, values, device, AverageLengths(prompt=prompt, completion=completion))
    seconds = {**made.seconds, "step": made.time.total}
    return MachineStep(case=case, measured=measured, planned={phase: seconds[phase.replace(" ", "_")] for phase in keys})


def plan(config: Any, values: dict[str, Any], device: Device, lengths: AverageLengths) -> RunPlan:
    from strop.build.dry_run.run_plan_inputs import read_inputs
    from strop.planning.make_plan import make_plan
    from strop.planning.model_size import ModelSize

    return make_plan(read_inputs(config, ModelSize.from_config("model", values), device, lengths))


def _average(first: Device, second: Device) -> Device:
    names = ("bf16_tflops", "fp32_tflops", "bandwidth_gb")
    return replace(first, **{name: (getattr(first, name) + getattr(second, name)) / 2 for name in names})


def make_table(found: Sequence[MachineStep]) -> Iterator[str]:
    phases = ("generation", "training", "step")
    yield "| run | " + " | ".join(f"{phase}, planned | measured | error" for phase in phases) + " |"
    yield "|---|" + "---|---|---|" * len(phases)
    for each in found:
        cells = (f"{each.planned[phase]:.2f} | {each.measured[phase]:.2f} | {each.error(phase):+.0%}" for phase in phases)
        yield f"| {each.case} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not counted")
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="by their numbers, from 0")
    parser.add_argument("--json", type=Path, help="also write the numbers to a file")
    options = parser.parse_args()
    found = [measure(CASES[number], options.threads, options.steps) for number in options.cases]
    print("\n".join(make_table(found)))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
