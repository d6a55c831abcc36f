"""Ten tiny repositories with a bug each, an issue that describes it, and tests that show it."""

from __future__ import annotations

from dataclasses import dataclass

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
