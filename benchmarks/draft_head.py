"""Does a draft head that is trained beside the policy become right, and what does it cost on a CPU?

    python benchmarks/draft_head.py --steps 60 --json draft_head.json         # some minutes on one core

A tiny untrained model learns sums with GRPO, as in the quickstart but of numbers up to 3, once for each seed and kind of run: without
drafts, with tokens that are looked up, with a head that is trained (coupled, and with rejection sampling), and with a head that stays as it
begins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from loop.runs import metrics_of, overrides, strop, tiny_config
from loop.tiny import build_tiny

TORCH = "policy.generation.torch_cfg"
HEAD = {"policy.draft.enabled": True, f"{TORCH}.speculative_draft": 3}
KINDS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "lookup": {f"{TORCH}.speculative_lookup": 3},
    "trained head": {**HEAD, "policy.draft.head_lr": 0.003},
    "trained head, rejection": {**HEAD, "policy.draft.head_lr": 0.003, f"{TORCH}.speculative_sampling": "rejection"},
    "head as it begins": {**HEAD, "policy.draft.head_lr": 1e-12},
}
COLUMNS = {
    "accepted": "generation/acceptance_rate",
    "tokens per draft": "generation/tokens_per_draft",
    "overlap": "train/draft_acceptance",
    "head loss": "train/draft_loss",
    "reward": "train/reward",
    "generation, s": "timing/train/generation",
}


def run(kind: str, seed: int, steps: int, new_tokens: int) -> list[dict[str, float]]:
    """Train and return the columns of each step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = tiny_config(build_tiny(folder / "model", seed=seed)) | {
            "grpo.seed": seed,
            "grpo.max_num_steps": steps,
            "grpo.val_period": 0,
            "policy.generation.max_new_tokens": new_tokens,
            "checkpointing.enabled": False,
            "checkpointing.metric_name": None,
            "data.validation.env_name": ...,
            "data.validation.size": ...,
            **KINDS[kind],
        }
        outcome = strop("grpo", *overrides(settings), folder=folder, timeout=1800)
        assert outcome.code == 0, outcome.err
        lines = metrics_of(folder / "logs").values()
        return [{column: line[key] for column, key in COLUMNS.items() if key in line} for line in lines]


def mean_of(rows: list[dict[str, float]], column: str) -> float | None:
    values = [row[column] for row in rows if column in row]
    return statistics.mean(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[int, list[dict[str, float]]]] = {kind: {} for kind in options.kinds}
    for seed in options.seeds:
        for kind in options.kinds:
            rows = found[kind][seed] = run(kind, seed, options.steps, options.new_tokens)
            part = max(1, len(rows) // 6)
            for column in COLUMNS:
                first, last = mean_of(rows[:part], column), mean_of(rows[-part:], column)
                if first is not None and last is not None:
                    print(
                        f"seed {seed}, {kind}: {column}, first {part} steps {first:.3f}, last {part} steps {last:.3f}", flush=True
                    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
