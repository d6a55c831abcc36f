"""Does a GPU compute what it should: tests, with a row for each that fails, and whole runs of ``strop grpo``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from job import ROOT, Target, write_row
from models import save_model

COLUMNS = {  # of a step's row
    "train/loss": "loss",
    "train/grad_norm": "gradient norm",
    "timing/train/total_step_time": "s a step",
    "timing/train/generation": "s generation",
    "timing/train/policy_training": "s training",
    "timing/train/weight_sync": "s publish",
    "timing/train/offload": "s offload",
    "performance/generation_tokens_per_sec": "generated tokens/s",
}
MISMATCH = "train/token_mult_prob_error"
OF_THE_MACHINE = ("timing", "performance", "perf", "memory", "system", "time", "seconds", "tokens_per", "utilization")


# --- tests -----------------------------------------------------------------------------------------------------------------


class TestRows:
    """A plugin of pytest that writes a row for each failure when it happens, and one for all at the end."""

    def __init__(self, name: str) -> None:
        self.name, self.counts, self.began = name, {}, time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(report.longrepr if crash is None else crash.message).strip().splitlines() or [""]
            write_row(report.nodeid.partition("::")[2], f"failed: {reason[0]:.200}", ok=False)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            write_row(self.name, f"failed to import: {str(report.longrepr).strip().splitlines()[-1]:.200}", ok=False)

    def pytest_sessionfinish(self) -> None:
        found = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items())) or "no tests"
        write_row(self.name, found, f"{time.monotonic() - self.began:.0f} s", **self.counts)


def run_tests(target: Target, path: str, *options: str) -> None:
    import pytest

    name = " ".join([Path(path).stem, *options[1:]])
    simulated = ["--simulated-gpu"] if target.device == "sim" and path.startswith("tests/gpu") else []
    fixed = [*simulated, "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "--timeout=60", f"--rootdir={ROOT}"]
    pytest.main([*fixed, *options, str(ROOT / path)], plugins=[TestRows(name)])


# --- runs ------------------------------------------------------------------------------------------------------------------


def grpo(target: Target, name: str, *overrides: str) -> None:
    """A run of ``strop grpo`` with the embedded engine: a row for each step. Another than the plain one is compared with it."""
    _run_grpo(target, name, overrides)
    _compare_with_plain(target, name)


def resumed_grpo(target: Target) -> None:
    """A run that ends after its second step, and one that goes on from its checkpoint."""
    for steps in (2, 4):
        _run_grpo(target, "resumed", (f"grpo.max_num_steps={steps}", "checkpointing.enabled=true", "checkpointing.save_period=2"))
    _compare_with_plain(target, "resumed")


def _run_grpo(target: Target, name: str, overrides: Sequence[str]) -> None:
    from strop import cli

    settings = {**_settings(target, name), **dict(each.split("=", 1) for each in overrides)}
    if target.tiny and "policy.fp8.enabled" in settings:
        settings["policy.fp8.emulate"] = "true"  # there are no products in FP8
    ended = threading.Event()
    watching = threading.Thread(target=_write_steps, args=(target, name, ended))
    watching.start()
    try:
        code = cli.main(["grpo", *(f"{key}={value}" for key, value in settings.items())])
    finally:
        ended.set()
        watching.join()
    if code:
        raise RuntimeError(f"strop grpo ended with exit code {code}; its messages are in log.txt")


def _settings(target: Target, name: str) -> dict[str, Any]:
    prompt, completion, prompts, generations = (6, 8, 2, 2) if target.tiny else (256, 256, 16, 8)
    folder = _folder(target, name)
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / "prompts.jsonl"  # a character is a token
    asked = [{"input": f"{number:05}" + "why? " * (prompt // 5)} for number in range(prompts * 4)]
    questions.write_text("".join(json.dumps(each) + "\n" for each in asked))
    return {
        "policy.model_name": save_model("0.5B", target),
        "policy.device": "auto" if target.device == "sim" else target.device,
        "policy.precision": "bfloat16",
        "policy.max_total_sequence_length": 64 + prompt + completion,
        "policy.generation.backend": "torch",
        "policy.generation.max_new_tokens": completion,
        "policy.generation.torch_cfg.kv_cache_memory_gb": 2,  # several runs share the device
        "grpo.num_prompts_per_step": prompts,
        "grpo.num_generations_per_prompt": generations,
        "grpo.max_num_steps": 4,
        "grpo.max_num_epochs": 100,
        "grpo.val_period": 0,
        "data.train.dataset_name": questions,
        "data.train.input_key": "input",
        "data.train.env_name": "made_up",
        "env.made_up.reward": f"{Path(__file__).with_name('models.py')}:alternate",
        "checkpointing.enabled": "false",
        "checkpointing.checkpoint_dir": folder / "checkpoints",
        "logger.log_dir": folder / "logs",
        "logger.console": "plain",
    }


def _folder(target: Target, name: str) -> Path:
    return target.work / "grpo" / name.replace(" ", "-")


def _read_steps(target: Target, name: str) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step that is complete."""
    steps: dict[int, dict[str, Any]] = {}
    for file in sorted((_folder(target, name) / "logs").rglob("metrics.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n") and "step" in (found := json.loads(line)):
                steps.setdefault(found["step"], {}).update(found)
    return {step: found for step, found in sorted(steps.items()) if "timing/train/total_step_time" in found}


def _write_steps(target: Target, name: str, ended: threading.Event) -> None:
    """Write a row for each step while the run goes on."""
    written = set(_read_steps(target, name))
    while True:
        last = ended.wait(0.5)
        for step, found in _read_steps(target, name).items():
            if step in written:
                continue
            written.add(step)
            parts = [f"{title} {found[key]:.4g}" for key, title in COLUMNS.items() if isinstance(found.get(key), int | float)]
            mismatch = float(found.get(MISMATCH, float("nan")))
            numbers = {key: float(found[key]) for key in (*COLUMNS, MISMATCH) if isinstance(found.get(key), int | float)}
            write_row(f"GRPO, {name}, step {step}", f"mismatch {mismatch:.6f}", ", ".join(parts), **numbers)
        if last:
            return


def _compare_with_plain(target: Target, name: str) -> None:
    """Write how many numbers are others than those of the plain run. On a GPU two equal runs differ too: ``repeated`` says by how much."""
    plain, own = _read_steps(target, "plain"), _read_steps(target, name)
    if name == "plain" or not plain:
        return
    pairs = [
        (f"{key} of step {step}", plain[step][key], own[step][key])
        for step in sorted(plain.keys() & own.keys())
        for key in plain[step]
        if isinstance(own[step].get(key), int | float) and not any(word in key for word in OF_THE_MACHINE)
    ]
    changed = [f"{key}: {left:.6g} and {right:.6g}" for key, left, right in pairs if left != right]
    write_row(f"GRPO, {name} beside plain", f"{len(changed)} of {len(pairs)} numbers differ", ", ".join(changed[:3]))
