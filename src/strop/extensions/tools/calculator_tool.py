"""A calculator as a tool: exact arithmetic."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from strop.tools.base import Tool, ToolError

Number = Fraction | float

LONGEST = 500  # characters of an expression
LARGEST = 10_000  # bits of a number
DIGITS = 30  # digits of a fraction's decimal form

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_GROUPS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")  # 1,000,000
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%(?!\s*[\d(])")
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "round": lambda value, digits=Fraction(0): Fraction(round(Fraction(value), int(digits))),
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "min": min,
    "max": max,
    "gcd": lambda *values: Fraction(math.gcd(*map(_whole, values))),
    "lcm": lambda *values: Fraction(math.lcm(*map(_whole, values))),
    "factorial": lambda value: _factorial(_whole(value)),
    "comb": lambda n, k: Fraction(math.comb(_small(n), _small(k))),
    "sqrt": lambda value: _root(value),
    "exp": math.exp,
    "ln": math.log,
    "log": lambda value, base=None: math.log10(value) if base is None else math.log(value, base),
    "log2": math.log2,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}


async def calculate(expression: str) -> str:
    """Return the value of an expression as text. Raises ToolError."""
    if len(expression) > LONGEST:
        raise ToolError(f"the expression has {len(expression)} characters; at most {LONGEST} are allowed")
    text = _GROUPS.sub(lambda found: found[0].replace(",", ""), expression.translate(_SIGNS)).replace("^", "**")
    text = _PERCENT.sub(r"(\1/100)", text).strip().removesuffix("=")
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ToolError(f"this is no arithmetic expression: {error.msg}") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise ToolError(f"this cannot be computed: {error}") from error
    return write_number(value)


CALCULATOR = Tool(
    name="calculator",
    description="Compute an arithmetic expression exactly, e.g. (3 + 4) * 2^10 / 7. It has sqrt, log, sin, factorial, gcd and the like.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression."}},
        "required": ["expression"],
    },
    function=calculate,
)


def write_number(value: Number) -> str:
    """Return a whole number or a finite decimal exactly, another fraction with its decimal form, a float as an approximation."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ToolError(f"the result is {value}")
        return f"≈ {value:.15g}"
    if value.denominator == 1:
        return str(value.numerator)
    exact = _write_decimal(value)
    return exact if Fraction(exact) == value else f"{value} ≈ {exact}"


def _write_decimal(value: Fraction) -> str:
    scaled = abs(value.numerator) * 10**DIGITS // value.denominator
    whole, digits = divmod(scaled, 10**DIGITS)
    return f"{'-' if value < 0 else ''}{whole}.{digits:0{DIGITS}d}".rstrip("0").removesuffix(".")


def _evaluate(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        if node.value == math.inf:
            raise ToolError("a number is too large")
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _bounded(_power(_evaluate(node.left), _evaluate(node.right)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _bounded(_FUNCTIONS[node.func.id](*map(_evaluate, node.args)))
    raise ToolError(
        f"{ast.unparse(node)[:80]!r} is not supported. Supported are numbers, + - * / // % ^, parentheses, pi, e, and "
        f"{', '.join(_FUNCTIONS)}"
    )


def _bounded(value: Number) -> Number:
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST:
        raise ToolError(f"a number with more than {LARGEST * 3 // 10} digits")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size > 1 and abs(exponent) * (size - 1) > LARGEST:  # reported before it is computed
            raise ToolError(f"a number with more than {LARGEST * 3 // 10} digits")
        if size <= 1:  # 0, 1, -1: any exponent
            exponent = exponent % 2 + 2 if exponent > 0 else exponent if base == 0 else exponent % 2
        return Fraction(base ** int(exponent))
    if isinstance(exponent, Fraction) and exponent == Fraction(1, 2):
        return _root(base)
    result: float | complex = float(base) ** float(exponent)
    if isinstance(result, complex):
        raise ToolError("the result is not a real number")
    return result


def _root(value: Number) -> Number:
    if value < 0:
        raise ToolError("the square root of a negative number is not a real number")
    if isinstance(value, Fraction):
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if Fraction(top * top, bottom * bottom) == value:
            return Fraction(top, bottom)
    return math.sqrt(value)


def _whole(value: Number) -> int:
    if value != int(value):
        raise ToolError(f"{write_number(value)} is not a whole number")
    return int(value)


def _small(value: Number) -> int:
    if abs(whole := _whole(value)) > 2000:
        raise ToolError(f"{whole} is too large here; at most 2000")
    return whole


def _factorial(value: int) -> Fraction:
    return Fraction(math.factorial(_small(Fraction(value))))
