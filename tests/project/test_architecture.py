"""The shape of the code base: imports point one way, heavy ones stay where they belong, names of classes are used once."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from support.source_trees import PACKAGE, parse_package, walk, without_collecting

ROOT = Path(__file__).parents[2] / "src"

# Who may import whom: a room imports from earlier lines only. (docs/architecture.md draws the same picture.)
LAYERS: tuple[tuple[str, ...], ...] = (
    ("endings", "lazy_torch", "safety", "thoughts", "device_copies", "determinism", "openmp"),
    ("columns",),
    (
        "types",
        "metrics",
        "sampling",
        "stopping",
        "problems",
        "packages",
        "gpus",
        "user_code",
        "plugins",
        "statistics",
        "hardware",
    ),
    ("plugins",),
    ("base_config", "storage"),
    ("algorithms",),
    ("algorithm_factory",),
    ("data",),
    ("models", "monitoring", "tools"),
    ("environments", "weight_sync"),
    ("learner", "generation"),
    ("rollouts",),
    ("checkpointing",),
    ("trainer",),
    ("distributed",),
    ("config",),
    ("runs",),
    ("results",),
    ("cli", "api"),
    ("extensions",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# Heavy imports and the only places (paths under src/strop) that may have them.
HEAVY: dict[str, tuple[str, ...]] = {
    "ray": ("distributed/",),
    "vllm": ("generation/vllm/",),
    "sglang": ("extensions/sglang/",),
    "megatron": ("extensions/megatron/",),
    "transformers": ("models/", "extensions/export/", "extensions/labs/", "extensions/performance/"),
    "torchao": ("models/quantization/",),
    "safetensors": (
        "models/",
        "learner/",
        "checkpointing/",
        "weight_sync/",
        "extensions/export/",
        "extensions/megatron/",
        "extensions/labs/",
        "extensions/recorded/",
    ),
    "huggingface_hub": ("models/", "data/", "extensions/labs/"),
    "datasets": ("data/", "api.py"),  # api.py names its type
    "pandas": ("monitoring/", "results.py", "data/"),
    "rich": ("monitoring/", "extensions/checks/", "extensions/reading/"),
    "wandb": ("extensions/trackers/",),
    "tensorboard": ("extensions/trackers/",),
    "torch.utils.tensorboard": ("extensions/trackers/",),
    "mlflow": ("extensions/trackers/",),
    "swanlab": ("extensions/trackers/",),
    "trackio": ("extensions/trackers/",),
    "pynvml": ("extensions/performance/",),
    "matplotlib": (
        "extensions/checks/",
        "extensions/reading/",
        "extensions/trackers/",
        "results.py",
    ),  # results.py names its type
    "pyarrow": ("monitoring/", "data/", "extensions/view/", "extensions/replay/"),
    "math_verify": ("extensions/math/",),
    "reasoning_gym": ("extensions/adapters/",),
    "gymnasium": ("extensions/adapters/",),
    "textarena": ("extensions/adapters/",),
    "verifiers": ("extensions/adapters/",),
    "nemo_gym": ("extensions/adapters/",),
    "lm_eval": ("extensions/adapters/",),
    "omegaconf": ("config/", "extensions/adapters/"),
    "pydantic": (
        "*_config.py",
        "config/",
        "environments/verifiers/base.py",
        "algorithm_factory.py",
        "tools/tool_options.py",
    ),
    "mcp": ("extensions/tools/mcp_tools.py",),
}


# A module or class named in a string: "strop.extensions.math.math_environment:MathEnvironment", or a target of importlib.
NAMED = re.compile(r"strop(?:\.\w+)+(?::\w+)?")


@dataclass(frozen=True)
class Import:
    file: str  # under src/strop
    module: str  # who imports
    target: str  # what, as far as it is a module
    line: int


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


sources = cache(parse_package)


@pytest.fixture(scope="module", autouse=True)
def trees_are_not_kept() -> Iterator[None]:
    with without_collecting():
        yield
    sources.cache_clear()


@cache
def modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in sources())


@cache
def imports() -> tuple[Import, ...]:
    """Every import: at the top, inside functions, under ``TYPE_CHECKING``, and modules that are named in strings."""
    return tuple(found for path, tree in sources().items() for found in _imports_of(path, tree))


def _imports_of(path: Path, tree: ast.Module) -> Iterator[Import]:
    file, module = str(path.relative_to(PACKAGE)), module_name(path)
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(file, module, name.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import; write the module's whole name"
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield Import(file, module, whole if whole in modules() else str(node.module), node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            yield Import(file, module, longest_module(node.value.partition(":")[0]), node.lineno)


def longest_module(dotted: str) -> str:
    """``strop.types.Group`` -> ``strop.types``"""
    while dotted not in modules():
        dotted = dotted.rpartition(".")[0]
    return dotted


def room(module: str) -> str:
    """``strop.models.network`` -> ``models``"""
    return module.split(".")[1] if "." in module else module


def internal_imports() -> Iterator[Import]:
    return (found for found in imports() if found.target.startswith("strop.") and found.target != found.module)


def test_core_never_imports_an_extension() -> None:
    wrong = {
        found.file for found in internal_imports() if room(found.target) == "extensions" and room(found.module) != "extensions"
    }
    assert not wrong


def test_every_room_has_a_layer() -> None:
    found = {room(module) for module in modules()} - {"strop", "__main__"}
    assert found == set(RANK), f"give {sorted(found ^ set(RANK))} a place in LAYERS, or take it out"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{found.file}:{found.line}: {room(found.module)} may not import {found.target}"
        for found in internal_imports()
        if room(found.target) != room(found.module) and RANK[room(found.target)] >= RANK.get(room(found.module), len(LAYERS))
    ]
    assert not wrong, "\n".join(wrong)


def find_cycle(edges: Mapping[str, set[str]]) -> str:
    """The first cycle of a graph, as ``a -> b -> a``; empty where there is none."""
    settled: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> str:
        if name in path:
            return " -> ".join((*path[path.index(name) :], name))
        if name in settled:
            return ""
        for target in sorted(edges.get(name, ())):
            if cycle := visit(target, (*path, name)):
                return cycle
        settled.add(name)
        return ""

    return next((cycle for name in sorted(edges) if (cycle := visit(name, ()))), "")


def test_files_do_not_import_each_other_in_cycles() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for found in internal_imports():
        if found.target in modules():
            edges[found.module].add(found.target)
    assert not find_cycle(edges)


def test_folders_beside_each_other_do_not_import_each_other_in_cycles() -> None:
    """Rooms, and the folders of one room among themselves. A room's own files and its folders may know each other."""
    edges: dict[str, set[str]] = defaultdict(set)
    for found in internal_imports():
        ours, theirs = folder(found.module), folder(found.target)
        shared = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if shared is not None:
            edges[".".join(ours[: shared + 1])].add(".".join(theirs[: shared + 1]))
    assert not find_cycle(edges)


@cache
def packages() -> frozenset[str]:
    """The modules that have others in them."""
    return frozenset(module.rpartition(".")[0] for module in modules())


@cache
def folder(module: str) -> tuple[str, ...]:
    """The folders that a module lies in: ``("strop", "models")`` for ``strop.models.network``."""
    parts = tuple(module.split("."))
    return parts if module in packages() else parts[:-1]


def test_no_two_classes_have_one_name() -> None:
    """Private ones may: nobody outside their file speaks of them."""
    where: dict[str, list[str]] = defaultdict(list)
    for path, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: files for name, files in where.items() if len(files) > 1}


# Where algorithms are: folders and files under src/strop.
ALGORITHMS = (
    "algorithms/",
    "extensions/recorded/preference/",
    "extensions/recorded/supervised.py",
    "extensions/distillation/distillation.py",
    "extensions/policy_gradients/",
)


def test_algorithms_know_torch_types_and_metrics_only() -> None:
    places = tuple(f"strop.{place.removesuffix('.py').strip('/').replace('/', '.')}" for place in ALGORITHMS)
    allowed = ("torch", "strop.lazy_torch", "strop.types", "strop.metrics", *places)
    wrong = [
        f"{found.file}:{found.line}: {found.target}"
        for found in imports()
        if found.file.startswith(ALGORITHMS)
        and found.target.split(".")[0] not in sys.stdlib_module_names
        and found.target != "strop"
        and not any(found.target == name or found.target.startswith(f"{name}.") for name in allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_build_and_the_command_line_know_the_configuration() -> None:
    wrong = [
        f"{found.file}:{found.line}"
        for found in internal_imports()
        if room(found.target) == "config"
        and room(found.module) not in ("config", "runs", "results", "cli", "api", "extensions", "strop")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_loop_knows_no_backend() -> None:
    """Backends, transports and parallelism never appear in the loop: it imports seams, not what is behind them."""
    loop = {f"trainer/{name}.py" for name in ("train", "run", "dropped", "update", "publish", "cadence", "listeners")}
    assert loop <= {found.file for found in imports()}
    behind = (
        "strop.generation",
        "strop.models",
        "strop.distributed",
        "strop.learner.torch",
        "strop.learner.parallel",
        "strop.weight_sync.in_process",
        "torch.distributed",
    )
    wrong = [found.target for found in imports() if found.file in loop and found.target.startswith(behind)]
    assert not wrong


def test_heavy_imports_stay_inside_the_room_that_is_about_them() -> None:
    wrong = [
        f"{found.file}:{found.line}: {found.target} belongs in {' or '.join(places)}"
        for found in imports()
        for name, places in HEAVY.items()
        if (found.target == name or found.target.startswith(f"{name}."))
        and not any(found.file.startswith(place) or fnmatchcase(found.file, place) for place in places)
    ]
    assert not wrong, "\n".join(wrong)


# In one process, what is imported after something else may only add to it: each line is looked at with all above it.
IMPORTED = (
    (
        ("strop, strop.cli", ("torch", "transformers", "datasets", "pyarrow", "rich", "matplotlib", "wandb", "numpy", "pydantic",
                              "omegaconf", "asyncio")),
        ("strop.config", ("torch", "transformers", "datasets", "rich")),
    ),
    (
        ("strop.types, strop.algorithms.policy_gradient.grpo", ("transformers", "pydantic", "datasets", "rich")),
        ("strop.runs.train, strop.extensions.evaluation.evaluate, strop.cli", ("vllm", "ray", "sglang", "megatron")),
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("imported", IMPORTED, ids=["the configuration", "a run"])
def test_what_is_imported_loads_nothing_heavy_that_it_does_not_use(imported: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    code = "import sys\n" + "".join(
        f"import {modules}\nprint([name for name in {names!r} if name in sys.modules])\n" for modules, names in imported
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert [ast.literal_eval(line) for line in output.splitlines()] == [[]] * len(imported)


def _run_python(*arguments: str) -> tuple[int, float]:
    """Return the exit code, and the seconds of a processor that it took: those that others had do not count."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # the first one compiles Strop, as an installation does
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=nowhere, stderr=nowhere)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def test_help_and_a_refused_configuration_answer_in_less_than_a_second() -> None:
    """The best of ten. A second is that of a machine that loads the libraries of a configuration in 0.2 s, which is a third of it.

    On a slower machine, or one whose cores are shared, these libraries take longer too, and all the rest with them.
    """
    libraries = "import pydantic.dataclasses, omegaconf, ruamel.yaml"
    refused = ["grpo", "--config", str(ROOT.parent / "examples" / "configs" / "quickstart.yaml"), "grpo.sed=3"]
    for arguments, expected in ((["--help"], 0), (refused, 2)):
        taken, yardstick = 1e9, 1e9
        for _ in range(10):
            code, seconds = _run_python("-m", "strop", *arguments)
            assert code == expected
            taken = min(taken, seconds)
            if taken < 1.0:
                break
            yardstick = min(yardstick, _run_python("-c", libraries)[1])
        assert taken < max(1.0, 5 * yardstick), (
            f"strop {' '.join(arguments)} takes {taken:.1f} s, its libraries {yardstick:.2f} s"
        )


def _lines(tree: ast.Module, name: str) -> int:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            assert node.end_lineno is not None
            return node.end_lineno - node.lineno + 1
    raise AssertionError(f"there is no function {name}")


# Folders of parts that are found by their file name, or listed by the one module that knows them all: a file a part.
PARTS = (
    "algorithms",
    "extensions.starters.files",
    "extensions.recipes.nemo_rl",
    "extensions.games",
    "extensions.megatron.families",
    "extensions.trackers",
)
# Modules under 60 lines whose only importer is in their own folder, each with the reason why it is a file of its own.
SHORT = {
    "extensions.adapters.reasoning_gym_datasets": "what a process that scores imports, without the environment",
    "extensions.performance.performance_config": "read with every configuration",
    "extensions.profiling.profile_config": "read with every configuration, without the recorder",
    "runs.open_run": "how a run is put together",
    "trainer.publish": "a stage of the loop",
}


def test_a_short_module_with_one_reader_is_part_of_its_reader() -> None:
    """A reader has to open both; what is found by its file name, or has a reason of its own to be a file, is named above."""
    readers: dict[str, set[str]] = defaultdict(set)
    for found in internal_imports():
        readers[found.target].add(found.module)
    short = {
        module.removeprefix("strop.")
        for path in sources()
        if len(path.read_text(encoding="utf-8").splitlines()) < 60 and (module := module_name(path)) not in packages()
        if len(readers[module]) == 1 and folder(next(iter(readers[module]))) == folder(module)
    }
    short = {module for module in short if not module.startswith(tuple(f"{each}." for each in PARTS))}
    assert not short - set(SHORT), f"put {sorted(short - set(SHORT))} into the module that imports it, or name it in SHORT"
    assert not set(SHORT) - short, f"delete {sorted(set(SHORT) - short)} from SHORT: it is gone, longer, or has other readers"


def test_the_loop_fits_on_a_screen() -> None:
    assert _lines(sources()[PACKAGE / "trainer/train.py"], "train") <= 25


def test_there_is_one_training_loop() -> None:
    found = [
        str(path.relative_to(PACKAGE))
        for path, tree in sources().items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "train"
        if path.name != "api.py"  # strop.train builds a run and calls the loop
    ]
    assert found == ["trainer/train.py"]


def test_an_algorithm_is_short() -> None:
    """A part, a loss or a base class is read at one go; a file holds a family."""
    trees = {path: tree for path, tree in sources().items() if str(path.relative_to(PACKAGE)).startswith(ALGORITHMS)}
    classes = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 100
    assert not {node.name for node in classes if node.end_lineno is not None and node.end_lineno - node.lineno >= 125}
    assert not {path.name for path in trees if len(path.read_text(encoding="utf-8").splitlines()) > 400}


def test_nothing_but_the_command_line_and_the_console_prints() -> None:
    """Under ``if __name__ == "__main__"`` a file is a command too."""
    allowed = ("cli/", "runs/", "extensions/", "monitoring/console.py")
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in sources().items()
        if not str(path.relative_to(PACKAGE)).startswith(allowed)
        if "print" in path.read_text(encoding="utf-8")
        for statement in tree.body
        if not (isinstance(statement, ast.If) and "__main__" in ast.dump(statement.test))
        for node in walk(statement)
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
