"""The shape of the code base: imports point one way, heavy ones stay where they belong, central files stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src"
PACKAGE = ROOT / "strop"

# Who may import whom: a part imports from earlier lines only. (docs/architecture.md draws the same picture.)
LAYERS: tuple[tuple[str, ...], ...] = (
    ("types", "metrics", "sampling", "stopping"),
    ("algorithms",),
    ("data",),
    ("environments", "models", "tracking", "config"),
    ("watch",),
    ("weights",),
    ("training", "generation"),
    ("rollouts",),
    ("checkpointing", "evaluation", "reports", "mismatch", "validation"),
    ("loop",),
    ("cluster",),
    ("assembly",),
    ("cli",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# Heavy imports and the only places (paths under src/strop) that may have them.
HEAVY: dict[str, tuple[str, ...]] = {
    "ray": ("distributed/ray.py",),
    "vllm": ("generation/vllm/",),
    "sglang": ("generation/sglang.py",),
    "megatron": ("training/megatron/", "generation/megatron.py"),
    "transformers": ("models/",),
    "safetensors": ("models/", "training/", "checkpointing/", "weights/"),
    "huggingface_hub": ("models/", "data/"),
    "datasets": ("data/",),
    "rich": ("tracking/", "watch/"),
    "wandb": ("tracking/",),
    "tensorboard": ("tracking/",),
    "torch.utils.tensorboard": ("tracking/",),
    "mlflow": ("tracking/",),
    "matplotlib": ("tracking/",),
    "pyarrow": ("tracking/", "data/"),
    "math_verify": ("environments/",),
    "reasoning_gym": ("environments/",),
    "omegaconf": ("config/",),
    "pydantic": ("config/", "environments/registry.py", "assembly/"),
}


@dataclass(frozen=True)
class Import:
    file: str  # under src/strop
    module: str  # who imports
    target: str  # what, as far as it is a module
    line: int
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in sources())


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for path, tree in sources().items() for found in _imports_of(path, tree))


def _imports_of(path: Path, tree: ast.Module) -> Iterator[Import]:
    file, module = str(path.relative_to(PACKAGE)), module_name(path)

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(file, module, name.name, child.lineno, lazy, typing)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}:{child.lineno} is a relative import; write the module's whole name"
                for name in child.names:
                    whole = f"{child.module}.{name.name}"
                    yield Import(file, module, whole if whole in modules() else str(child.module), child.lineno, lazy, typing)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, lazy or inside, typing or checking)

    yield from walk(tree, False, False)


def part(module: str) -> str:
    """strop.models.heads -> models"""
    return module.split(".")[1] if "." in module else module


def test_every_part_of_the_package_has_a_layer() -> None:
    found = {part(module) for module in modules()} - {"strop", "__main__"}
    assert found <= set(RANK), f"give {sorted(found - set(RANK))} a place in LAYERS"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{found.file}:{found.line}: {part(found.module)} may not import {found.target}"
        for found in imports()
        if found.target.startswith("strop.")
        and part(found.target) != part(found.module)
        and RANK[part(found.target)] >= RANK.get(part(found.module), len(LAYERS))
    ]
    assert not wrong, "\n".join(wrong)


def test_algorithms_know_torch_types_and_metrics_only() -> None:
    allowed = ("torch", "strop.types", "strop.metrics", "strop.algorithms", "strop")
    wrong = [
        f"{found.file}:{found.line}: {found.target}"
        for found in imports()
        if part(found.module) == "algorithms"
        and found.target.split(".")[0] not in sys.stdlib_module_names
        and not any(found.target == name or found.target.startswith(f"{name}.") for name in allowed[:4])
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_assembly_and_the_command_line_know_the_configuration() -> None:
    wrong = [
        f"{found.file}:{found.line}"
        for found in imports()
        if part(found.target) == "config"
        and found.target.startswith("strop")
        and part(found.module) not in ("config", "assembly", "cli")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_loop_knows_no_backend() -> None:
    """Backends, transports and placement never appear in the loop: it imports seams, not what is behind them."""
    behind = (
        "strop.generation",
        "strop.models",
        "strop.distributed",
        "strop.learner.torch",
        "strop.weight_sync.in_process",
        "torch.distributed",
    )
    wrong = [found.target for found in imports() if found.file == "loop.py" and found.target.startswith(behind)]
    assert not wrong


def test_heavy_imports_stay_inside_the_module_that_is_about_them() -> None:
    wrong = [
        f"{found.file}:{found.line}: {found.target} belongs in {' or '.join(places)}"
        for found in imports()
        for name, places in HEAVY.items()
        if (found.target == name or found.target.startswith(f"{name}.")) and not found.file.startswith(places)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Imports inside functions count: a circle hidden in a function is a circle."""
    edges: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if found.target in edges and found.target != found.module and not found.typing:
            edges[found.module].add(found.target)
    settled: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in settled:
            return
        for target in sorted(edges[module]):
            visit(target, (*path, module))
        settled.add(module)

    for module in sorted(edges):
        visit(module, ())


def _loaded_after(statement: str, *names: str) -> list[str]:
    code = f"import sys\n{statement}\nprint([name for name in {names!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    return list(ast.literal_eval(output))


def test_importing_strop_and_its_command_line_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "datasets", "pyarrow", "rich", "matplotlib", "wandb", "numpy", "pydantic", "omegaconf")
    assert _loaded_after("import strop, strop.cli", *heavy) == []


def test_a_mistake_in_a_configuration_is_found_without_torch() -> None:
    assert _loaded_after("import strop.config", "torch", "transformers", "datasets", "rich") == []


def test_types_and_algorithms_load_without_the_rest() -> None:
    assert (
        _loaded_after(
            "import strop.types, strop.algorithms.policy_gradient.advantages.grpo", "transformers", "pydantic", "datasets", "rich"
        )
        == []
    )


def test_help_answers_in_less_than_a_second() -> None:
    """The best of three, so that a busy machine does not matter."""
    best = 1e9
    for _ in range(3):
        started = time.perf_counter()
        output = subprocess.run([sys.executable, "-m", "strop.cli", "--help"], capture_output=True, text=True, timeout=60)
        best = min(best, time.perf_counter() - started)
        assert output.returncode == 0
        if best < 1.0:
            break
    assert best < 1.0, f"strop --help took {best:.2f} s"


def _lines(tree: ast.Module, name: str) -> int:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            assert node.end_lineno is not None
            return node.end_lineno - node.lineno + 1
    raise AssertionError(f"there is no function {name}")


def test_the_loop_fits_on_a_screen() -> None:
    assert _lines(sources()[PACKAGE / "loop.py"], "train") <= 60


def test_there_is_one_training_loop() -> None:
    found = [
        str(path.relative_to(PACKAGE))
        for path, tree in sources().items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "train"
    ]
    assert found == ["loop.py"]


@pytest.mark.parametrize("path", sorted((PACKAGE / "algorithms").glob("*.py")), ids=lambda path: path.name)
def test_an_algorithm_is_a_short_file(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


def test_nothing_but_the_command_line_and_the_console_prints() -> None:
    """Under ``if __name__ == "__main__"`` a file is a command too."""
    allowed = ("cli.py", "assembly/", "monitoring/console/console.py")
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in sources().items()
        if not str(path.relative_to(PACKAGE)).startswith(allowed)
        for statement in tree.body
        if not (isinstance(statement, ast.If) and "__main__" in ast.dump(statement.test))
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    empty = [
        str(path.relative_to(PACKAGE))
        for path, tree in sources().items()
        if tree.body and ast.get_docstring(tree) is None and path.name != "__init__.py"
    ]
    assert not empty, f"no docstring: {empty}"
