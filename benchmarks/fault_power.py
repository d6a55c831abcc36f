"""Fault power: how many of 80 single-point mutants of core files the tests of a checkout kill, beside those of another.

    python benchmarks/fault_power.py --beside ../before --results results/fault_power.json

The mutants are drawn from functions that stand word for word in both checkouts. Each is tried with the test files that name most of what
it changes, and with whole runs, those of algorithms with conformance too; a mutant that one of these fails for is killed. So the figures
are lower bounds on those of the whole suite. The other checkout is tried only with mutants that survive here. A run that is interrupted
goes on from its results; with --again the tests that killed a mutant are tried first, and those of the other checkout are not repeated.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CORE = (
    "trainer",
    "learner",
    "algorithms",
    "data",
    "rollouts",
    "weight_sync",
    "generation",
    "models",
    "checkpointing",
    "types.py",
)
NOT_CORE = ("megatron", "sglang", "families")
WHOLE = (
    "tests/golden",
    "tests/unit/learner/test_one_gradient.py",
    "tests/loop/test_whole_runs.py",
)
FILES_OF_A_MUTANT = 6
LIMIT_S = 600  # a mutant that makes a test wait forever is killed by the suite's own limit of a test before

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str  # relative to src/strop, in the checkout that it was drawn from
    function: str  # Class.function
    place: int  # number of the changed node among those of the function
    change: str  # "a < b -> a <= b"

    @property
    def key(self) -> str:
        return f"{self.function}:{self.place}: {self.change}"


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{prefix}{node.name}.")


def mutations(function: ast.AST) -> list[tuple[ast.expr | ast.stmt, str, str]]:
    """Return what can be changed: the node, its source, and the source that it would become."""
    skipped: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments) or ast.unparse(node).startswith("log."):
            skipped |= {id(each) for each in ast.walk(node)}
    found: list[tuple[ast.expr | ast.stmt, str, str]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.expr | ast.stmt) and id(node) not in skipped:
            before = ast.unparse(node)
            undo = change_node(node)
            if undo is not None:
                found.append((node, before, ast.unparse(node)))
                undo()
    return found


def mutated(source: str, function: ast.AST, place: int) -> str:
    """Return the source with one place of a function changed, every other character left as it is."""
    node, _, after = mutations(function)[place]
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or 0) - 1
    end = sum(map(len, lines[:last])) + (node.end_col_offset or 0)
    start = sum(map(len, lines[:first])) + node.col_offset
    text = after if isinstance(node, ast.stmt | ast.Constant) else f"({after})"
    return (source.encode()[:start] + text.encode() + source.encode()[end:]).decode()


def change_node(node: ast.AST) -> Callable[[], object] | None:
    """Change one node in place. Returns the function that undoes it, or None if nothing about it can be changed."""
    match node:
        case ast.Compare(ops=[operator, *rest]) if type(operator) in SWAPS:
            node.ops = [SWAPS[type(operator)](), *rest]
            return lambda: setattr(node, "ops", [operator, *rest])
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPS:
            node.op = SWAPS[type(operator)]()
            return lambda: setattr(node, "op", operator)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            node.operand = ast.UnaryOp(ast.Not(), operand)
            return lambda: setattr(node, "operand", operand)
        case ast.UnaryOp(op=ast.USub() as operator, operand=operand) if not isinstance(operand, ast.Constant):
            node.op = ast.UAdd()
            return lambda: setattr(node, "op", operator)
        case ast.Constant(value=bool() as value):
            node.value = not value
            return lambda: setattr(node, "value", value)
        case ast.Constant(value=int() as value):
            node.value = value + 1
            return lambda: setattr(node, "value", value)
        case ast.Expr(value=ast.Call() | ast.Await() as value):
            node.value = ast.Constant(None)
            return lambda: setattr(node, "value", value)
    return None


def core_functions(root: Path) -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    source = root / "src/strop"
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        if parts[0] in CORE and not set(parts) & set(NOT_CORE):
            for name, function in functions_of(ast.parse(path.read_text(encoding="utf-8"))):
                yield "/".join(parts), name, function


def draw(count: int, seed: int, here: Path, other: Path) -> list[tuple[Mutant, str]]:
    """Mutants of the other checkout's functions that stand here too, with their file here; mostly the same ones as the code goes on."""
    stands = {(name, ast.dump(function)): file for file, name, function in core_functions(here)}
    found = []
    for file, name, function in core_functions(other):
        if (file_here := stands.get((name, ast.dump(function)))) is not None:
            places = enumerate(mutations(function))
            found += [(Mutant(file, name, place, f"{was} -> {now}"[:160]), file_here) for place, (_, was, now) in places]
    return sorted(found, key=lambda each: hashlib.sha256(f"{seed} {each[0].key}".encode()).digest())[:count]


def tests_for(root: Path, file: str, function: str) -> list[str]:
    """Test files that name the module, its function or class most, then those of its package, then whole runs."""
    module = "strop." + file.removesuffix(".py").replace("/", ".")
    sources = {path: path.read_text(encoding="utf-8") for path in (root / "src/strop").rglob("*.py")}
    readers = {path.stem for path, text in sources.items() if re.search(rf"\b{re.escape(module)}\b", text)}
    names = [name for name in function.split(".") if not name.startswith("__")]
    ranked = Counter[str]()
    for path in sorted((root / "tests").rglob("test_*.py")):
        text, test = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        words = set(re.findall(r"\w+", text))
        if not test.startswith(("tests/gpu", "tests/browser", "tests/deploy")):
            near = sum(part in test for part in Path(file).with_suffix("").parts)
            ranked[test] = 20 * len(words & {*names}) + 10 * (module in text) + 4 * len(words & readers) + near
    best = [test for test, score in ranked.most_common(FILES_OF_A_MUTANT) if score > 0]
    whole = ("tests/conformance", *WHOLE) if file.startswith("algorithms/") else WHOLE
    return [*best, *(test for test in whole if test not in best)]


def try_mutant(root: Path, file: str, mutant: Mutant, first: str | None) -> str | None:
    """Run the tests against a mutant. Returns the test that failed, None if all passed."""
    path = root / "src/strop" / file
    original = path.read_text(encoding="utf-8")
    function = next(node for name, node in functions_of(ast.parse(original)) if name == mutant.function)
    tests = tests_for(root, file, mutant.function)
    if first and (root / first.split("::")[0]).exists():
        tests = [first.split("::")[0], *(test for test in tests if test != first.split("::")[0])]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu and not exhaustive",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{root}/src", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        path.write_text(mutated(original, function, mutant.place), encoding="utf-8")
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        path.write_text(original, encoding="utf-8")
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, required=True, help="the checkout before")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=35)
    parser.add_argument("--again", action="store_true", help="try all mutants again, the test that killed each first")
    asked = parser.parse_args()
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(asked.results.read_text()) if asked.results.exists() else {}
    results: dict[str, dict[str, str | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        roots = {}
        for name, checkout in (("here", HERE), ("before", asked.beside.resolve())):
            roots[name] = Path(folder) / name
            subprocess.run(["git", "-C", checkout, "worktree", "add", "-q", "--detach", roots[name], "HEAD"], check=True)
        try:
            for mutant, file in draw(asked.count, asked.seed, roots["here"], roots["before"]):
                found = results[mutant.key] = dict(earlier.get(mutant.key, {}))
                if "here" not in found or asked.again:
                    found["here"] = try_mutant(roots["here"], file, mutant, found.get("here"))
                if found["here"] is None and "before" not in found:
                    found["before"] = try_mutant(roots["before"], mutant.file, mutant, None)
                print(f"{'killed  ' if found['here'] else 'survived'} {mutant.key} {found}", flush=True)
                asked.results.write_text(json.dumps({**earlier, **results}, indent=1))
        finally:
            for name, checkout in (("here", HERE), ("before", asked.beside)):
                subprocess.run(["git", "-C", checkout, "worktree", "remove", "--force", roots[name]], check=False)
    killed = sum(bool(found["here"]) for found in results.values())
    before = sum(bool(found["here"] or found.get("before")) for found in results.values())
    print(f"{killed} of {len(results)} are killed here, at most {before} by the other checkout's tests")


if __name__ == "__main__":
    main()
