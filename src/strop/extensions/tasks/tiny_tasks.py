"""Tiny tasks: ten repositories with a bug each, and ten terminal tasks as folders in the format of Harbor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from strop.environments.base import PromptedTask
from strop.extensions.tasks.base import make_task
from strop.types import ToolCall

FOLDER = "/task/repository"
PROMPT = """The Python repository {folder} has this issue:

{issue}

Change the code so that it is solved. Hidden tests will judge it; changes of tests and of their configuration are not kept."""


@dataclass(frozen=True)
class Repository:
    """A package of one module, its test of what works, and hidden tests of what does not."""

    name: str
    issue: str
    code: str  # without the bug
    right: str  # the part of the code
    wrong: str  # that the bug replaces
    passing: str  # a test that passes with the bug
    failing: str  # a hidden test that does not


REPOSITORIES = (
    Repository(
        "pricing",
        "`discounted(1000, 15)` returns 150. It should return the price that is left, 850.",
        "def discounted(price, percent):\n    return price - price * percent // 100\n",
        "price - price * percent // 100",
        "price * percent // 100",
        "assert discounted(0, 15) == 0",
        "assert discounted(1000, 15) == 850 and discounted(80, 0) == 80",
    ),
    Repository(
        "intervals",
        "`merge` loses the end of an interval that contains the next one: `merge([(1, 9), (2, 3)])` is `[(1, 3)]`.",
        "def merge(intervals):\n    merged = []\n    for start, end in sorted(intervals):\n        if merged and start <= merged[-1][1]:\n"
        "            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))\n        else:\n            merged.append((start, end))\n"
        "    return merged\n",
        "max(end, merged[-1][1])",
        "end",
        "assert merge([(5, 6), (1, 3), (2, 4)]) == [(1, 4), (5, 6)]",
        "assert merge([(1, 9), (2, 3)]) == [(1, 9)] and merge([]) == []",
    ),
    Repository(
        "cache",
        "`Cache.get` does not count as a use: an entry that was just read is the next one to be dropped.",
        "class Cache:\n    def __init__(self, size):\n        self.size, self.entries = size, {}\n\n    def get(self, key):\n"
        "        value = self.entries.pop(key)\n        self.entries[key] = value\n        return value\n\n    def put(self, key, value):\n"
        "        self.entries.pop(key, None)\n        self.entries[key] = value\n        if len(self.entries) > self.size:\n"
        "            del self.entries[next(iter(self.entries))]\n",
        "value = self.entries.pop(key)\n        self.entries[key] = value\n        return value",
        "return self.entries[key]",
        "cache = Cache(2); cache.put(1, 'a'); cache.put(2, 'b'); cache.put(3, 'c'); assert list(cache.entries) == [2, 3]",
        "cache = Cache(2); cache.put(1, 'a'); cache.put(2, 'b'); assert cache.get(1) == 'a'; cache.put(3, 'c'); "
        "assert sorted(cache.entries) == [1, 3]",
    ),
    Repository(
        "settings",
        "Values given on the command line are ignored when the file has the same key. They should win, except for those that are None.",
        "def combine(defaults, file, arguments):\n    given = {key: value for key, value in arguments.items() if value is not None}\n"
        "    return {**defaults, **file, **given}\n",
        "{**defaults, **file, **given}",
        "{**defaults, **given, **file}",
        "assert combine({'a': 1, 'b': 2}, {'a': 3}, {}) == {'a': 3, 'b': 2}",
        "assert combine({'a': 1}, {'a': 2}, {'a': 0}) == {'a': 0} and combine({'a': 1}, {'a': 2}, {'a': None}) == {'a': 2}",
    ),
    Repository(
        "dates",
        "`days(first, last)` should include both ends, but the last day is missing.",
        "from datetime import date, timedelta\n\n\ndef days(first, last):\n"
        "    return [first + timedelta(number) for number in range((last - first).days + 1)]\n",
        "(last - first).days + 1",
        "(last - first).days",
        "assert days(date(2026, 3, 2), date(2026, 3, 1)) == []",
        "assert days(date(2024, 2, 28), date(2024, 3, 1)) == [date(2024, 2, 28), date(2024, 2, 29), date(2024, 3, 1)]",
    ),
    Repository(
        "table",
        "A field with a quote in it makes the line unreadable. Quotes inside of a field should be doubled, as in RFC 4180.",
        "def write_line(fields):\n    return ','.join(quote(field) for field in fields)\n\n\ndef quote(field):\n"
        "    if any(character in field for character in ',\"\\n'):\n        return '\"' + field.replace('\"', '\"\"') + '\"'\n"
        "    return field\n",
        "field.replace('\"', '\"\"')",
        "field",
        "assert write_line(['a', 'b,c']) == 'a,\"b,c\"'",
        'assert write_line([\'say "hi"\', \'x\']) == \'"say ""hi""",x\'',
    ),
    Repository(
        "roman",
        "`parse('XIV')` is 16: a smaller numeral before a larger one should be subtracted.",
        "VALUES = dict(I=1, V=5, X=10, L=50, C=100, D=500, M=1000)\n\n\ndef parse(text):\n    total = 0\n"
        "    for here, after in zip(text, text[1:] + text[-1:]):\n"
        "        total += -VALUES[here] if VALUES[here] < VALUES[after] else VALUES[here]\n    return total\n",
        "-VALUES[here] if VALUES[here] < VALUES[after] else VALUES[here]",
        "VALUES[here]",
        "assert parse('MDCLXVI') == 1666",
        "assert parse('XIV') == 14 and parse('MCMXCIX') == 1999",
    ),
    Repository(
        "order",
        "`order` silently leaves out modules that import each other. It should raise ValueError.",
        "def order(imports):\n    done, left = [], dict(imports)\n    while left:\n"
        "        ready = [name for name in left if not set(left[name]) - set(done)]\n        if not ready:\n"
        "            raise ValueError('modules import each other: ' + ', '.join(left))\n        for name in ready:\n"
        "            done.append(name)\n            del left[name]\n    return done\n",
        "raise ValueError('modules import each other: ' + ', '.join(left))",
        "break",
        "assert order({'b': ['a'], 'a': [], 'c': ['b']}) == ['a', 'b', 'c']",
        "try:\n        order({'a': ['b'], 'b': ['a'], 'c': []})\n    except ValueError:\n        return\n    raise AssertionError",
    ),
    Repository(
        "slug",
        "`slug('Déjà  vu!')` is `d-j-vu-`. Accents should be dropped, and no dash should stand at the end.",
        "import re\nimport unicodedata\n\n\ndef slug(title):\n    plain = unicodedata.normalize('NFKD', title)\n"
        "    plain = ''.join(letter for letter in plain if not unicodedata.combining(letter))\n"
        "    return re.sub('[^a-z0-9]+', '-', plain.lower()).strip('-')\n",
        "    plain = unicodedata.normalize('NFKD', title)\n"
        "    plain = ''.join(letter for letter in plain if not unicodedata.combining(letter))\n"
        "    return re.sub('[^a-z0-9]+', '-', plain.lower()).strip('-')",
        "    return re.sub('[^a-z0-9]+', '-', title.lower())",
        "assert slug('A long title') == 'a-long-title'",
        "assert slug('Déjà  vu!') == 'deja-vu'",
    ),
    Repository(
        "limiter",
        "The limiter refuses requests for ever once it was full. Requests older than the window should be forgotten.",
        "class Limiter:\n    def __init__(self, most, window):\n        self.most, self.window, self.times = most, window, []\n\n"
        "    def allow(self, now):\n        self.times = [time for time in self.times if now - time < self.window]\n"
        "        if len(self.times) >= self.most:\n            return False\n        self.times.append(now)\n        return True\n",
        "        self.times = [time for time in self.times if now - time < self.window]\n",
        "",
        "limiter = Limiter(2, 10); assert [limiter.allow(time) for time in (0, 1, 2)] == [True, True, False]",
        "limiter = Limiter(1, 10); assert [limiter.allow(time) for time in (0, 5, 10, 11)] == [True, False, True, False]",
    ),
)


def make_repository(index: int) -> PromptedTask:
    """Return a task; the tests of the repository and the hidden ones must pass."""
    each = REPOSITORIES[index % len(REPOSITORIES)]
    heading = f"from {each.name} import *\n\n\n"
    test = f"{heading}def test_what_works():\n    {each.passing}\n"
    hidden = f"test_hidden_{each.name}.py"
    names = (f"test_{each.name}.py::test_what_works", f"{hidden}::test_the_issue")
    return make_task(
        each.name,
        PROMPT.format(folder=FOLDER, issue=each.issue),
        folder=FOLDER,
        files={
            f"{FOLDER}/{each.name}.py": each.code.replace(each.right, each.wrong, 1),
            f"{FOLDER}/test_{each.name}.py": test,
            f"{FOLDER}/README.md": f"# {each.name}\n\nTests: python3 -m pytest\n",
        },
        test_files={f"{FOLDER}/{hidden}": f"{heading}def test_the_issue():\n    {each.failing}\n"},
        test_command=f"python3 /strop/strop_report.py test_{each.name}.py {hidden}",
        test_timeout_s=30.0,
        expected=dict.fromkeys(names, "PASSED"),
        solution=[ToolCall("shell", {"command": f"cat > {each.name}.py << 'END'\n{each.code}END"})],
    )


NAMES = ("ada", "bela", "carl", "dora", "emil", "fay", "gus", "hana", "ivo", "jule")
TEST = """#!/bin/sh
cd /app
({check}) > /tmp/found 2>&1
if cmp -s /tmp/found /tests/expected; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Work:
    """What one task has: ``check`` prints what ``expected`` is, if the work is done."""

    name: str
    instruction: str
    files: Mapping[str, str]  # in /app
    solution: str
    check: str
    expected: str


def make_folder(index: int, random: Random) -> tuple[str, Mapping[str, str]]:
    """Return a task folder: its name, and its files by path."""
    work = MAKERS[index % len(MAKERS)](random)
    return work.name, {
        "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 30.0\n',
        "instruction.md": f"Work in /app. {work.instruction}\n",
        "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY app/ ./\n",
        **{f"environment/app/{path}": text for path, text in work.files.items()},
        "tests/test.sh": TEST.format(check=work.check),
        "tests/expected": work.expected,
        "solution/solve.sh": f"#!/bin/sh\n{work.solution}\n",
    }


def _count(random: Random) -> Work:
    levels = [random.choice(("INFO", "WARNING", "ERROR")) for _ in range(random.randint(20, 60))]
    log = "".join(f"12:{number:02}:00 {level} step {number}\n" for number, level in enumerate(levels))
    return Work("count", "Write to count.txt how many lines of run.log are errors (ERROR).", {"run.log": log},
                "grep -c ERROR run.log > count.txt", "tr -d ' ' < count.txt", f"{levels.count('ERROR')}\n")  # fmt: skip


def _sum(random: Random) -> Work:
    prices = [random.randint(1, 99) for _ in range(random.randint(5, 20))]
    table = "item,price\n" + "".join(f"item{number},{price}\n" for number, price in enumerate(prices))
    return Work("sum", "Write the sum of the column price of sales.csv to total.txt.", {"sales.csv": table},
                "tail -n +2 sales.csv | cut -d, -f2 | awk '{ total += $1 } END { print total }' > total.txt", "cat total.txt",
                f"{sum(prices)}\n")  # fmt: skip


def _unique(random: Random) -> Work:
    names = [random.choice(NAMES) for _ in range(25)]
    return Work("unique", "Write each name in names.txt once to unique.txt, in alphabetical order, one a line.",
                {"names.txt": "\n".join(names) + "\n"}, "sort -u names.txt > unique.txt", "cat unique.txt",
                "".join(f"{name}\n" for name in sorted(set(names))))  # fmt: skip


def _rename(random: Random) -> Work:
    names = sorted(random.sample(NAMES, 4))
    return Work("rename", "Rename every file in notes/ that ends in .txt so that it ends in .md.",
                {f"notes/{name}.txt": f"{name}\n" for name in names} | {"notes/list.csv": "1\n"},
                'for file in notes/*.txt; do mv "$file" "${file%.txt}.md"; done', "ls notes; cat notes/*.md",
                "".join(sorted([f"{name}.md\n" for name in names] + ["list.csv\n"])) + "".join(f"{name}\n" for name in names))  # fmt: skip


def _most(random: Random) -> Work:
    names = [random.choice(NAMES) for _ in range(20)]
    first = random.choice(NAMES)
    names += [first] * (max(map(names.count, NAMES)) + 1)
    random.shuffle(names)
    return Work("most", "visits.log has a visitor's name in each line. Write the most frequent one to most.txt.",
                {"visits.log": "".join(f"visit by {name}\n" for name in names)},
                "cut -d' ' -f3 visits.log | sort | uniq -c | sort -rn | head -n 1 | awk '{ print $2 }' > most.txt", "cat most.txt",
                f"{first}\n")  # fmt: skip


def _setting(random: Random) -> Work:
    old, new = random.randint(1000, 4999), random.randint(5000, 9999)
    return Work("setting", f"Set the port in server.conf to {new}, and change nothing else.",
                {"server.conf": f"# port = 1\nhost = localhost\nport = {old}\nsize = {old}\n"},
                f"sed -i 's/^port = .*/port = {new}/' server.conf", "cat server.conf",
                f"# port = 1\nhost = localhost\nport = {new}\nsize = {old}\n")  # fmt: skip


def _script(random: Random) -> Work:
    name = random.choice(NAMES)
    return Work("script", "greet.sh cannot be run as ./greet.sh NAME. It should print: Hello, NAME!",
                {"greet.sh": '#!/bin/sh\necho "Hello, $NAME!"\n'}, "sed -i 's/\\$NAME/$1/' greet.sh; chmod +x greet.sh",
                f"./greet.sh {name}; ./greet.sh you", f"Hello, {name}!\nHello, you!\n")  # fmt: skip


def _join(random: Random) -> Work:
    names = sorted(random.sample(NAMES, 5))
    ages = {name: random.randint(20, 70) for name in names}
    order = random.sample(names, 5)
    return Work("join", "a.txt has names in its lines, b.txt their ages in the same lines. Write NAME,AGE sorted by name to c.csv.",
                {"a.txt": "".join(f"{name}\n" for name in order), "b.txt": "".join(f"{ages[name]}\n" for name in order)},
                "python3 -c \"print(*sorted(','.join(pair) for pair in zip(open('a.txt').read().split(), open('b.txt').read().split())),"
                " sep='\\n')\" > c.csv", "cat c.csv", "".join(f"{name},{ages[name]}\n" for name in names))  # fmt: skip


def _empty(random: Random) -> Work:
    empty = set(random.sample(NAMES, 4))
    return Work("empty", "Delete the empty files in data/, and keep the others.",
                {f"data/{name}": "" if name in empty else "x\n" for name in NAMES}, "find data -type f -empty -delete", "ls data",
                "".join(f"{name}\n" for name in NAMES if name not in empty))  # fmt: skip


def _archive(random: Random) -> Work:
    names = sorted(random.sample(NAMES, 3))
    return Work("archive", "Pack the files of docs/, without the folder, into docs.tar.gz.",
                {f"docs/{name}.txt": f"{name}\n" for name in names}, "cd docs; tar -czf ../docs.tar.gz *",
                "tar -tzf docs.tar.gz | sed 's,^\\./,,' | grep . | sort; tar -xzOf docs.tar.gz | sort",
                "".join(f"{name}.txt\n" for name in names) + "".join(f"{name}\n" for name in names))  # fmt: skip


MAKERS = (_count, _sum, _unique, _rename, _most, _setting, _script, _join, _empty, _archive)
