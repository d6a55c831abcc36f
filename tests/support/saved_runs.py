"""Runs as they are left on disk, of every layout, without training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from strop.learner.parallel.sharded_checkpoint import take_snapshot
from strop.learner.parallel.single_device import save_weights
from strop.models.network import Network
from strop.sampling import Sampling
from support.learners import make_torch_learner
from support.lora import with_random_adapters

CONFIG = """
policy:
  model_name: {model}
  tokenizer: {{name: {model}}}
  max_total_sequence_length: 64
  precision: float32
  device: cpu
  num_threads: 1
  generation: {{max_new_tokens: 4, torch_cfg: {{kv_cache_memory_gb: 0.01}}}}
algorithm: {{name: grpo}}
grpo: {{seed: 3, max_val_samples: 6, max_num_steps: 4, max_num_epochs: null}}
data:
  max_input_seq_length: 60
  train: {{env_name: arithmetic}}
  validation: {{env_name: arithmetic, size: 8}}
env: {{arithmetic: {{max_operand: 3, wording: "{{expression}}="}}}}
checkpointing: {{checkpoint_dir: results/mine, metric_name: "val:accuracy"}}
logger: {{log_dir: logs/mine}}
"""


def save_run(
    root: Path, model_folder: Path, layout: str = "whole", *, config: str = CONFIG, steps: tuple[int, ...] = (2, 4)
) -> Path:
    """Write the log folder and the checkpoints of a run in ``root``, with weights of ``layout`` (whole, shards or adapters), each with
    its average; step 2 has the better metric. Return the log folder."""
    text = config.format(model=os.path.relpath(model_folder, root) if model_folder.is_relative_to(root) else model_folder)
    logs = root / "logs" / "mine"
    logs.mkdir(parents=True)
    (logs / "config.yaml").write_text(text)
    lines = [{"step": step, "validation/accuracy": 1 / step, "train/reward": 0.25} for step in steps]
    (logs / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in steps:
        checkpoint = root / "results" / "mine" / f"step_{step}"
        save_policy(checkpoint / "policy", model_folder, layout, seed=step)
        (checkpoint / "config.yaml").write_text(text)
        (checkpoint / "metric.json").write_text(json.dumps({"name": "validation/accuracy", "value": 1 / step, "step": step}))
    return logs


def save_policy(folder: Path, model_folder: Path, layout: str, *, seed: int) -> None:
    model = change_weights(load(model_folder), seed)
    if layout == "shards":
        learner = make_torch_learner(Network(model, precision=torch.float32), Sampling(), average_decay=0.9)
        take_snapshot(learner.parallelism, learner.state, copies=False).save(folder)
    else:
        if layout == "adapters":
            model = with_random_adapters(load(model_folder), base=str(model_folder), seed=seed)
        save_weights(model, folder / "weights")
        save_weights(model, folder / "ema")
    for name in ("weights", "ema"):
        tokenizer_of(model_folder).save_pretrained(folder / name)


def load(folder: Path) -> Any:
    from strop.models.loading import load_model

    return load_model(str(folder))


def tokenizer_of(folder: Path) -> Any:
    from strop.models.loading import load_tokenizer

    return load_tokenizer(str(folder))


def change_weights(model: Any, seed: int) -> Any:
    """Make a model differ from the one that was loaded, by step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model
