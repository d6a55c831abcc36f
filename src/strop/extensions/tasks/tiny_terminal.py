"""Ten tiny terminal tasks, as folders in Harbor's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

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
