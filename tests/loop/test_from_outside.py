"""A new algorithm and a new environment, each one file outside the package: the examples of the docs, trained with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loop.runs import grpo, metrics_of
from strop.monitoring.rollout_store.rollout_store import RolloutStore

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


def examples(page: str) -> dict[str, str]:
    """The Python blocks of a page by the file name in their first line."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


def trained(tiny: Path, folder: Path, page: str, file: str, **changes):
    """A run with one example of the docs in its folder; its metrics and rollouts."""
    (folder / file).write_text(examples(page)[file])
    outcome = grpo(tiny, folder, **changes)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(folder / "logs")
    assert list(metrics) == [1, 2, 3]
    return metrics, list(RolloutStore(folder / "logs").read_all())


@pytest.mark.parametrize(
    ("file", "name", "kwargs", "tag"),
    [("max_rl.py", "MaxRL", {"floor": 0.1}, "train/ratio_capped"), ("brief.py", "Brief", {"price": 0.5}, "train/kl_penalty")],
)
def test_the_algorithm_of_the_docs_trains(tiny, tmp_path, file, name, kwargs, tag):
    metrics, records = trained(
        tiny,
        tmp_path,
        "algorithms/custom.md",
        file,
        **{"algorithm.name": f"{file}:{name}", "algorithm.kwargs": kwargs, "grpo.max_num_steps": 3, "grpo.update_epochs": 2},
        **{"loss_fn.reference_policy_kl_penalty": 0.01 if tag == "train/kl_penalty" else 0.0},
    )
    assert all(tag in line and line["train/grad_norm"] > 0 for line in metrics.values())
    rewards: dict[int, list[float]] = {}
    for record in records:
        rewards.setdefault(record.group, []).append(record.reward)
    for record in records:
        mean = sum(rewards[record.group]) / 8
        if name == "MaxRL" and record.kept:
            assert record.advantage == pytest.approx((record.reward - mean) / max(mean, 0.1), rel=1e-5)
            assert 0 < mean < 1, "groups that do not vary were dropped"
    if name == "Brief":
        idle = [record for record in records if sum(rewards[record.group]) == 0]
        longest = {group: max(len(r.tokens) for r in idle if r.group == group) for group in {r.group for r in idle}}
        assert idle
        for record in idle:
            assert record.advantage == pytest.approx(-0.5 * len(record.tokens) / longest[record.group], rel=1e-5)
