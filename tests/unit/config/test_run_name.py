"""``run_name`` names the folders of a run, and ``{overrides}`` in it makes a sweep one loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.load.run_name import LONGEST, format_overrides
from support.each import each


def folders(*overrides: str, file: Path | None = None) -> tuple[str | None, str, str]:
    given = [*([] if file else ["policy.model_name=m"]), *overrides]
    config = load_config(file, given, root=GrpoRunConfig, check=False).config
    return config.run_name, config.logger.log_dir, config.checkpointing.checkpoint_dir


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(
        "policy: {model_name: m}\nlogger: {log_dir: logs/mine}\ncheckpointing: {checkpoint_dir: '/big/${run_name}/steps'}\n"
    )
    return path


def test_a_name_names_both_folders_and_without_one_they_are_the_defaults() -> None:
    assert folders("run_name=first") == ("first", "logs/first", "results/first")
    assert folders() == (None, "logs", "results/grpo")


def test_a_folder_that_is_named_beside_the_name_stays_and_one_of_an_earlier_file_gives_way(file: Path) -> None:
    assert folders("run_name=a", "logger.log_dir=here/${run_name}") == ("a", "here/a", "results/a")
    assert folders("run_name=a", file=file) == ("a", "logs/a", "/big/a/steps"), "what contains the name stays too"
    file.write_text(file.read_text() + "run_name: b\n")
    assert folders(file=file) == ("b", "logs/mine", "/big/b/steps")
    assert folders("run_name=c", file=file) == ("c", "logs/c", "/big/c/steps")


def test_overrides_in_a_name_do_not_depend_on_their_order_and_leave_out_what_makes_no_other_run() -> None:
    given = ["grpo.seed=2", "+policy.precision=float32", "grpo.seed=3"]
    others = [
        "run_name=x",
        "logger.log_dir=y",
        "checkpointing.checkpoint_dir=z",
        "checkpointing.resume=never",
        "logger.console=plain",
    ]
    assert format_overrides([*given, *others]) == "grpo.seed=3-policy.precision=float32"
    assert format_overrides([*others, *given]) == format_overrides([given[1], given[2]])


@each(
    "swept",
    [
        ("policy.optimizer.kwargs.lr", "1e-6", "3e-6"),
        ("grpo.num_generations_per_prompt", "8", "16"),
        ("algorithm.objective.clip_high", "0.2", "0.28"),
    ],
)
def test_the_names_of_a_sweep_show_what_is_swept_beside_many_shared_settings(swept: tuple[str, str, str]) -> None:
    key, *values = swept
    shared = [
        "checkpointing.metric_name=null",
        "data.validation=null",
        "grpo.max_num_steps=2",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "policy.generation.max_new_tokens=256",
        "~policy.scheduler",
        "policy.train_global_batch_size=8",
    ]
    names = [format_overrides([*shared, f"{key}={value}"]) for value in values]
    for name, value in zip(names, values, strict=True):
        assert f"={value}" in name and len(name) <= LONGEST + 9
        assert all(f"={text.partition('=')[2]}" in name for text in shared if "=" in text)
    assert len(set(names)) == len(names) and names[0] == format_overrides([f"{key}={values[0]}", *reversed(shared)])


def test_a_name_that_is_no_folder_or_nothing_is_refused() -> None:
    for name, said in (
        ("../up", "write a relative path without .."),
        ("/root", "write a relative path"),
        ("{overrides}", "nothing is left"),
    ):
        with pytest.raises(ConfigError, match=f"run_name: (.|\n)*{said}"):
            folders(f"run_name={name}") if name != "{overrides}" else load_config(
                None, [f"run_name={name}"], root=GrpoRunConfig, values={"policy": {"model_name": "m"}}, check=False
            )
