"""Programs that try to pass tests without solving the problem. None does."""

from __future__ import annotations

import asyncio

import pytest

from strop.environments.code.code_problem import AssertTest, CallTest, CodeProblem, StdioTest
from strop.environments.code.grade_code import CodeGrade, GradingRules, grade_code
from strop.sandbox.base import Limits
from strop.sandbox.pool import get_sandbox

RULES = GradingRules(limits=Limits(cpu_s=1, wall_s=4, memory_mb=256), total_s=2)
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
ANY = "class Any(BASE):\n    pass\nfor name in ('__eq__', '__bool__', '__lt__', '__le__', '__contains__', '__instancecheck__'):\n    setattr(Any, name, lambda *_: True)\nAny.__ne__ = lambda *_: False\nAny.__hash__ = lambda _: hash(VALUE)\n"
FORGERIES = {
    "an object that equals everything": ANY.replace("BASE", "object").replace("VALUE", "9") + "def square(x):\n    return Any()",
    "an int that equals everything": ANY.replace("BASE", "int").replace("VALUE", "9") + "def square(x):\n    return Any()",
    "a float that equals everything": ANY.replace("BASE", "float").replace("VALUE", "9") + "def square(x):\n    return Any()",
    "a text that equals everything": ANY.replace("BASE", "str").replace("VALUE", "9") + "def square(x):\n    return Any()",
    "a list that equals everything": ANY.replace("BASE", "list").replace("VALUE", "9") + "def square(x):\n    return Any()",
    "an object that says it is an int": "class Fake:\n    __class__ = int\n    def __eq__(self, other): return True\ndef square(x):\n    return Fake()",
    "not a number": "def square(x):\n    return float('nan')",
    "infinity": "def square(x):\n    return float('inf')",
    "nothing": "def square(x):\n    return None",
    "an endless generator": "def square(x):\n    while True:\n        yield x",
    "an exit at the start": "import os\nos._exit(0)",
    "an exit in the call": "import os\ndef square(x):\n    os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "an exit with a success printed": "import os\nprint('ok', flush=True)\nos._exit(0)",
    "StopIteration": "def square(x):\n    raise StopIteration",
    "AssertionError": "def square(x):\n    raise AssertionError",
    "KeyboardInterrupt": "def square(x):\n    raise KeyboardInterrupt",
    "GeneratorExit": "def square(x):\n    raise GeneratorExit",
    "an exception of its own": "class Unanswered(BaseException): pass\ndef square(x):\n    raise Unanswered",
    "patched builtins": "import builtins\nbuiltins.abs = lambda *_: 0\nbuiltins.all = builtins.isinstance = lambda *_: True\n"
    "builtins.sorted = lambda *_: [4, 196]\nbuiltins.len = lambda *_: 1\nbuiltins.map = lambda *_: []\ndef square(x):\n    return 0",
    "a patched math": "import math\nmath.isclose = lambda *_: True\ndef square(x):\n    return 0",
    "a module that is called math": "class math:\n    isclose = staticmethod(lambda *_: True)\ndef square(x):\n    return 0",
    "names of the checker": "def __failed(*_): pass\n__passed = check = isclose = __failed\ndef square(x):\n    return 0",
    "a patched json": "import json\njson.dumps = lambda *_: '{\"value\": true}'\ndef square(x):\n    return 0",
    "a verdict on every descriptor": "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"passed\": 99, \"failed\": 0, \"calls\": [], "
    '"waiting": false, "messages": [], "ungradable": ""}\\n\')\n    except OSError: pass\nos._exit(0)',
    "answers that are no JSON": "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'[' * 60000 + b'\\n')\n    except OSError: pass\n"
    "def square(x):\n    return 0",
    "answers that stand for no value": "import os\nlines = [b'{\"value\": null}', *[b'{\"value\": {\"set\": [[1]]}}'] * 40]\n"
    "for fd in range(1, 64):\n    try: os.write(fd, b'\\n'.join(lines))\n    except OSError: pass\nos._exit(0)",
    "references to what is not there": "import os\nlines = [b'{\"value\": null}', *[b'{\"value\": {\"reference\": \"square\"}}'] * 40]\n"
    "for fd in range(1, 64):\n    try: os.write(fd, b'\\n'.join(lines))\n    except OSError: pass\nos._exit(0)",
    "true for every call": "import os\nlines = [b'{\"value\": null}', *[b'{\"value\": true}'] * 40]\n"
    "for fd in range(1, 64):\n    try: os.write(fd, b'\\n'.join(lines))\n    except OSError: pass\nos._exit(0)",
    "numbers from memory": "import gc, sys\ndef square(x):\n    seen = [o for o in gc.get_objects() if isinstance(o, (list, tuple, dict))]\n"
    "    numbers = [n for o in seen for n in (o.values() if isinstance(o, dict) else o) if type(n) is int and n > 15 and n % x == 0]\n"
    "    return numbers[0] if numbers else 0",
    "numbers from the frames": "import sys\ndef square(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in list(frame.f_locals.values()):\n            if isinstance(value, dict) and 'expected' in str(value): return 9\n"
    "        frame = frame.f_back\n    return 0",
    "tests from files": "import os, re\ndef square(x):\n    for folder in ('.', '/tmp', '/proc/self/fd', '/proc/self', '/dev/shm'):\n"
    "        for name in os.listdir(folder) if os.path.isdir(folder) else ():\n            try: text = open(os.path.join(folder, name), errors='replace').read(100000)\n"
    "            except OSError: continue\n            found = re.search(rf'square\\({x}\\) == (\\d+)', text)\n            if found: return int(found[1])\n    return 0",
    "a killed parent": "import os\nos.kill(os.getppid(), 9) if os.getppid() > 1 else None\ndef square(x):\n    return 0",
    "a child that goes on": "import os, time\nif os.fork():\n    os._exit(0)\ntime.sleep(0.5)\ndef square(x):\n    return 0",
    "no limit of time": "import signal\nsignal.setitimer(signal.ITIMER_PROF, 0)\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\ndef square(x):\n    while True: pass",
    "the answer to the shown test": "def square(x):\n    return 9",
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


@pytest.mark.parametrize("problem", [ASSERTS, CALLS], ids=["assertions", "calls"])
def test_no_forgery_passes_and_honest_programs_do(problem: CodeProblem) -> None:
    assert len(FORGERIES) >= 30
    honest, *forged = grade(problem, HONEST, *FORGERIES.values())
    assert honest.correct and honest.fraction == 1.0
    assert [name for name, each in zip(FORGERIES, forged, strict=True) if each.correct] == []
    assert max(each.fraction for each in forged) <= 1 / 3  # one number, known or guessed


def test_no_printed_forgery_passes() -> None:
    honest, *forged = grade(STDIO, "n = int(input()); print(n * n)", *PRINTED.values())
    assert honest.correct
    assert {name: each.passed for name, each in zip(PRINTED, forged, strict=True)} == dict.fromkeys(PRINTED, 0)
