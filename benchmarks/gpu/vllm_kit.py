"""vLLM for this card, from a folder that is no part of Strop: its packages, its patch for Strop, and its checks, in a copy of the checkout.

The copy has a Python environment of its own, over this one, so that nothing else here finds this vLLM.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from job import ROOT, Target, write_row

COPIED = ("src", "tests", "benchmarks")
STEP_KEYS = ("train/loss", "timing/train/total_step_time", "timing/train/generation", "timing/train/weight_sync")
LIBRARIES = (
    "import torch, vllm, vllm._C_stable_libtorch, vllm.vllm_flash_attn._vllm_fa3_C; print('vLLM', vllm.__version__, 'loads')"
)


def unpack(target: Target) -> None:
    """Lay out the copy of the checkout and the environment; do the trimmed libraries load?"""
    started = time.monotonic()
    assert target.kit is not None
    checkout, environment = target.work / "vllm-checkout", target.work / "vllm-environment"
    for folder in COPIED:
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    for script in target.kit.glob("*.py"):
        shutil.copy(script, checkout)
    for patch in sorted(target.kit.glob("*.diff")):
        subprocess.run(["patch", "-p1", "-i", str(patch)], cwd=checkout, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "base.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
    command = ["sh", str(target.kit / "unpack.sh"), str(target.kit), str(checkout), str(target.work / "vllm-site")]
    subprocess.run(command, env=_variables(target), check=True)
    program = f"import torch, vllm{'' if target.tiny else LIBRARIES}; print('vLLM', vllm.__version__)"
    said = [line for line in _run(target, "-c", program) if line.startswith("vLLM ")]
    note = f"{'imported' if target.tiny else 'its libraries load'}, {time.monotonic() - started:.0f} s"
    write_row("vLLM of the kit", *((said[0], note) if said else ("failed: it does not load", "log.txt says why")), ok=bool(said))


def check_engine(target: Target, mode: str) -> None:
    """The kit's check of Strop's engine: each part that is done or failed, and what it measured, is a row."""
    for line in _run(target, "vllm_engine_check.py", "--modes", mode, "--log", "--folder", str(target.work / "vllm-model")):
        if part := re.match(r"\[(.+)\] (done|FAILED)(.*)", line):
            write_row(f"vLLM, {part[1]}", f"{part[2].lower()}{part[3]:.200}", ok=part[2] == "done")
        elif measured := re.match(r"  ([^|:]{1,60}): (.+)", line):
            write_row(f"vLLM, {mode}, {measured[1].strip()}", f"{measured[2]:.200}")


def check_grpo(target: Target) -> None:
    """The kit's colocated run of ``strop grpo``: the mismatch of each step."""
    folders = ("--folder", str(target.work / "vllm-grpo-model"), "--runs", str(target.work / "vllm-grpo"))
    for line in _run(target, "vllm_grpo_check.py", "--size", "0.4", "--limit", "120", *folders):
        if line.startswith("{") and "train/token_mult_prob_error" in line:
            step = ast.literal_eval(line)
            note = ", ".join(f"{key.rpartition('/')[2]} {step[key]}" for key in STEP_KEYS if key in step)
            write_row(f"vLLM, GRPO, step {step.get('step')}", f"mismatch {step['train/token_mult_prob_error']:.6f}", note)
        elif line.startswith("ended with"):
            write_row("vLLM, GRPO", line, ok=line.startswith("ended with 0 "))


def run_tests(target: Target) -> None:
    """``tests/gpu/test_gpu_vllm.py`` of the copy."""
    lines = list(_run(target, "-m", "pytest", "-v", "-rfE", "--tb=short", "-m", "gpu", "tests/gpu/test_gpu_vllm.py"))
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            write_row(f"vLLM, {line.partition('::')[2]:.150}", "failed", ok=False)
    if lines:
        write_row("vLLM, test_gpu_vllm", lines[-1].strip("= "))


def _variables(target: Target) -> dict[str, str]:
    environment = target.work / "vllm-environment"
    return {
        **os.environ,
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "src:tests",
        "VLLM_HOST_IP": "127.0.0.1",
    }


def _run(target: Target, *arguments: str) -> Iterator[str]:
    """Yield the lines of a command of the copy's Python, which are logged too."""
    python, checkout = target.work / "vllm-environment" / "bin" / "python", target.work / "vllm-checkout"
    if target.tiny and arguments[0] != "-c":
        write_row("vLLM", "not run: it needs a GPU", arguments[0])
        return
    if not checkout.exists():
        raise RuntimeError("the kit was not unpacked: the job that does it comes first")
    process = subprocess.Popen(
        [str(python), *arguments],
        cwd=checkout,
        env=_variables(target),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout or ():
        print(line, end="", flush=True)
        yield line.rstrip("\n")
    process.wait()
