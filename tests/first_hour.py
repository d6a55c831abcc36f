"""The first hour of README.md, line by line, with an installed wheel: ``python tests/first_hour.py INTERPRETER``.

The interpreter is that of an environment in which the wheel is installed; this script itself runs in the tests' environment. It works in an
empty folder, so nothing of the checkout is found by accident. The model is a tiny one under the name that README.md uses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")  # of the Python example, and of `strop init`
SHORT = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 2}
TINY = [
    "policy.precision=float32",
    "policy.device=cpu",
    "policy.max_total_sequence_length=480",
    "policy.generation.max_new_tokens=16",
]
SHORT_RUN = [*TINY, *(f"grpo.{key}={value}" for key, value in SHORT.items())]
ELSEWHERE = re.compile(r"^(#|pip |docker |strop view)")  # installing, an image, and a server that a test of the page starts


def main() -> int:
    interpreter = Path(sys.argv[1]).absolute()  # not resolved: a link in an environment is its interpreter
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        prepare(home)
        failed = [words for words in list_commands(home, interpreter) if not run(words, home, interpreter)]
    print(f"{len(failed)} failed" if failed else "the first hour works")
    return 1 if failed else 0


def prepare(home: Path) -> None:
    """Save the tiny model, and rows in the columns that are the default."""
    from support.models import build
    from support.tokenizer import build_tokenizer

    for model in MODELS:
        build("llama").save_pretrained(home / model)
        build_tokenizer().save_pretrained(home / model)
    rows = [{"problem": f"{a}+{b}", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def list_commands(home: Path, interpreter: Path) -> list[list[str]]:
    """Return the commands of README.md as it gives them, shortened, with what a reader of the pages tries next."""
    strop = str(interpreter.with_name("strop"))
    commands = [[strop, "--version"], [strop, "--help"]]
    for number, (language, text) in enumerate(BLOCK.findall((ROOT / "README.md").read_text())):
        if language == "python":
            short = f'grpo={SHORT}, policy={{"device": "cpu", "max_total_sequence_length": 480, "generation": {{"max_new_tokens": 16}}}}'
            assert 'grpo={"max_num_steps": 20}' in text
            (home / f"block_{number}.py").write_text(text.replace('grpo={"max_num_steps": 20}', short))
            commands.append([str(interpreter), f"block_{number}.py"])
        lines = text.splitlines() if language == "sh" else []
        for line in lines:
            if line and not ELSEWHERE.match(line):
                words = line.partition("#")[0].split()
                commands.append([strop, *words[1:], *{"grpo": SHORT_RUN, "sft": TINY[:-1]}.get(words[1], [])])
    commands += [
        [strop, "config"],
        [strop, "plot", "logs"],
        [strop, "algorithm", "check", "grpo"],
        [strop, "env", "check", "grpo.yaml"],
    ]
    return [
        *commands,
        [strop, "doctor", "logs/grpo"],
        [strop, "report", "logs/grpo"],
        [strop, "eval", "logs/grpo", "generation.max_new_tokens=4"],
    ]


def run(words: Sequence[str], home: Path, interpreter: Path) -> bool:
    """Run a command in the folder. Prints its time, and all that it wrote if it failed or warned of something deprecated."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": f"{interpreter.parent}:{os.environ['PATH']}"}
    start = time.monotonic()
    done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=600)
    failed = done.returncode != 0
    print(
        f"{'FAILED' if failed else 'ok':<7}{time.monotonic() - start:6.1f} s  {Path(words[0]).name} {' '.join(words[1:])}",
        flush=True,
    )
    if failed or "DeprecationWarning" in done.stderr:
        print(done.stdout[-4000:], done.stderr[-6000:], sep="\n")
    return not failed


if __name__ == "__main__":
    sys.exit(main())
