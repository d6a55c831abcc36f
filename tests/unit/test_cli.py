"""The ``strop`` command and the scripts of examples/."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from strop import __version__, cli
from strop.cli.commands import list_commands
from strop.cli.output import RunParser
from strop.config import GrpoRunConfig
from strop.config.schema.run_config import TRAINING_RUNS
from strop.stopping import RunStopped
from support.overrides import RUN

ROOT = Path(__file__).parents[2]


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A stand-in that notes what it was asked to run."""
    calls = SimpleNamespace(grpo=[], raises=None)

    def run_training(config: Any) -> int:
        calls.grpo.append(config)
        if calls.raises is not None:
            raise calls.raises
        return 0

    training: Any = ModuleType("strop.runs.train")
    training.run_training = run_training
    monkeypatch.setitem(sys.modules, training.__name__, training)
    yield calls


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"strop {__version__}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dryrun"], "unrecognized arguments: --dryrun; did you mean --dry-run?"),
        (["--max_num_steps", "5"], "--max_num_steps; settings are written key=value, such as grpo.max_num_steps=20"),
        (["--learning-rate=1e-5"], "settings are written key=value"),
    ],
)
def test_an_option_that_is_none_is_answered_with_what_was_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["grpo", *words])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("place", range(4))
def test_options_and_overrides_stand_in_any_order(assembly: SimpleNamespace, tmp_path: Path, place: int) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("grpo: {seed: 5}")
    words = [*RUN[:place], "--config", str(path), *RUN[place:]]
    assert cli.main(["grpo", *words]) == 0
    (config,) = assembly.grpo
    assert config.grpo.seed == 5 and config.policy.model_name == "m"


def test_a_dry_run_prints_the_configuration_and_what_would_run(
    assembly: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["grpo", *RUN, "--dry-run"]) == 0
    summary = capsys.readouterr().out
    assert summary.startswith("policy      m on ") and "folders     logs in logs" in summary and summary.count("\n") < 12
    assert cli.main(["grpo", *RUN, "--dry-run", "-v"]) == 0
    output = capsys.readouterr().out
    assert "model_name: m" in output and "objective clip(low=0.2, high=0.2)" in output and "folders     logs in logs" in output
    assert assembly.grpo == []


def test_a_warning_goes_to_stderr(assembly: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["grpo", *RUN, "cluster.roles.learner.num_cpus=2"]) == 0
    assert "warning: command line: cluster.roles.learner.num_cpus: it has no effect" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_continue(assembly: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assembly.raises = KeyboardInterrupt()
    assert cli.main(["grpo", *RUN]) == 130
    error = capsys.readouterr().err
    assert "results/grpo" in error and "strop grpo policy.model_name=m" in error


def test_a_run_that_was_told_to_end_says_why_and_how_to_continue(
    assembly: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assembly.raises = RunStopped("SIGTERM: the run ended after step 7.")
    assert cli.main(["grpo", *RUN]) == 143
    error = capsys.readouterr().err
    assert (
        "SIGTERM: the run ended after step 7. Start the same command again" in error and "strop grpo policy.model_name=m" in error
    )


def test_an_interrupted_run_without_checkpoints_says_so(assembly: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assembly.raises = KeyboardInterrupt()
    assert cli.main(["grpo", *RUN, "checkpointing.enabled=false"]) == 130
    assert "starts from the beginning" in capsys.readouterr().err


MINIMAL = {
    "grpo": ["data.train.env_name=arithmetic", "env.arithmetic={}"],
    "ppo": ["data.train.env_name=arithmetic", "env.arithmetic={}"],
    "distillation": ["data.train.env_name=arithmetic", "env.arithmetic={}", "teacher.model_name=t"],
    "sft": ["data.train.dataset_name=squad"],
    "dpo": ["data.train.dataset_name=HelpSteer3"],
    "rm": ["data.train.dataset_name=HelpSteer3"],
}


@pytest.mark.parametrize("section", TRAINING_RUNS)
def test_every_kind_of_training_is_a_command(assembly: SimpleNamespace, capsys: pytest.CaptureFixture[str], section: str) -> None:
    words = [section, "policy.model_name=m", *MINIMAL[section]]
    assert cli.main(words) == 0
    assert type(assembly.grpo[0]) is TRAINING_RUNS[section]
    assert cli.main([*words, "--dry-run"]) == 0
    assert "policy      m on " in capsys.readouterr().out and len(assembly.grpo) == 1
    assert cli.main([*words, f"{section}.max_num_stps=3"]) == 2
    assert f"Did you mean {section}.max_num_steps?" in capsys.readouterr().err
    assembly.raises = KeyboardInterrupt()
    assert cli.main(words) == 130
    assert f"strop {section} policy.model_name=m" in capsys.readouterr().err


def test_help_gives_each_command_one_line_of_80_columns_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for title, group in list_commands().items():
        found = lines[lines.index(f"{title}:") + 1 :][: len(group)]
        assert [line.split()[0] for line in found] == list(group) and all(len(line) <= 80 for line in found)


@pytest.mark.extensions
@pytest.mark.parametrize("script", ["run_grpo.py", "run_grpo_math.py"])
def test_a_training_script_is_strop_grpo_with_a_configuration(
    assembly: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.chdir(ROOT)
    path = f"examples/{script}"
    monkeypatch.setattr(sys, "argv", [path, "grpo.seed=3"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(path, run_name="__main__")
    (config,) = assembly.grpo
    assert isinstance(config, GrpoRunConfig)
    assert (config.policy.model_name, config.grpo.seed) == ("Qwen/Qwen2.5-1.5B", 3)


CLUSTER = ["cluster.num_nodes=2", "cluster.gpus_per_node=4", "policy.device=cpu"]


def test_a_dry_run_on_a_cluster_says_who_is_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["grpo", *RUN, *CLUSTER, "policy.dtensor_cfg.context_parallel_size=2", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "learner     8 ranks on 2 nodes: 1 copy x 4 shards x 2 context x 1 tensor" in output
    assert "engines     1 engine of 1 device on node 0" in output and "warning" not in output


@pytest.mark.parametrize(
    "given", [["check", "a.yaml", "k=1"], ["check", "--config", "a.yaml", "k=1"], ["check", "k=1", "--config=a.yaml"]]
)
def test_a_command_that_begins_with_a_configuration_takes_it_as_training_does(given: list[str]) -> None:
    parser = RunParser(prog="strop data", allow_abbrev=False)
    parser.add_argument("action")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(given)
    assert (options.action, options.config, options.overrides) == ("check", Path("a.yaml"), ["k=1"])
