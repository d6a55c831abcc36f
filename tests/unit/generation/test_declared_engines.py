"""An engine of a package that Strop does not know: ``policy.generation.backend`` names what it declares."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.declared_packages import declare, finding

TOY = '''
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from pydantic import Field
from strop.base_config import follows
from strop.generation.engine_config import EngineConfig
from strop.problems import Problem

class ToyConfig(EngineConfig):
    """The toy engine."""

    title: ClassVar[str] = "Toy"
    length_key: ClassVar[str] = "room"
    dtype: str = follows("...precision", standalone="float32", description="Data type.")
    room: int = follows("...max_total_sequence_length", standalone=64, description="Longest conversation (tokens).")
    size: int = Field(1, description="Ranks (GPUs).")

    @property
    def max_model_len(self) -> int:
        return self.room

    @property
    def engine_size(self) -> int:
        return self.size

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        if self.size > 1 and config.policy.generation.launched == "toy":
            yield Problem(f"{key}.size", f"found {self.size}, but a toy has one rank", "Set it to 1.")
'''
ENGINE = """
from dataclasses import dataclass
from strop.generation.engine_launch import EngineLaunch

@dataclass(frozen=True, kw_only=True)
class ToyLaunch(EngineLaunch):
    receivers = 3

    def check(self):
        if self.config.toy_kwargs:
            raise ValueError("a toy takes no further arguments")

class ToyEngine:
    launch_class = ToyLaunch

    def __init__(self, name, launch, tokenizer, *, stop_ids, vision=None):
        self.name, self.launch, self.stop_ids = name, launch, stop_ids
"""
POINTS = """
[strop.engines]
toy = toy_engine:ToyEngine

[strop.sections]
GenerationConfig.toy_cfg = toy_config:ToyConfig
GenerationConfig.toy_kwargs = toy_arguments:ToyArguments
"""
ARGUMENTS = """
from typing import Annotated, Any
from pydantic import Field
ToyArguments = Annotated[dict[str, Any], Field(default_factory=dict, description="Passed through.")]
"""
LOAD = """
import torch
from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.generation.launched_engines import find_engine, make_local_engines
from strop.openmp import openmp_variables

def load(*overrides, backend="toy"):
    base = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "policy.max_total_sequence_length=64"]
    return load_config(None, [*base, f"policy.generation.backend={backend}", *overrides], root=GrpoRunConfig)

def said(*overrides, backend="toy"):
    try:
        return [str(problem) for problem in load(*overrides, backend=backend).warnings]
    except ConfigError as error:
        return str(error)

def make(*overrides):
    config = load(*overrides).config.policy.generation
    launch = find_engine(config).launch_class(config=config, model="folder", on_cpu=True)
    return make_local_engines(launch, None, learner=torch.device("cpu"), stop_ids=(5,), threads=2)
"""


def run(folder: Path, code: str, points: str = POINTS) -> None:
    """Run code in a process that has the package of the toy."""
    for name, text in (("toy_config", TOY), ("toy_engine", ENGINE), ("toy_arguments", ARGUMENTS)):
        (folder / f"{name}.py").write_text(text)
    declare(folder, "toy", points)
    command = [sys.executable, "-c", LOAD + textwrap.dedent(code)]
    done = subprocess.run(command, env=finding(folder), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_package_brings_an_engine_with_its_section_its_rules_and_its_launch(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        assert "found 2, but a toy has one rank" in said("policy.generation.toy_cfg.size=2")
        assert "it must be one of auto, torch, vllm" in said(backend="toi") and "toy" in said(backend="toi")
        assert "policy.generation.toy_cfg.room" in said("policy.generation.toy_cfg.room=8")
        assert "does not publish to Toy" in said("policy.generation.quantization.format=fp8_block")
        assert "Toy does not report the experts" in said("policy.router_replay.enabled=true")
        unread = said("policy.generation.toy_cfg.size=2", backend="torch")
        assert any("torch does not read policy.generation.toy_cfg.size" in each for each in unread)
        first, second = make("policy.generation.toy_cfg.num_engines=2")
        assert (second.name, second.stop_ids, second.launch.receivers) == ("engine 1", (5,), 3)
        assert second.launch.environment == {"OMP_NUM_THREADS": "2", **openmp_variables()}
        try:
            make("policy.generation.toy_kwargs={a: 1}")
        except ValueError as error:
            assert "no further arguments" in str(error)
        else:
            raise AssertionError("its launch says what it cannot do")
        """,
    )


@pytest.mark.parametrize("points", [POINTS.partition("[strop.sections]")[0]])
def test_an_engine_without_a_section_is_refused_with_what_to_declare(tmp_path: Path, points: str) -> None:
    run(
        tmp_path,
        """
        from strop.user_code import UserCodeError
        try:
            load()
        except UserCodeError as error:
            assert "GenerationConfig.toy_cfg in strop.sections" in str(error), error
        else:
            raise AssertionError
        """,
        points,
    )
