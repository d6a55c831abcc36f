"""The overrides of hydra in a shell script: what follows the Python command that starts verl.

Only what a script says by itself is read: assignments, ``$VAR``, ``${VAR:-default}``, arrays and whole-number arithmetic. Nothing is run.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

ASSIGNMENT = re.compile(r"\s*(?:export\s+|declare\s+(?:-\w\s+)*|local\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
SEVERAL = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>[^\s;'\"()]*);\s*(?P<rest>.+)", re.DOTALL)
OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w./@]*)=(?P<value>.*)", re.DOTALL)
VARIABLE = re.compile(
    r"\$\(\((?P<sum>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)"
    r"|\$\{(?P<name>[A-Za-z_]\w*|\d+)(?::?(?P<operator>[-=+])(?P<default>(?:[^{}]|\$\{[^{}]*\})*))?\}"
    r"|\$\{(?P<array>[A-Za-z_]\w*)\[[@*]\]\}"
    r"|\$(?P<bare>[A-Za-z_]\w*)"
)
COMMAND = re.compile(
    r"verl(?:\.trainer)?[./](?:trainer[./])?(?P<module>main_ppo|fsdp_sft_trainer|sft_trainer|main_generation|main_eval)"
)
SPACED_SUM = re.compile(r"\$\(\(.*?\)\)+")
ARITHMETIC = re.compile(r"[\d\s()+*/%-]+")
MOST_EXPANSIONS = 20  # of variables inside variables


@dataclass
class ShellScript:
    """What a script starts."""

    overrides: dict[str, str] = field(default_factory=dict)  # as text, the last one of a key
    lines: dict[str, int] = field(default_factory=dict)  # of each override: where its command begins
    module: str | None = None  # the Python module; None for a plain list of overrides
    flags: dict[str, str] = field(default_factory=dict)  # --config-name, --nproc_per_node
    unassigned: dict[str, str] = field(default_factory=dict)  # variables that stay, with a key that they are in
    has_conditions: bool = False


def read_script(text: str) -> ShellScript:
    """Read a script, or a plain list of overrides. Raises ValueError for quotes that do not end."""
    script, variables = ShellScript(), {}
    for number, line in _join_lines(text):
        stripped = line.strip()
        while several := SEVERAL.fullmatch(stripped):
            variables[several["name"]] = several["value"]
            stripped = several["rest"]
        if re.match(r"(?:if|for|while|case)\b", stripped):
            script.has_conditions = True
        assigned = ASSIGNMENT.fullmatch(stripped)
        words = _split(stripped)
        if assigned and (len(words) == 1 or assigned["value"].startswith("(") or not COMMAND.search(stripped)):
            variables[assigned["name"]] = _unquote_assigned(assigned["value"])
            continue
        command = COMMAND.search(_expand(stripped, variables, {}, ""))
        plain = bool(words) and all(OVERRIDE.fullmatch(word) and "." in word.partition("=")[0] for word in words)
        if command is not None or plain:
            script.module = script.module or (command["module"] if command else None)
            _read_command(words, variables, script, number)
    return script


def _join_lines(text: str) -> list[tuple[int, str]]:
    """Return the commands with the number of their first line: continued lines, and arrays in parentheses, are one."""
    joined: list[tuple[int, str]] = []
    open_array = False
    continues = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw) if not _inside_quotes(raw) else raw
        body = line.rstrip()
        body = SPACED_SUM.sub(lambda match: match[0].replace(" ", ""), body).replace("$(pwd)", ".")
        goes_on = body.endswith("\\")
        body = body.removesuffix("\\")
        if (continues or open_array) and joined:
            joined[-1] = (joined[-1][0], f"{joined[-1][1]} {body}")
        else:
            joined.append((number, body))
        if re.fullmatch(r"\s*(?:export\s+|declare\s+-a\s+)?[A-Za-z_]\w*=\([^)]*", body):
            open_array = True
        elif open_array and ")" in body:
            open_array = False
        continues = goes_on
    return joined


def _inside_quotes(line: str) -> bool:
    """Return whether a # of a line may be part of a text."""
    before = line.partition("#")[0]
    return before.count("'") % 2 == 1 or before.count('"') % 2 == 1


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=False, posix=True)
    except ValueError:
        return []


def _unquote_assigned(value: str) -> str:
    value = value.strip().rstrip(";").strip()
    if value.startswith("(") and value.endswith(")"):
        return value[1:-1]  # an array, split where it is used
    words = _split(value) if value[:1] in ("'", '"') or " " not in value else []
    return words[0] if len(words) == 1 else value


def _read_command(words: list[str], variables: dict[str, str], script: ShellScript, number: int) -> None:
    expanded: list[str] = []
    for word in words:
        array = re.fullmatch(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\]\})?\}?", word)
        whole = array is not None and array[1] in variables and ("[" in word or "=" in variables[array[1]])
        expanded += _split(variables[array[1]]) if whole and array is not None else [word]
    for position, word in enumerate(expanded):
        flag = re.fullmatch(r"--(config[-_](?:name|path)|nnodes|nproc[-_]per[-_]node)(?:=(.*))?", word)
        if flag is not None:
            value = flag[2] if flag[2] is not None else "".join(expanded[position + 1 : position + 2])
            script.flags[flag[1].replace("_", "-")] = _expand(value, variables, {}, "")
        match = OVERRIDE.fullmatch(word)
        if match is None or word.startswith("-"):
            continue
        if "." in match["key"] or match["key"] in ("ulysses_sequence_parallel_size", "use_remove_padding"):
            script.overrides[match["key"]] = _expand(match["value"], variables, script.unassigned, match["key"])
            script.lines[match["key"]] = number


def _expand(text: str, variables: dict[str, str], unassigned: dict[str, str], key: str, depth: int = 0) -> str:
    """Return a text with the variables that the script assigns; another one becomes ``${oc.env:NAME}`` and is named."""

    def replace(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return _calculate(match["sum"], variables, depth) or match[0]
        name = match["name"] or match["array"] or match["bare"]
        if name == "PWD":
            return "."
        if name in variables and match["operator"] == "+":
            return _expand(match["default"], variables, unassigned, key, depth + 1)
        if name in variables and depth < MOST_EXPANSIONS:
            value = variables[name]
            if re.fullmatch(rf"\$\{{{name}(?::?[-=](?:.*))?\}}", value):  # NAME=${NAME:-default}
                inner = VARIABLE.fullmatch(value)
                value = (inner["default"] or "").strip("'\"") if inner else ""
            return _expand(value, variables, unassigned, key, depth + 1)
        if match["operator"] == "+":
            return ""
        if match["default"] is not None:
            return _expand(match["default"].strip("'\""), variables, unassigned, key, depth + 1)
        if name.isdigit():
            return ""
        unassigned[name] = key
        return f"${{oc.env:{name}}}"

    return VARIABLE.sub(replace, text)


def _calculate(expression: str, variables: dict[str, str], depth: int) -> str | None:
    """Return the value of whole-number arithmetic; None for any other."""
    named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: f"${{{match[1]}}}", expression)
    text = _expand(named, variables, {}, "", depth + 1) if depth < MOST_EXPANSIONS else named
    if len(text) > 200 or not ARITHMETIC.fullmatch(text) or "**" in text:
        return None
    try:
        return str(_evaluate(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ZeroDivisionError):
        return None


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_evaluate(left), _evaluate(right))
    raise SyntaxError("only whole numbers and + - * / % are computed")
