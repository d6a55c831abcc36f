"""Tasks with a short answer: data science in a notebook, questions about a corpus with citations, pages that the task serves."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from strop.data.sources.records import DataError
from strop.environments.base import PromptedTask, reward
from strop.extensions.sandboxes.task_sandbox import InSandbox
from strop.extensions.tasks.base import MACHINE, AnsweredTasks, find_answer, make_task, read_inside, same_answer
from strop.extensions.tools.search_tool import list_citations
from strop.types import Rollout, ToolCall

FORM = "End your last message with a line: Answer: ..."
CORPUS = Path(__file__).with_name("tiny_corpus.jsonl")  # invented places and people
_FUTURE = "from __future__ import annotations\n"
_CITATION = re.compile(r"\[[^\]]*\]")
Rows = list[dict[str, Any]]
PRODUCTS, CITIES, THINGS = ("lamp", "chair", "desk"), ("Oslo", "Turin", "Lima"), ("lamp", "cup", "rug", "vase")


@dataclass(frozen=True, kw_only=True)
class DataScience(AnsweredTasks, InSandbox):
    """``type: data_science``: questions about a table, by the tool ``notebook``."""

    image: str | None = MACHINE
    tools: Any = ("notebook",)

    def make(self, index: int, random: Random) -> PromptedTask:
        question, solve = QUESTIONS[index % len(QUESTIONS)]
        table = make_table(random)
        product, city = random.choice(PRODUCTS), random.choice(CITIES)
        answer = str(solve(read_table(table.splitlines()), product, city))
        start = f"{_FUTURE}import csv, statistics\n{inspect.getsource(read_table)}\nrows = read_table(open('sales.csv'))"
        cells = [start, f"{_FUTURE}{inspect.getsource(solve)}\nprint({solve.__name__}(rows, {product!r}, {city!r}))"]
        asked = f"/task/sales.csv has the columns day, city, product, units, price. {question.format(product=product, city=city)} {FORM}"
        solution: list[ToolCall | str] = [*(ToolCall("python", {"code": cell}) for cell in cells), f"Answer: {answer}"]
        return make_task(solve.__name__, asked, answer, folder="/task", files={"/task/sales.csv": table}, solution=solution)


def make_table(random: Random) -> str:
    def row() -> str:
        day, units, price = random.randint(1, 28), random.randint(1, 40), random.randint(5, 90)
        return f"2026-01-{day:02},{random.choice(CITIES)},{random.choice(PRODUCTS)},{units},{price}\n"

    return "day,city,product,units,price\n" + "".join(row() for _ in range(random.randint(40, 80)))


# The source of the functions below is what the scripted policy runs.


def read_table(lines: Iterable[str]) -> Rows:
    return [{**row, "units": int(row["units"]), "price": int(row["price"])} for row in csv.DictReader(lines)]


def total_units(rows: Rows, product: str, city: str) -> object:
    return sum(row["units"] for row in rows if row["city"] == city)


def mean_price(rows: Rows, product: str, city: str) -> object:
    return round(statistics.fmean(row["price"] for row in rows if row["product"] == product), 2)


def best_city(rows: Rows, product: str, city: str) -> object:
    return max(sorted({row["city"] for row in rows}), key=lambda name: sum(row["units"] for row in rows if row["city"] == name))


def selling_days(rows: Rows, product: str, city: str) -> object:
    return len({row["day"] for row in rows if row["product"] == product})


def median_price(rows: Rows, product: str, city: str) -> object:
    return statistics.median(row["price"] for row in rows)


def revenue(rows: Rows, product: str, city: str) -> object:
    return sum(row["units"] * row["price"] for row in rows if row["city"] == city and row["product"] == product)


def best_day(rows: Rows, product: str, city: str) -> object:
    return max(sorted({row["day"] for row in rows}), key=lambda day: sum(row["units"] for row in rows if row["day"] == day))


def large_share(rows: Rows, product: str, city: str) -> object:
    return round(100 * sum(row["units"] > 20 for row in rows) / len(rows), 1)


def spread(rows: Rows, product: str, city: str) -> object:
    return round(statistics.pstdev(row["units"] for row in rows), 3)


def slope(rows: Rows, product: str, city: str) -> object:
    units, prices = [row["units"] for row in rows], [row["price"] for row in rows]
    middle = statistics.fmean(prices)
    covered = sum((price - middle) * unit for price, unit in zip(prices, units, strict=True))
    return round(covered / sum((price - middle) ** 2 for price in prices), 4)


QUESTIONS: tuple[tuple[str, Callable[[Rows, str, str], Any]], ...] = (
    ("How many units were sold in {city}?", total_units),
    ("What is the mean of price over the rows of {product}, with 2 decimals?", mean_price),
    ("In which city were the most units sold (the first by name, if several)?", best_city),
    ("On how many different days does {product} occur?", selling_days),
    ("What is the median of price?", median_price),
    ("What is the sum of units times price for {product} in {city}?", revenue),
    ("On which day were the most units sold (the earliest, if several)?", best_day),
    ("What share of the rows has more than 20 units, in percent, with 1 decimal?", large_share),
    ("What is the standard deviation of units, of the population, with 3 decimals?", spread),
    ("What is the slope of the least-squares line of units over price, with 4 decimals?", slope),
)


@dataclass(frozen=True, kw_only=True)
class Research(AnsweredTasks):
    """``type: research``: questions about a corpus, by the tool ``search``. The answer counts with the citations of its documents only.

    Rows of a dataset have the columns question, answer and ``documents``, the ids of the documents that it follows from; set ``tools`` to
    a search of their corpus.
    """

    tools: Any = ({"search": {"corpus": str(CORPUS)}},)

    def make(self, index: int, random: Random) -> PromptedTask:
        rows = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
        questions = [row for row in rows if "question" in row]
        row = questions[index % len(questions)]
        cited = " ".join(f"[{document}]" for document in row["documents"])
        titles = {each["id"]: each["title"] for each in rows}
        calls = [ToolCall("search", {"query": titles[document]}) for document in row["documents"]]
        asked = f"{row['question']} {FORM} Add the id of each document that it follows from, in brackets, and of no other."
        last = f"Answer: {row['answer']} {cited}"
        return make_task(row["id"], asked, row["answer"], documents=row["documents"], solution=[*calls, last])

    def adapt(self, task: PromptedTask) -> PromptedTask:
        if not task.metadata.get("documents"):
            raise DataError(
                f"the row {task.id} has no documents; type research needs the ids of those that its answer follows from"
            )
        return task

    @reward(weight=1.0, accuracy=True)
    def correct(self, task: PromptedTask, rollout: Rollout) -> bool:
        given = _CITATION.sub("", find_answer(rollout.content) or "").strip(" .")
        cited = set(list_citations(rollout.content)) == set(task.metadata["documents"])
        rollout.metrics["citations_right"] = float(cited)
        return cited and same_answer(given, task.answer)


@dataclass(frozen=True, kw_only=True)
class WebPages(AnsweredTasks, InSandbox):
    """``type: web_pages``: a web site that the task's setup_command serves in the sandbox, by the tool ``browser``."""

    image: str | None = MACHINE
    tools: Any = ("browser",)

    def make(self, index: int, random: Random) -> PromptedTask:
        shop = Shop.make(random)
        name, question, answer, steps = (shop.price, shop.order, shop.login, shop.stock, shop.count)[index % 5](random)
        files = {"/srv/tiny_site.py": read_inside("tiny_site.py").decode(), "/srv/shop.json": json.dumps(shop.data)}
        wait = "import socket, time\nwhile socket.socket().connect_ex(('127.0.0.1', 8000)): time.sleep(0.05)"
        setup = f'cd /srv; python3 tiny_site.py shop.json < /dev/null > /dev/null 2>&1 & python3 -c "{wait}"'
        asked = f"A shop has its pages at http://127.0.0.1:8000. {question} {FORM}"
        calls = [ToolCall("open_page", {"address": "http://127.0.0.1:8000"}), *steps]
        return make_task(name, asked, answer, files=files, setup_command=setup, solution=[*calls, f"Answer: {answer}"])


def click(what: str) -> ToolCall:
    return ToolCall("click", {"what": what})


def fill(field: str, value: str) -> ToolCall:
    return ToolCall("fill", {"field": field, "value": value})


Asked = tuple[str, str, str, Sequence[ToolCall]]  # name, question, answer, calls


@dataclass(frozen=True)
class Shop:
    """What ``inside/tiny_site.py`` serves, and questions about it."""

    data: dict[str, Any]

    @classmethod
    def make(cls, random: Random) -> Shop:
        names = random.sample([f"{kind} {thing}" for kind in ("red", "blue", "old", "tall") for thing in THINGS], 12)
        items = [{"name": name, "price": random.randint(3, 99), "stock": random.randint(3, 9)} for name in names]
        words = {key: f"{random.getrandbits(32):08x}" for key in ("secret", "password")}
        return cls({"name": "Things", "items": items, "user": "kim", **words})

    def code(self, *parts: object) -> str:
        return hashlib.sha256("|".join(map(str, (self.data["secret"], *parts))).encode()).hexdigest()[:8]

    def _pick(self, random: Random) -> tuple[int, dict[str, Any], Sequence[ToolCall]]:
        number = random.randrange(len(self.data["items"]))
        item = self.data["items"][number]
        return number, item, (click("Search"), fill("words", item["name"]), click("Search"), click(item["name"]))

    def price(self, random: Random) -> Asked:
        _, item, steps = self._pick(random)
        return "price", f"What is the price of the {item['name']} in EUR?", str(item["price"]), steps

    def stock(self, random: Random) -> Asked:
        _, item, steps = self._pick(random)
        return "stock", f"How many of the {item['name']} are in stock?", str(item["stock"]), steps

    def order(self, random: Random) -> Asked:
        number, item, steps = self._pick(random)
        some = random.randint(2, item["stock"])
        question = f"Order {some} of the {item['name']}. What code does the order have?"
        return "order", question, self.code("order", number, some), (*steps, fill("quantity", str(some)), click("Order"))

    def login(self, random: Random) -> Asked:
        password = self.data["password"]
        steps = (click("Account"), fill("user", "kim"), fill("password", password), click("Log in"))
        return "login", f"Log in as kim with the password {password}. What is your voucher?", self.code("voucher"), steps

    def count(self, random: Random) -> Asked:
        word = random.choice(THINGS)
        found = sum(word in item["name"] for item in self.data["items"])
        steps = (click("Catalogue"), click("Next page"), click("Next page"))
        return "count", f"How many items of the catalogue are a {word}?", str(found), steps
