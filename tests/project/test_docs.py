"""What the README and the pages of docs/ say is there: paths, modules, links, commands, quoted code, examples."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from strop import algorithm_factory
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.config import TRAINING_RUNS, EvalRunConfig, GrpoRunConfig, load_config
from strop.config.load.load import load_any_kind
from strop.data.splitting import split_micro_batches
from strop.environments.base import Environment
from strop.environments.verifiers.base import Verifier
from strop.extensions.checks import env_command
from strop.extensions.checks.algorithm_command import make_algorithm_parser
from strop.extensions.checks.data_command import make_data_parser
from strop.extensions.code.sandbox.sandbox_command import make_sandbox_parser
from strop.extensions.comparison.compare_command import make_compare_parser
from strop.extensions.comparison.evaluation_comparison import check_options
from strop.extensions.curriculum.base import Curriculum
from strop.extensions.evaluation.eval_command import is_model_name, make_eval_parser
from strop.extensions.evaluation.evaluated_run import translate_overrides
from strop.extensions.export.export_command import make_export_parser
from strop.extensions.planning import plan_command
from strop.extensions.reading.reading_commands import make_plot_parser, make_rollouts_parser
from strop.extensions.recipes import translate_command
from strop.extensions.replay import replay_commands
from strop.extensions.serve.serve_command import make_serve_parser
from strop.extensions.view import view_command
from strop.runs.run_algorithm import make_run_algorithm
from strop.types import Group, Rollout, Task, Turn
from strop.user_code import import_attribute
from support.each import each
from support.rollouts import pack_for

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LOG = ROOT / "docs/log"
FOLDERS = "src|examples|docs|tests|benchmarks|constraints|.ci"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*[\w/]")
MODULE = re.compile(r"strop(?:\.\w+)+")
YAML_NAME = re.compile(r"# (\w+\.yaml)\n")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
ROOTS: dict[str, Any] = {**TRAINING_RUNS, "eval": EvalRunConfig}
SCRIPTS = {
    "examples/run_grpo.py": ("grpo", "examples/configs/grpo_math_1B.yaml"),
    "examples/run_grpo_math.py": ("grpo", "examples/configs/grpo_math_1B.yaml"),
    "examples/run_grpo_sliding_puzzle.py": ("grpo", "examples/configs/grpo_sliding_puzzle.yaml"),
    "examples/run_ppo.py": ("ppo", "examples/configs/ppo_math_1B.yaml"),
    "examples/run_sft.py": ("sft", "examples/configs/sft.yaml"),
    "examples/run_dpo.py": ("dpo", "examples/configs/dpo.yaml"),
    "examples/run_rm.py": ("rm", "examples/configs/rm.yaml"),
    "examples/run_distillation.py": ("distillation", "examples/configs/distillation_math.yaml"),
    "examples/run_eval.py": ("eval", "examples/configs/evals/eval.yaml"),
}


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as its reader has it after ``python examples/arithmetic_data.py`` and ``strop init``, which several commands need."""
    folder = tmp_path_factory.mktemp("workplace")
    for entry in ("examples", "docs", "src"):
        (folder / entry).symlink_to(ROOT / entry)
    script = [sys.executable, str(ROOT / "examples/arithmetic_data.py"), "--train", "20", "--validation", "5"]
    subprocess.run(script, cwd=folder, check=True, capture_output=True)
    for file in (ROOT / "examples" / "starters").iterdir():  # what `strop init` writes
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    for page in PAGES:
        for block in blocks(page, "yaml"):
            if named := YAML_NAME.match(block):
                (folder / named[1]).write_text(block)
    return folder


def root_of(block: str) -> Any:
    """What kind of run a block of YAML configures: by its own section, or by that of the file it is laid over."""
    text = block
    if found := re.search(r"^defaults: (\S+)", block, re.MULTILINE):
        text += (ROOT / found[1]).read_text()
    sections = re.findall(r"^(\w+):", text, re.MULTILINE)
    return next((TRAINING_RUNS[name] for name in sections if name in TRAINING_RUNS), GrpoRunConfig)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def named_examples() -> Iterator[tuple[Path, str, str]]:
    """(page, file name, code) of every Python block whose first line is ``# name.py``."""
    for page in PAGES:
        for block in blocks(page, "python"):
            if found := re.match(r"# (\w+\.py)\n", block):
                yield page, found[1], block


def commands() -> Iterator[tuple[Path, list[str]]]:
    """(page, words) of every ``strop`` and ``python examples/...`` line, continued lines joined."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["strop"] or (words[:1] == ["python"] and words[1:2] and words[1].startswith("examples/")):
                    yield page, words


# Entries of the log name what was there when they were written.
@each("page", [page for page in PAGES if page.parent != LOG], ids=name)
def test_paths_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text)) + " " + " ".join(blocks(page, "sh"))
    missing = sorted({path for path in PATH.findall(quoted) if not (ROOT / path).exists()})
    assert not missing, f"{name(page)} names {missing}"


@each("page", [page for page in PAGES if page.parent != LOG], ids=name)
def test_modules_and_attributes_named_on_a_page_exist(page: Path) -> None:
    quoted = " ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    missing = [module for module in sorted(set(MODULE.findall(quoted))) if not resolves(module)]
    assert not missing, f"{name(page)} names {missing}"


def resolves(dotted: str) -> bool:
    """Whether a name is that of a module, of what is in one, or of a group of entry points."""
    if dotted in entry_points().groups:
        return True
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def test_every_algorithm_and_part_has_a_row_in_a_table_of_its_family() -> None:
    families = {found for page in (ROOT / "docs/algorithms").glob("*.md") for found in names_in_rows(page)}
    missing = (set(algorithm_factory.all_algorithms()) | set(algorithm_factory.all_parts())) - families
    assert not missing, f"give {sorted(missing)} a row on a page of docs/algorithms"


def names_in_rows(page: Path) -> set[str]:
    """Every name of a table's row: its first cell is nothing but names in backticks."""
    cells = re.findall(r"^\| *(`\w+`(?:, `\w+`)*) *\|", page.read_text(), re.MULTILINE)
    return {found for cell in cells for found in re.findall(r"\w+", cell)}


@each("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{name(page)} links to {target}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@each("page", [page for page in PAGES if page.parent != LOG], ids=name)
def test_code_on_a_page_fits_the_site(page: Path) -> None:
    lines = [line for _, text in BLOCK.findall(page.read_text()) if "async def train(" not in text for line in text.splitlines()]
    assert not [line for line in lines if len(line) >= 95], "break lines of code before the 95th column"


def test_the_quoted_loop_is_the_loop() -> None:
    source = (ROOT / "src/strop/trainer/train.py").read_text()
    train = next(node for node in ast.parse(source).body if isinstance(node, ast.AsyncFunctionDef) and node.name == "train")
    assert train.end_lineno is not None
    written = "\n".join(source.splitlines()[train.lineno - 1 : train.end_lineno])
    quoted = [block for block in blocks(ROOT / "docs/architecture.md", "python") if "async def train" in block]
    assert quoted == [written + "\n"], "copy train() of src/strop/trainer/train.py into docs/architecture.md"


@each("page", PAGES, ids=name)
def test_checked_yaml_loads(page: Path, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    checked = [block for block in blocks(page, "yaml") if block.startswith("# checked\n") or YAML_NAME.match(block)]
    for number, block in enumerate(checked):
        file = tmp_path / f"{number}.yaml"
        file.write_text(re.sub(r"^defaults: ", f"defaults: {ROOT}/", block, flags=re.MULTILINE))
        load_config(file, root=root_of(block))


@each("page, words", commands(), ids=lambda found: f"{name(found[0])}: {' '.join(found[1])}")
def test_commands_name_configurations_that_load(
    page: Path, words: list[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    parsers = {
        "algorithm": make_algorithm_parser,
        "ledger": replay_commands.make_ledger_parser,
        "plot": make_plot_parser,
        "replay": replay_commands.make_parser,
        "report": view_command.make_report_parser,
        "rollouts": make_rollouts_parser,
        "translate": translate_command.make_parser,
        "view": view_command.make_parser,
    }
    if words[1] in parsers:
        parsers[words[1]]().parse_intermixed_args([word for word in words[2:] if word != ">"])
        return
    if "..." in words or words[1] in ("doctor", "config", "init", "--help"):
        return
    if words[0] == "python" and words[1] not in SCRIPTS:
        assert (ROOT / words[1]).is_file()
        return
    if words[1:3] == ["env", "check"]:
        options = env_command.make_env_parser().parse_intermixed_args(words[2:])
        load_any_kind(options.config, options.overrides)
        return
    if words[1] == "plan":
        planned = plan_command.make_parser().parse_intermixed_args(words[2:])
        load_any_kind(planned.config, planned.overrides)
        return
    if words[1:3] == ["data", "check"]:
        options = make_data_parser().parse_intermixed_args(words[2:])
        load_any_kind(options.config, options.overrides)
        return
    if words[1:3] == ["cluster", "check"]:
        named = words[3] == "--config"
        load_any_kind(Path(words[4]) if named else None, words[5 if named else 3 :])
        return
    if words[1] == "sandbox":
        make_sandbox_parser().parse_args(words[2:])
        return
    if words[1] in JOBS:
        check_job(words)
        return
    if words[1] == "compare":
        check_comparison(words[2:])
        return
    kind, config = SCRIPTS[words[1]] if words[0] == "python" else (words[1], None)
    rest = words[2:]
    if kind == "eval" and any(map(is_model_name, rest)) and "--config" not in rest:
        check_evaluation(rest)
        return
    rest = [f"generation.model_name={word}" if kind == "eval" and is_model_name(word) and "/" in word else word for word in rest]
    if "--config" in rest:
        place = rest.index("--config")
        config = rest[place + 1]
        del rest[place : place + 2]
    load_config(config, only_overrides(rest), root=ROOTS[kind])


ASSUMED = {"--assume-gpus": "cluster.gpus_per_node", "--assume-nodes": "cluster.num_nodes"}


def only_overrides(words: list[str]) -> list[str]:
    """Without --dry-run and -v; what is assumed as the keys that it stands for, and a variable of the shell as a number."""
    pairs = zip(["", *words], words, strict=False)
    found = [f"{ASSUMED[before]}={word}" if before in ASSUMED else word for before, word in pairs]
    return [re.sub(r"\$\w+", "1e-6", word) for word in found if word not in ("--dry-run", "-v", *ASSUMED)]


JOBS = {"export": make_export_parser, "serve": make_serve_parser}


def check_job(words: list[str]) -> None:
    """The options of ``strop export`` and ``serve`` are there."""
    end = min((words.index(word) for word in ("--", "&") if word in words), default=None)
    JOBS[words[1]]().parse_args(words[2:end])


def check_evaluation(words: list[str]) -> None:
    """The keys of ``strop eval RUN`` are those of a run."""
    given = make_eval_parser(None).parse_intermixed_args(words)
    translated = translate_overrides([text for text in given.overrides if not is_model_name(text)], section="grpo")
    load_config(None, ["policy.model_name=m", *translated.overrides], root=GrpoRunConfig, check=False)


def check_comparison(words: list[str]) -> None:
    given = make_compare_parser().parse_intermixed_args(words)
    check_options(given.metric, given.level, given.margin)
    assert len([text for text in given.overrides if is_model_name(text)]) == 2
    check_evaluation([text for text in given.overrides if not is_model_name(text)])


EXAMPLES = [pytest.param(*found, id=f"{found[0].stem}:{found[1]}") for found in named_examples()]


@pytest.mark.parametrize(("page", "file", "code"), EXAMPLES)
def test_examples_run(page: Path, file: str, code: str, tmp_path: Path) -> None:
    """Each file can be imported, and what it defines is named by a configuration as ``file.py:Class``."""
    path = tmp_path / file
    path.write_text(code)
    defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]
    for kind in defined:
        found = import_attribute(f"{path}:{kind}")
        if issubclass(found, Algorithm):
            trains_with(f"{path}:{kind}")
        else:
            kinds = (
                issubclass(found, Environment) and found().tasks,
                issubclass(found, Verifier) and found().score,
                issubclass(found, Curriculum) and found(tasks=()).choose,  # type: ignore[call-arg]
            )
            assert any(kinds)  # its page's own tests run it
    if not defined:
        assert import_attribute(f"{path}:__name__")


def trains_with(algorithm: str) -> None:
    """The configuration takes it, it gives credit, and its loss does not depend on how the batch is cut."""
    overrides = ["policy.model_name=none", "data.train.env_name=arithmetic", "env.arithmetic={}", f"algorithm.name={algorithm}"]
    made = make_run_algorithm(load_config(None, overrides, root=GrpoRunConfig, check=False).config)
    group = Group(index=0, environment="arithmetic", version=0, rollouts=tuple(rollout(place) for place in range(4)))
    batch = made.token_credit(pack_for([group], made))
    assert float(batch.advantages.abs().max()) > 0
    for column in made.requires:
        batch = batch.with_column(column, batch.rollout_logprobs.clone())

    def loss_of(budget: int) -> float:
        total = 0.0
        for part in split_micro_batches(batch, budget):
            logprobs = part.batch.rollout_logprobs.clone().requires_grad_()
            loss, logged = made.loss(TokenOutputs(logprobs, torch.ones_like(logprobs)), part.batch)
            loss.backward()
            assert logprobs.grad is not None and logprobs.grad.abs().sum() > 0 and "loss" in logged
            total += loss.item()
        return total

    assert loss_of(1) == pytest.approx(loss_of(10_000), abs=1e-6)


def rollout(place: int) -> Rollout:
    tokens = torch.arange(3 + place)
    logprobs = -0.1 * torch.arange(1.0, 4.0 + place)
    turn = Turn(author="policy", tokens=tokens, text="", logprobs=logprobs, versions=torch.zeros(3 + place, dtype=torch.int32))
    prompt = torch.tensor([1, 2])
    return Rollout(
        task=Task(id="t"), sample=place, seed=place, messages=(), prompt=prompt, turns=(turn,), reward=float(place % 2)
    )


@pytest.fixture
def quickstart() -> ModuleType:
    return importlib.import_module(import_attribute(f"{ROOT / 'examples' / 'quickstart.py'}:__name__"))


def test_the_quickstart_keeps_runs_with_other_settings_apart(quickstart: ModuleType) -> None:
    def folders(*arguments: str) -> tuple[str, str]:
        loaded = load_config(quickstart.CONFIG, quickstart.with_own_name(arguments), root=GrpoRunConfig, check=False).config
        return loaded.logger.log_dir, loaded.checkpointing.checkpoint_dir

    assert quickstart.with_own_name([]) == []
    assert folders("grpo.seed=2") == ("logs/quickstart-grpo.seed=2", "results/quickstart-grpo.seed=2")
    assert folders("grpo.seed=2", "checkpointing.resume=never") == folders("grpo.seed=2")
    assert folders("checkpointing.resume=never") == folders() == ("logs/quickstart", "results/quickstart")
    assert folders("grpo.seed=2", "logger.log_dir=logs/mine") == ("logs/mine", "results/quickstart-grpo.seed=2")
    assert folders("grpo.seed=2", "run_name=mine") == ("logs/mine", "results/mine")
    many = [f"grpo.{key}=1" for key in ("max_num_steps", "num_prompts_per_step", "num_generations_per_prompt", "seed")]
    assert folders(*many) != folders(*many[:3], "grpo.seed=2")


def test_the_quickstart_says_how_accuracy_and_answers_changed(quickstart: ModuleType, tmp_path: Path) -> None:
    def report(step: int, completion: str, accuracy: float) -> None:
        samples = [{"messages": [{"role": "user", "content": "What is 3 + 4?"}], "completion": completion, "accuracy": accuracy}]
        found = {"step": step, "metrics": {"accuracy": accuracy}, "tasks": [{"task": "3 + 4", "answer": "7", "samples": samples}]}
        (tmp_path / "validation" / f"step_{step:06d}.json").write_text(json.dumps(found))

    (tmp_path / "validation").mkdir()
    report(0, "3 + 4 = 8", 0.0)
    report(2, "7", 1.0)
    report(9, "of a run that went on longer", 0.0)
    steps = [
        {"step": 0, "validation/accuracy": 0.0},
        {"step": 1, "train/reward": 0.25, "train/token_mult_prob_error": 1.002, "timing/train/total_step_time": 60.0},
        {"step": 2, "train/reward": 0.75, "train/token_mult_prob_error": 1.001, "timing/train/total_step_time": 60.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    text = quickstart.summary(tmp_path)
    assert re.search(r"before\s+step\s+0\s+accuracy 0\.000", text) and re.search(r"after\s+step\s+2\s+accuracy 1\.000", text)
    assert "wrong  '3 + 4 = 8'" in text and "right  '7'" in text
    assert "2 steps in 2.0 minutes" in text and "1.0020" in text
    assert (tmp_path / "curves.png").exists() and str(tmp_path / "curves.png") in text
