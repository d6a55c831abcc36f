"""Runs whose rows a class or a function of the user makes: to train on, to validate on, and in environments of other processes."""

from __future__ import annotations

from pathlib import Path

from loop.runs import grpo, metrics_of, strop

CODE = """
def sums(split="train", *, purpose):
    first = 0 if purpose == "train" else 40
    return [{"problem": f"{n}+1=", "answer": str(n + 1)} for n in range(first, first + 8)]


class Chats:
    def __init__(self, count, **kwargs):
        talks = [(f"{n}+1?", str(n + 1)) for n in range(count)]
        self.dataset = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in talks]
        self.val_dataset = self.dataset[:2]
"""


def test_rollouts_of_rows_that_a_function_makes(tiny_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    rows = {"dataset_name": "mine.py:sums", "env_name": "math"}
    sources = {f"data__{part}__{key}": value for part in ("train", "validation") for key, value in rows.items()}
    outcome = grpo(
        tiny_model_folder, tmp_path, **sources, env__math__verifier="exact", data__validation__size=4, grpo__max_num_steps=1
    )
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    assert 1 in metrics and any(name.startswith("validation/") for name in metrics[1])


def test_a_class_is_learned_from_as_its_file(tiny_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    common = [
        f"policy.model_name={tiny_model_folder}",
        "policy.max_total_sequence_length=64",
        "policy.train_global_batch_size=4",
        "policy.device=cpu",
        "policy.num_threads=1",
        "data.train.dataset_name=mine.Chats",
        "data.train.dataset_kwargs.count=8",
        "data.validation={dataset_name: mine.Chats, dataset_kwargs: {count: 8}}",
        "sft.max_num_steps=2",
        "sft.val_period=1",
        "checkpointing.enabled=false",
        "logger.log_dir=logs",
        "logger.console=none",
    ]
    outcome = strop("sft", *common, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert metrics_of(tmp_path / "logs")[2]["validation/examples"] == 2
