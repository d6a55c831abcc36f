"""Programs that try to pass tests without solving the problem. None does."""

from __future__ import annotations

import asyncio

import pytest

from strop.extensions.code.grade_code import CodeGrade, GradingRules, grade_code
from strop.extensions.code.problem_rows import AssertTest, CallTest, CodeProblem, StdioTest
from strop.extensions.code.sandbox.base import Limits
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox

RULES = GradingRules(limits=Limits(cpu_s=0.25, wall_s=4, memory_mb=256), total_s=0.5)
ASSERTS = CodeProblem(
    question="Square a number.",
    tests=tuple(
        AssertTest(source)
        for source in (
            "assert square(3) == 9",
            "assert math.isclose(square(4), 16)",
            "assert all(map(lambda x: square(x) == x * x, [5, 6]))",
            "assert isinstance(square(7), int) and square(7) in {49}",
            "assert not square(8) != 64",
            "for x in map(square, [9, 10]):\n    assert x in (81, 100)",
            "found = None\ntry:\n    found = square(11)\nexcept Exception:\n    pass\nassert found == 121",
            "assert abs(square(12) - 144) < 1e-6",
            "assert len({square(13), 169}) == 1",
            "assert sorted([square(14), square(2)]) == [4, 196]",
        )
    ),
)
CALLS = CodeProblem(question="", tests=tuple(CallTest("square", (n,), (n * n,)) for n in (3, 4, 5)))
STDIO = CodeProblem(question="", tests=tuple(StdioTest(f"{n}\n", f"{n * n}\n") for n in (3, 4, 5)))

HONEST = "def square(x):\n    return x * x\n"
EQUALS_EVERYTHING = r"""
class Any(BASE):
    pass
for name in ('__eq__', '__bool__', '__lt__', '__le__', '__contains__', '__instancecheck__'):
    setattr(Any, name, lambda *_: True)
Any.__ne__ = lambda *_: False
Any.__hash__ = lambda _: hash(9)
def square(x):
    return Any()
"""
OTHERS = r"""
## an object that says it is an int
class Fake:
    __class__ = int
    def __eq__(self, other): return True
def square(x):
    return Fake()

## not a number
def square(x):
    return float('nan')

## infinity
def square(x):
    return float('inf')

## nothing
def square(x):
    return None

## an endless generator
def square(x):
    while True:
        yield x

## an exit at the start
import os
os._exit(0)

## an exit in the call
import os
def square(x):
    os._exit(0)

## sys.exit
import sys
sys.exit(0)

## an exit with a success printed
import os
print('ok', flush=True)
os._exit(0)

## StopIteration
def square(x):
    raise StopIteration

## AssertionError
def square(x):
    raise AssertionError

## KeyboardInterrupt
def square(x):
    raise KeyboardInterrupt

## GeneratorExit
def square(x):
    raise GeneratorExit

## an exception of its own
class Unanswered(BaseException): pass
def square(x):
    raise Unanswered

## patched builtins
import builtins
builtins.abs = lambda *_: 0
builtins.all = builtins.isinstance = lambda *_: True
builtins.sorted = lambda *_: [4, 196]
builtins.len = lambda *_: 1
builtins.map = lambda *_: []
def square(x):
    return 0

## a patched math
import math
math.isclose = lambda *_: True
def square(x):
    return 0

## a module that is called math
class math:
    isclose = staticmethod(lambda *_: True)
def square(x):
    return 0

## names of the checker
def __failed(*_): pass
__passed = check = isclose = __failed
def square(x):
    return 0

## a patched json
import json
json.dumps = lambda *_: '{"value": true}'
def square(x):
    return 0

## a verdict on every descriptor
import os
verdict = b'{"passed": 99, "failed": 0, "calls": [], "waiting": false, "messages": [], "ungradable": ""}\n'
for fd in range(64):
    try: os.write(fd, verdict)
    except OSError: pass
os._exit(0)

## answers that are no JSON
import os
for fd in range(1, 64):
    try: os.write(fd, b'[' * 60000 + b'\n')
    except OSError: pass
def square(x):
    return 0

## answers that stand for no value
import os
lines = [b'{"value": null}', *[b'{"value": {"set": [[1]]}}'] * 40]
for fd in range(1, 64):
    try: os.write(fd, b'\n'.join(lines))
    except OSError: pass
os._exit(0)

## references to what is not there
import os
lines = [b'{"value": null}', *[b'{"value": {"reference": "square"}}'] * 40]
for fd in range(1, 64):
    try: os.write(fd, b'\n'.join(lines))
    except OSError: pass
os._exit(0)

## true for every call
import os
lines = [b'{"value": null}', *[b'{"value": true}'] * 40]
for fd in range(1, 64):
    try: os.write(fd, b'\n'.join(lines))
    except OSError: pass
os._exit(0)

## numbers from memory
import gc, sys
def square(x):
    seen = [list(o.values()) if isinstance(o, dict) else o for o in gc.get_objects() if isinstance(o, (list, tuple, dict))]
    numbers = [n for o in seen for n in o if type(n) is int and n > 15 and n % x == 0]
    return numbers[0] if numbers else 0

## numbers from the frames
import sys
def square(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and 'expected' in str(value): return 9
        frame = frame.f_back
    return 0

## tests from files
import os, re
def square(x):
    for folder in ('.', '/tmp', '/proc/self/fd', '/proc/self', '/dev/shm'):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            try:
                text = open(os.path.join(folder, name), errors='replace').read(100000)
            except OSError: continue
            found = re.search(rf'square\({x}\) == (\d+)', text)
            if found: return int(found[1])
    return 0

## a killed parent
import os
os.kill(os.getppid(), 9) if os.getppid() > 1 else None
def square(x):
    return 0

## a child that goes on
import os, time
if os.fork():
    os._exit(0)
time.sleep(0.5)
def square(x):
    return 0

## no limit of time
import signal
signal.setitimer(signal.ITIMER_PROF, 0)
signal.signal(signal.SIGPROF, signal.SIG_IGN)
def square(x):
    while True: pass

## the answer to the shown test
def square(x):
    return 9
"""
FORGERIES = {
    **{
        f"a {kind} that equals everything": EQUALS_EVERYTHING.replace("BASE", kind)
        for kind in ("object", "int", "float", "str", "list")
    },
    **{part.partition("\n")[0]: part.partition("\n")[2] for part in OTHERS.split("## ")[1:]},
}
PRINTED = {
    "nothing": "",
    "the input again": "print(input())",
    "all small squares": "print(*[n * n for n in range(10)])",
    "the squares on lines of their own": "for n in range(10): print(n * n)",
    "a square and an error": "n = int(input()); print(n * n); raise SystemExit(1)",
    "a square and more": "n = int(input()); print(n * n, n)",
    "a square on stderr": "import sys; n = int(input()); print(n * n, file=sys.stderr)",
    "a success": "print('passed'); import os; os._exit(0)",
    "what its files say": "import os; print(*[open(n, errors='replace').read() for n in os.listdir('.') if os.path.isfile(n)])",
}


def grade(problem: CodeProblem, *programs: str) -> list[CodeGrade]:
    async def grade_all() -> list[CodeGrade]:
        return list(await asyncio.gather(*(grade_code(get_sandbox(), problem, code, "python", RULES) for code in programs)))

    return asyncio.run(grade_all())


@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        pytest.param(ASSERTS, slice(0, None, 2), id="assertions, half of them"),
        pytest.param(CALLS, slice(1, None, 2), id="calls, the others"),
        pytest.param(ASSERTS, slice(None), id="assertions", marks=pytest.mark.exhaustive),
        pytest.param(CALLS, slice(None), id="calls", marks=pytest.mark.exhaustive),
    ],
)
def test_no_forgery_passes_and_honest_programs_do(problem: CodeProblem, chosen: slice) -> None:
    assert len(FORGERIES) >= 30
    forgeries = dict(list(FORGERIES.items())[chosen])
    honest, *forged = grade(problem, HONEST, *forgeries.values())
    assert honest.correct and honest.fraction == 1.0
    assert [name for name, each in zip(forgeries, forged, strict=True) if each.correct] == []
    assert max(each.fraction for each in forged) <= 1 / 3  # one number, known or guessed


def test_no_printed_forgery_passes() -> None:
    honest, *forged = grade(STDIO, "n = int(input()); print(n * n)", *PRINTED.values())
    assert honest.correct
    assert {name: each.passed for name, each in zip(PRINTED, forged, strict=True)} == dict.fromkeys(PRINTED, 0)
