"""A view of one run saved to a file: the page of ``strop view`` in one HTML file, with the answers of its server inside.

A content security policy allows the page's own style and script by their hashes and images inside the file, and nothing else: what a model
wrote can neither run nor load anything, even if it came to stand in the page as markup.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop import __version__
from strop.extensions.reading.doctor import find_run
from strop.extensions.view.frequent_answers import count_answers
from strop.extensions.view.rollout_browser import RolloutBrowser
from strop.extensions.view.rollout_filter import RolloutFilter
from strop.extensions.view.run_health import RunHealth
from strop.extensions.view.run_status import describe_status
from strop.extensions.view.task_counts import make_question
from strop.extensions.view.token_texts import LOADING_SECONDS, TokenTexts, find_tokenizer_name
from strop.extensions.view.validation_browser import ValidationBrowser
from strop.extensions.view.viewed_run import ViewedRun, ViewError
from strop.safety.printable import make_printable
from strop.storage.files import atomic_write, clean_json

PAGE = Path(__file__).parent / "page"
POINTS = 400  # of a curve; more are put into buckets, with the range of each
ROLLOUTS = 24  # of a step, with their tokens
SAMPLES = 100  # of a validation
LARGEST_IMAGES = 16 * 2**20  # bytes, all together

_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">\n')
_SCRIPT = re.compile(r'<script type="module" src="([^"]+)"></script>\n')
_IMPORT = re.compile(r'^import\s+(?:(\w+)|\{([^}]*)\})\s+from\s+"([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class)\s+(\w+))", re.MULTILINE)
_EXPORT_FROM = re.compile(r'^export\s*\{([^}]*)\}\s+from\s+"([^"]+)";$', re.MULTILINE)
_EXPORT_LIST = re.compile(r"export\s*\{([^}]*)\};?\s*$")


class NothingToSave(ValueError):
    """There is nothing to show of a run. The message says what was found and what to do."""


def save_view(run: Path, target: Path | None, parse_yaml: Callable[[str], Any]) -> Path:
    """Write the view of a run, whole or not at all, by default as ``report.html`` in its log folder. Return the file.

    Raises NothingToSave, RunNotFound for a folder that holds no run, ViewError for files that cannot be read, and OSError.
    """
    folder = find_run(run)
    viewed = ViewedRun("run", folder, parse_yaml)
    if not viewed.metrics.names():
        raise NothingToSave(
            f"{folder} has no metrics yet: the run has not finished its first step; try again after it, or see strop doctor {folder}"
        )
    target = folder / "report.html" if target is None else target
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name the file to write", str(target))
    page = make_page(collect_answers(viewed))
    with atomic_write(target) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return target


def collect_answers(run: ViewedRun) -> dict[str, Any]:
    """Return what the page holds instead of a server: all that it asks about the run, and the first and last rollouts and samples."""
    about = f"runs/{run.id}"
    texts, config = TokenTexts(), run.describe_config()
    if (tokenizer := find_tokenizer_name(run.config())) is not None:
        with suppress(TimeoutError):
            texts.load(tokenizer).result(LOADING_SECONDS)
    names = run.metrics.names()
    metrics = {"names": names, "last_step": run.metrics.last_step(), **run.metrics.series(names, None, POINTS)}
    answers: dict[str, Any] = {
        "runs": [{**run.describe(), "folder": run.folder.name}],
        f"{about}/metrics": metrics,
        f"{about}/status": describe_status(run),
        f"{about}/health": RunHealth(run).describe(),
        f"{about}/config": config,
        f"{about}/replays": run.replays(),
        f"{about}/timeline": {**(shown := run.timeline(None, 1)), "first": shown["last"]},  # of the last step
    }
    steps = sorted({*run.rollouts.steps()[:1], *run.rollouts.steps()[-1:]})
    validated = sorted({*run.validation_steps()[:1], *run.validation_steps()[-1:]})
    answers |= dict(_collect_rollouts(run, steps, texts, about))
    answers |= dict(_collect_samples(run, validated, about))
    parts = (("rollouts of step", steps), ("samples of validation", validated))
    held = "; ".join(f"{name} {', '.join(map(str, some))}" for name, some in parts if some)
    note = f"Saved {time.strftime('%Y-%m-%d %H:%M')} by strop report {__version__}"
    note += f", with {held}. strop view shows all." if held else "."
    images = _collect_images(run, answers)
    saved: dict[str, Any] = clean_json({"note": note, "validations": validated, "images": images, "answers": answers})
    return saved


def _collect_rollouts(run: ViewedRun, steps: list[int], texts: TokenTexts, about: str) -> Iterator[tuple[str, Any]]:
    """Yield the rollouts of some steps: their list, each with its tokens, their groups, and the tasks over these steps."""
    browser = RolloutBrowser(run, texts)
    rows: list[dict[str, Any]] = []
    unreadable: list[str] = []
    tasks: dict[str, list[dict[str, Any]]] = {}
    run.rollouts.ensure(steps)
    for step in steps:
        found = browser.summarize(browser.find(RolloutFilter(steps=(step, step)), "step").take(0, ROLLOUTS))
        try:
            for row in found:
                yield f"{about}/rollouts/{step}/{row['group']}/{row['sample']}", browser.read(step, row["group"], row["sample"])
            for group, task in dict.fromkeys((row["group"], row["task"]) for row in found):
                read = browser.read_group(step, group)
                yield f"{about}/groups/{step}/{group}", read
                tasks.setdefault(task, []).append({"step": step, **read})
        except ViewError as error:
            unreadable.append(str(error))
            continue
        rows += found
    unreadable += [make_printable(why) for step, why in run.rollouts.unreadable().items() if step in steps]
    yield f"{about}/rollouts", {"total": len(rows), "rows": rows, "unreadable": unreadable, "parts": browser.reward_names()}
    yield f"{about}/answers", count_answers(browser)
    for task, answered in tasks.items():
        yield f"{about}/tasks/{task}", answered
    listed = [_describe_task(task, answered) for task, answered in sorted(tasks.items())]
    yield f"{about}/failures", browser.list_failures()
    yield f"{about}/tasks", {"total": len(listed), "rows": listed}


def _describe_task(task: str, answered: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [each["reward"] for step in answered for each in step["rollouts"] if each["reward"] is not None]
    steps = [each["step"] for each in answered]
    mean = sum(rewards) / len(rewards) if rewards else None
    question = make_question(answered[0]["prompt_messages"], "")
    count = sum(len(each["rollouts"]) for each in answered)
    return {
        "task": task,
        "question": question,
        "rollouts": count,
        "reward": mean,
        "steps": len(set(steps)),
        "last_step": max(steps),
    }


def _collect_samples(run: ViewedRun, steps: list[int], about: str) -> Iterator[tuple[str, Any]]:
    browser = ValidationBrowser(run)
    yield f"{about}/validation", browser.list_validations()
    yield f"{about}/answers?validation", count_answers(browser)
    for step in steps:
        try:
            listed = browser.page(step, RolloutFilter(), "step", "", 0, SAMPLES)
            for row in listed["rows"]:
                place = (step, row["group"], row["sample"])
                yield f"{about}/rollouts/{'/'.join(map(str, place))}?validation", browser.rollout(*place)
        except ViewError as error:
            listed = {"total": 0, "rows": [], "note": str(error)}
        yield f"{about}/validation/{step}", listed


def _collect_images(run: ViewedRun, answers: dict[str, Any]) -> dict[str, str]:
    """Return the images of the rollouts and samples as data URLs, as many as there is room for."""
    names = dict.fromkeys(name for answer in answers.values() if isinstance(answer, dict) for name in answer.get("images", ()))
    images: dict[str, str] = {}
    left = LARGEST_IMAGES
    for name in names:
        with suppress(ViewError, OSError):
            content, kind = run.image(name)
            left -= len(content)
            if left < 0:
                break
            images[name] = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return images


def make_page(saved: dict[str, Any]) -> str:
    """Return the page with what it holds: ``index.html`` with its style sheets and modules inside."""
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    style = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in _STYLE.findall(index))
    (entry,) = _SCRIPT.findall(index)
    script = _join_modules(PAGE / entry)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; form-action 'none'"
    # Not a character of the data can end its element.
    data = json.dumps(saved, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n</head>'
    body = f'<script type="application/json" id="saved">{data}</script>\n<script type="module">{script}</script>\n</body>'
    return _SCRIPT.sub("", _STYLE.sub("", index)).replace("</head>", head).replace("</body>", body)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _join_modules(entry: Path) -> str:
    """Return one script that does what a module and those that it imports do: each is a function that returns what it exports."""
    names: dict[Path, str] = {}
    pieces: list[str] = []

    def add(path: Path) -> str:
        path = path.resolve()
        if path not in names:
            text = path.read_text(encoding="utf-8")
            assert "</script" not in text, f"{path.name} would end the script"
            exported: dict[str, str] = {}

            def take(match: re.Match[str]) -> str:
                default, some, source = match[1], match[2], add(path.parent / match[3])
                wanted = {"default": default} if default else dict(_read_names(some))
                return f"const {{ {', '.join(f'{name}: {own}' for name, own in wanted.items())} }} = {source};"

            def pass_on(match: re.Match[str]) -> str:
                source = add(path.parent / match[2])
                exported.update({own: f"{source}.{name}" for name, own in _read_names(match[1])})
                return ""

            def put(match: re.Match[str]) -> str:
                exported.update({own: name for name, own in _read_names(match[1])})
                return ""

            text = _EXPORT_LIST.sub(put, _EXPORT_FROM.sub(pass_on, _IMPORT.sub(take, text)))
            exported = exported or {name: name for name in _EXPORT.findall(text)}  # a module has a list, or marks what it exports
            names[path] = f"module{len(names)}"
            returned = ", ".join(f"{name}: {own}" for name, own in exported.items())
            pieces.append(f"const {names[path]} = (() => {{\n{_EXPORT.sub('', text)}\nreturn {{ {returned} }};\n}})();\n")
        return names[path]

    add(entry)
    return "".join(pieces)


def _read_names(text: str) -> list[tuple[str, str]]:
    """``a, b as c`` -> (a, a), (b, c)"""
    parts = [part.split(" as ") for part in text.split(",") if part.strip()]
    return [(part[0].strip(), part[-1].strip()) for part in parts]
