"""Count what a reader and a run meet in the source: lines, files, imports, sizes of functions, and what a tiny GRPO run executes.

python benchmarks/structure.py                          # of this checkout
python benchmarks/structure.py --beside ../other        # and of another, in two columns
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
ROOMS = ("build", "runs", "config", "monitoring")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

# Run in a process of its own with the counted checkout's source first on the path. A class body is code without CO_OPTIMIZED (1).
TRACED_RUN = """
import json, sys, threading
root, tests, work = sys.argv[1:]
sys.path[:0] = [root + "/src", tests]
seen = set()
def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_flags & 1 and code.co_filename.startswith(root + "/src/strop"):
        seen.add(code.co_filename)
from loop.runs import overrides, tiny_config
from loop.tiny import build_tiny
from pathlib import Path
build_tiny(Path(work) / "model")
changes = {"grpo__max_num_steps": 2, "grpo__val_period": 0, "checkpointing__enabled": False, "data__validation__env_name": ...}
for name in ("data.validation.size", "checkpointing.metric_name", "checkpointing.keep_top_k", "checkpointing.save_period"):
    changes[name.replace(".", "__")] = ...
keys = overrides(tiny_config(Path(work) / "model", **changes))
sys.setprofile(note); threading.setprofile(note)
from strop.cli import main
try:
    code = main(["grpo", *keys])
except SystemExit as left:
    code = left.code
sys.setprofile(None)
modules = [name for name in sys.modules if name == "strop" or name.startswith("strop.")]
print(json.dumps({"code": code, "files": len(seen), "modules": len(modules)}))
"""


def trees(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def count_lines(paths: Iterator[Path] | list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def functions_of(tree: ast.Module) -> Iterator[FUNCTIONS]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))


def class_of(parsed: dict[Path, ast.Module], name: str) -> ast.ClassDef | None:
    nodes = (node for tree in parsed.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return next((node for node in nodes if node.name == name), None)


def names_imported(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            found |= {alias.name for alias in each.names}
        elif isinstance(each, ast.ImportFrom) and each.module:
            found |= {each.module, *(f"{each.module}.{alias.name}" for alias in each.names)}
    return found


def count_single_importers(source: Path, parsed: dict[Path, ast.Module]) -> int:
    """Count the modules with one importer, which is in their own folder."""
    names = {".".join(path.relative_to(source).with_suffix("").parts): path for path in parsed if path.name != "__init__.py"}
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path, tree in parsed.items():
        for name in names_imported(tree) & names.keys():
            importers[names[name]].add(path)
    return sum(len(by) == 1 and next(iter(by)).parent == path.parent for path, by in importers.items())


def trace_run(root: Path) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-c", TRACED_RUN, str(root), str(HERE / "tests"), work]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}/src"}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {"code": 1}
    if found.get("code") != 0:
        raise SystemExit(f"error: the traced run of {root} failed:\n{done.stdout}{done.stderr}")
    return found


def count(root: Path) -> dict[str, object]:
    source = root / "src"
    parsed = trees(source / "strop")
    lengths = sorted(
        ((node.end_lineno or 0) - node.lineno + 1, node.name) for tree in parsed.values() for node in functions_of(tree)
    )
    opened = [path for path in parsed if path.name == "open_run.py"]  # earlier checkouts build runs in rollout_run.py
    wiring = opened or [path for path in parsed if path.name == "rollout_run.py"]
    extensions = [path for path in parsed if "extensions" in path.relative_to(source).parts]
    core = [path for path in parsed if path not in set(extensions)]
    by_room = {room: [path for path in parsed if path.relative_to(source / "strop").parts[0] == room] for room in ROOMS}
    run, environment = class_of(parsed, "TrainingRun"), class_of(parsed, "Environment")
    classes = [node for tree in parsed.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    traced = trace_run(root)
    return {
        "lines, files": f"{count_lines(list(parsed)):,}, {len(parsed):,}",
        "core: lines, files": f"{count_lines(core):,}, {len(core):,}" if extensions else "-",
        "extensions: lines, files": f"{count_lines(extensions):,}, {len(extensions):,}",
        **{f"  {room}": f"{count_lines(paths):,}, {len(paths)}" for room, paths in by_room.items() if paths},
        "smallest run: files executed, modules imported": f"{traced['files']}, {traced['modules']}",
        "modules whose only importer is in their folder": count_single_importers(source, parsed),
        "fields of TrainingRun": sum(isinstance(each, ast.AnnAssign) for each in run.body) if run else 0,
        "methods of Environment": sum(isinstance(each, FUNCTIONS) for each in environment.body) if environment else 0,
        "longest functions": ", ".join(f"{name} {lines}" for lines, name in reversed(lengths[-3:])),
        "imports of the wiring": ", ".join(
            f"{path.stem} {sum(isinstance(node, ast.Import | ast.ImportFrom) for node in parsed[path].body)}" for path in wiring
        ),
        "files that know routes": sum(bool(re.search(r"\broutes\b", path.read_text(encoding="utf-8"))) for path in parsed),
        "classes, protocols": f"{len(classes):,}, {sum('Protocol' in map(ast.unparse, each.bases) for each in classes)}",
        "tests: lines, files": f"{count_lines(list((root / 'tests').rglob('*.py'))):,}, "
        f"{len(list((root / 'tests').rglob('*.py'))):,}",
        "docs: words without log and reference": f"{count_words(root / 'docs'):,}",
    }


def count_words(docs: Path) -> int:
    left_out = {"log.md", "configuration.md", "names.md", "numerics.md"}  # log, and what programs generate
    pages = (path for path in docs.rglob("*.md") if path.name not in left_out and path.parent.name not in ("log", "api"))
    return sum(len(path.read_text(encoding="utf-8").split()) for path in pages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout, counted in a column before this one's")
    beside = parser.parse_args().beside
    columns = {str(root): count(root.resolve()) for root in ([beside] if beside else []) + [HERE]}
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    rows = dict.fromkeys(name for each in columns.values() for name in each)
    for name in rows:
        print(f"| {name} | {' | '.join(str(each.get(name, '-')) for each in columns.values())} |")


if __name__ == "__main__":
    main()
