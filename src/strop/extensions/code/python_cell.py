"""One call of a stateful Python interpreter, as a notebook runs a cell."""

from __future__ import annotations

import json
from dataclasses import dataclass

from strop.extensions.code.sandbox.base import ExitReason, SandboxSession
from strop.tools.shorten_middle import shorten_middle

# Runs in the sandbox, in the session's own variables; the last line of its output is what it found. A program can write such a line itself:
# what a policy is told of its own program is all that depends on it.
_CELL = """
def _strop_cell(code, namespace):
    import ast, json, linecache, pprint, sys, traceback
    found = {"evaluated": False, "value": None, "error": None, "traceback": ""}
    linecache.cache["<cell>"] = (len(code), None, code.splitlines(True), "<cell>")
    try:
        tree = ast.parse(code, "<cell>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            found["evaluated"] = True
            if value is not None:
                found["value"] = pprint.pformat(value)
    except BaseException as error:
        found["error"] = repr(error)
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != "<cell>":
            frames = frames.tb_next
        found["traceback"] = "".join(traceback.format_exception(type(error), error, frames, limit=-4)).rstrip()
    sys.stdout.flush()
    print("\\n" + json.dumps(found), flush=True)
"""
_ENDINGS = {
    ExitReason.TIME: "The time limit of {wall_s:g} s was reached. The interpreter starts again, without its variables.",
    ExitReason.MEMORY: "The memory limit was reached. The interpreter starts again, without its variables.",
    ExitReason.OUTPUT: "The limit on output was reached. The interpreter starts again, without its variables.",
}


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What a call printed, and what its last expression is."""

    stdout: str = ""
    evaluated: bool = False  # it ended with an expression
    value: str | None = None  # of that expression, unless it is None
    error: str | None = None
    traceback: str = ""

    def shorten(self, limit: int, *, printed: bool = True) -> str:
        """Return what a policy reads of it, cut in the middle where it is long."""
        parts = [self.stdout if printed else "", self.value or "", self.traceback]
        return shorten_middle("\n".join(part.rstrip("\n") for part in parts if part.strip()), limit)


async def run_cell(session: SandboxSession, code: str, *, wall_s: float | None = None) -> CellResult:
    """Run code as a cell of a notebook. Nothing that it does raises; raises SandboxError if the sandbox fails."""
    result = await session.run(f"{_CELL}\n_strop_cell({json.dumps(code)}, globals())\n", wall_s=wall_s)
    stdout, _, last = result.stdout.rstrip("\n").rpartition("\n")
    if result.reason in _ENDINGS:
        ending = _ENDINGS[result.reason].format(wall_s=wall_s or result.wall_s)
        return CellResult(stdout=result.stdout, error=ending, traceback=ending)
    try:
        found = json.loads(last)
        return CellResult(
            stdout=stdout.removesuffix("\n") + (f"\n{result.stderr}" if result.stderr else ""),
            evaluated=bool(found["evaluated"]),
            value=None if found["value"] is None else str(found["value"]),
            error=None if found["error"] is None else str(found["error"]),
            traceback=str(found["traceback"]),
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        ending = f"The interpreter ended ({result.reason}, exit code {result.exit_code}) and starts again, without its variables."
        return CellResult(stdout=result.stdout + result.stderr, error=ending, traceback=ending)
