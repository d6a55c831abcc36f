"""What the view answers: its HTTP API, all JSON, and the page."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web

from strop.extensions.replay.token_ledger import LedgerError, make_ledger
from strop.extensions.view.access_guard import LONGEST_BODY, AccessGuard, add_headers
from strop.extensions.view.config_defaults import flatten
from strop.extensions.view.frequent_answers import count_answers
from strop.extensions.view.rollout_browser import RolloutBrowser
from strop.extensions.view.rollout_filter import ORDERS, RolloutFilter, is_order
from strop.extensions.view.run_health import RunHealth
from strop.extensions.view.run_status import RunCatalogue, describe_status
from strop.extensions.view.token_texts import STARS_FILE, TokenTexts, change_star, read_stars
from strop.extensions.view.validation_browser import ValidationBrowser
from strop.extensions.view.viewed_run import ViewedRun, ViewError
from strop.safety.http_server import (
    Handler,
    listening,
    make_address,
    make_app,
    make_local,
    naming_address,
    parse_json,
    read_body,
    stop_event,
)
from strop.safety.printable import make_printable
from strop.safety.site_guard import BadRequest
from strop.storage.files import clean_json

log = logging.getLogger(__name__)

LARGEST = 2**53


def answer_json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value, allow_nan=False).encode(), status=status, content_type="application/json")


def in_thread(answer: Callable[[web.Request], Any]) -> Handler:
    """Return an endpoint that answers what a function returns, which reads files and runs in a thread."""

    def respond(request: web.Request) -> web.Response:
        value = answer(request)
        return value if isinstance(value, web.Response) else answer_json(value)

    async def endpoint(request: web.Request) -> web.Response:
        return await asyncio.to_thread(respond, request)

    return endpoint


def answer_error(error: Exception, request: web.Request) -> web.Response:
    """Answer with a sentence for the reader of the page."""
    if isinstance(error, BadRequest) and request.path == "/":
        text = f"<!doctype html><title>Strop</title><p>Not shown: {str(error).replace('`', '')}</p>"
        return web.Response(text=text, status=error.status, content_type="text/html")
    if isinstance(error, BadRequest | ViewError):
        return answer_json({"error": str(error)}, error.status)
    if isinstance(error, OSError):  # a folder that is being removed, a disk that went away
        return answer_json({"error": f"a file of the run cannot be read: {error.strerror or error}"}, 422)
    log.error("%s cannot be answered", request.path, exc_info=error)
    return answer_json({"error": f"this cannot be shown ({type(error).__name__}: {str(error)[:200]})"}, 422)


def read_int(request: web.Request, name: str, default: int | None = None) -> int | None:
    text = request.query.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < LARGEST:
        raise ViewError(f"{name}: found {text[:40]!r}; give a whole number from 0 on", 400)
    return value


def read_count(request: web.Request, name: str, default: int) -> int:
    value = read_int(request, name, default)
    return default if value is None else value


def read_float(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ViewError(f"{name}: found {text[:40]!r}; give a number", 400) from None


def read_place(request: web.Request) -> tuple[int, int, int]:
    """Return step, group and sample of a path."""
    step, group, *sample = (int(request.match_info[name]) for name in ("step", "group", "sample") if name in request.match_info)
    return step, group, sample[0] if sample else 0


def read_filter(request: web.Request) -> RolloutFilter:
    """Return the conditions of a request for rollouts. Raises ViewError."""
    words = request.query

    def word(name: str) -> str | None:
        return words.get(name) or None

    kept = {"": None, "1": True, "true": True, "0": False, "false": False}.get(words.get("kept", "").lower(), "unknown")
    if kept == "unknown":
        raise ViewError(f"kept: found {words['kept'][:40]!r}; give 1 or 0", 400)
    return RolloutFilter(
        steps=_read_steps(request),
        task=word("task"),
        environment=word("env"),
        ending=word("ending"),
        answer=word("answer"),
        part=words.get("part", ""),
        kept=None if kept is None else bool(kept),
        reward=(read_float(request, "reward_min"), read_float(request, "reward_max")),
        tokens=(read_float(request, "tokens_min"), read_float(request, "tokens_max")),
    )


def _read_steps(request: web.Request) -> tuple[int, int] | None:
    step = read_int(request, "step")
    if step is not None:
        return step, step
    text = request.query.get("steps", "")
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not (first.isdecimal() or not first) or not (last.isdecimal() or not last) or len(text) > 30 or not (first or last):
        raise ViewError(f"steps: found {text[:40]!r}; give a range such as 10-20, 10- or -20", 400)
    low = int(first or 0)
    return low, int(last) if last else (LARGEST if dash else low)


def read_order(request: web.Request) -> str:
    order = request.query.get("sort") or "-step"
    if not is_order(order):
        raise ViewError(
            f"sort: found {order[:40]!r}; give one of {', '.join(ORDERS)} or rewards.NAME, or -reward for the best first", 400
        )
    return order


POINTS = 2000
WARM_RUNS = 3


class ViewRoutes:
    """Answers requests from the runs of a catalogue."""

    def __init__(self, catalogue: RunCatalogue, guard: AccessGuard) -> None:
        self.catalogue, self._guard = catalogue, guard
        self._texts = TokenTexts()
        self._browsers: dict[Path, tuple[RolloutBrowser, ValidationBrowser]] = {}
        self._health: dict[Path, RunHealth] = {}

    def make_app(self) -> web.Application:
        step, group = r"{step:[0-9]+}", r"{group:[0-9]+}"
        place = f"{step}/{group}/{{sample:[0-9]+}}"
        answers: dict[str, Callable[[web.Request], Any]] = {
            "/api/runs": self.list_runs,
            "/api/compare/config": self.compare_config,
            "/api/stars/export": self.export_stars,
            "/api/runs/{run}/metrics": self.metrics,
            "/api/runs/{run}/status": self.status,
            "/api/runs/{run}/health": self.health,
            "/api/runs/{run}/timeline": self.timeline,
            "/api/runs/{run}/config": self.config,
            "/api/runs/{run}/rollouts": self.rollouts,
            f"/api/runs/{{run}}/rollouts/{place}": self.rollout,
            f"/api/runs/{{run}}/groups/{step}/{group}": self.group,
            "/api/runs/{run}/answers": self.answers,
            "/api/runs/{run}/tasks": self.tasks,
            "/api/runs/{run}/failures": self.failures,
            r"/api/runs/{run}/tasks/{task:[\s\S]*}": self.task,
            "/api/runs/{run}/validation": self.validations,
            f"/api/runs/{{run}}/validation/{step}": self.validation,
            f"/api/runs/{{run}}/ledger/{place}": self.ledger,
            "/api/runs/{run}/replays": self.replays,
            "/api/runs/{run}/images/{name}": self.image,
            "/api/runs/{run}/stars": self.stars,
            "/{name:.*}": self.page,
        }
        app = make_app(self._guard.check, answer_error, max_body=LONGEST_BODY)
        app.on_response_prepare.append(add_headers)
        app.add_routes([web.get(path, in_thread(answer)) for path, answer in answers.items()])
        app.router.add_put("/api/runs/{run}/stars", self.put_star)
        return app

    def warm_up(self) -> None:
        """Read what the page asks for first, of the newest runs, while the browser is being opened."""
        for run in self.catalogue.list_runs()[:WARM_RUNS]:
            try:
                run.describe()
                run.metrics.names()
                self.browsers(run)[0].prepare(RolloutFilter())
            except Exception as error:  # the client is told on request
                log.info("%s: %s", run.folder, error)

    def run(self, request: web.Request) -> ViewedRun:
        return self.catalogue.find(request.match_info["run"])

    def browsers(self, run: ViewedRun) -> tuple[RolloutBrowser, ValidationBrowser]:
        if run.folder not in self._browsers or self._browsers[run.folder][0].run is not run:
            self._browsers[run.folder] = (RolloutBrowser(run, self._texts), ValidationBrowser(run))
        return self._browsers[run.folder]

    def page(self, request: web.Request) -> web.Response:
        if request.path == "/" and "token" in request.query:
            return self._guard.enter(request)
        name = request.match_info["name"] or "index.html"
        found = None if name.startswith("api/") else read_page_file(name)
        if found is None:
            raise ViewError(f"there is no {make_printable(request.path)[:200]}")
        content, kind = found
        return web.Response(body=content, headers={"Content-Type": kind, "Cache-Control": "no-cache"})

    def list_runs(self, request: web.Request) -> Any:
        described = []
        for run in self.catalogue.list_runs():
            try:
                described.append(clean_json(run.describe()))
            except OSError:  # removed meanwhile
                continue
            except Exception as error:  # one run that cannot be read hides no other
                log.exception("%s cannot be described", run.folder)
                described.append(run.describe_unread(error))
        return described

    def metrics(self, request: web.Request) -> Any:
        history = self.run(request).metrics
        names = [name for name in request.query.get("names", "").split(",") if name]
        if not names:
            return {"names": history.names(), "last_step": history.last_step()}
        return history.series(names, read_int(request, "since"), read_count(request, "points", POINTS))

    def status(self, request: web.Request) -> Any:
        return describe_status(self.run(request))

    def health(self, request: web.Request) -> Any:
        run = self.run(request)
        if run.folder not in self._health or self._health[run.folder].run is not run:
            self._health[run.folder] = RunHealth(run)
        return self._health[run.folder].describe()

    def timeline(self, request: web.Request) -> Any:
        """Return the last steps up to one, each with what its samples waited for."""
        return self.run(request).timeline(read_int(request, "step"), read_count(request, "count", 1))

    def config(self, request: web.Request) -> Any:
        return self.run(request).describe_config()

    def compare_config(self, request: web.Request) -> Any:
        first, second = (dict(flatten(self.catalogue.find(request.query.get(name, "")).config())) for name in ("a", "b"))
        keys = [key for key in sorted({*first, *second}) if key not in first or key not in second or first[key] != second[key]]
        return clean_json([{"key": key, "a": first.get(key), "b": second.get(key)} for key in keys])

    def rollouts(self, request: web.Request) -> Any:
        rollouts, validations = self.browsers(self.run(request))
        text = request.query.get("text", "")[:1000]
        page = (read_order(request), text, read_count(request, "from", 0), read_count(request, "limit", 50))
        if request.query.get("validation") in ("1", "true"):
            return validations.page(None, read_filter(request), *page)
        return rollouts.list_rollouts(read_filter(request), *page)

    def rollout(self, request: web.Request) -> Any:
        rollouts, validations = self.browsers(self.run(request))
        of_validation = request.query.get("validation") in ("1", "true")
        return (validations.rollout if of_validation else rollouts.read)(*read_place(request))

    def group(self, request: web.Request) -> Any:
        step, group, _ = read_place(request)
        return self.browsers(self.run(request))[0].read_group(step, group)

    def tasks(self, request: web.Request) -> Any:
        text, order = request.query.get("text", "")[:1000], request.query.get("sort", "")
        return self.browsers(self.run(request))[0].list_tasks(
            text, order, read_count(request, "from", 0), read_count(request, "limit", 50)
        )

    def answers(self, request: web.Request) -> Any:
        """Return the most frequent final answers of some steps, or of some validations."""
        rollouts, validations = self.browsers(self.run(request))
        return count_answers(validations if request.query.get("validation") in ("1", "true") else rollouts)

    def failures(self, request: web.Request) -> Any:
        rollouts = self.browsers(self.run(request))[0]
        rollouts.prepare(RolloutFilter())
        return rollouts.list_failures()

    def task(self, request: web.Request) -> Any:
        return self.browsers(self.run(request))[0].follow_task(request.match_info["task"], read_count(request, "limit", 60))

    def validations(self, request: web.Request) -> Any:
        return self.browsers(self.run(request))[1].list_validations()

    def validation(self, request: web.Request) -> Any:
        text, first, limit = (
            request.query.get("text", ""),
            read_count(request, "from", 0),
            read_count(request, "limit", 50),
        )
        step = int(request.match_info["step"])
        return self.browsers(self.run(request))[1].page(step, read_filter(request), read_order(request), text, first, limit)

    def ledger(self, request: web.Request) -> Any:
        run = self.run(request)
        try:
            made = make_ledger(run.folder, *read_place(request))
        except (LedgerError, OSError) as error:
            raise ViewError(f"no ledger of this rollout: {str(error)[:500]}") from None
        return made.to_dict()

    def replays(self, request: web.Request) -> Any:
        return self.run(request).replays()

    def stars(self, request: web.Request) -> Any:
        return [vars(star) for star in read_stars(self.run(request).folder).values()]

    async def put_star(self, request: web.Request) -> web.StreamResponse:
        values = parse_json(await read_body(request))
        changed = in_thread(lambda asked: [vars(star) for star in change_star(self.run(asked).folder, values).values()])
        return await changed(request)

    def export_stars(self, request: web.Request) -> web.Response:
        """Return the starred rollouts of one run or all, each with its run, its note and everything that is stored, as JSON lines."""
        wanted = request.query.get("run")
        runs: Sequence[ViewedRun] = [self.catalogue.find(wanted)] if wanted else self.catalogue.list_runs()
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for run in runs for row in self._list_starred(run)]
        name = quote(f"{wanted or 'runs'}_{STARS_FILE}")
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Type": "application/x-ndjson; charset=utf-8"}
        return web.Response(body="".join(line + "\n" for line in lines).encode("utf-8", errors="replace"), headers=headers)

    def _list_starred(self, run: ViewedRun) -> list[dict[str, Any]]:
        rollouts, validations = self.browsers(run)
        rows = []
        for star in read_stars(run.folder).values():
            named = {"run": run.id, "note": star.note, "validation": star.validation}
            try:
                read = validations.rollout if star.validation else rollouts.read
                rows.append({**named, **read(star.step, star.group, star.sample)})
            except ViewError as error:
                rows.append({**named, "step": star.step, "group": star.group, "sample": star.sample, "error": str(error)})
        return rows

    def image(self, request: web.Request) -> web.Response:
        content, kind = self.run(request).image(request.match_info["name"].partition(".")[0])
        return web.Response(body=content, headers={"Content-Type": kind, "Content-Disposition": "inline"})


# The files of the page, which are part of the package: served by name from a list, never by a path that was asked for.


PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}


def read_page_file(name: str) -> tuple[bytes, str] | None:
    """Return the content and the type of a file; None if there is none of this name."""
    found = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*") if path.suffix in TYPES and path.is_file()}
    path = found.get(name)
    return None if path is None else (path.read_bytes(), TYPES[path.suffix])


REQUESTS = 40  # that are answered at a time, each in a thread


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Where the view listens, and whether it asks for a token."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    token: str | None = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)


class ViewServer:
    """A view of runs that listens from the moment it is made. Raises OSError if the address cannot be listened on."""

    def __init__(self, places: Sequence[Path], options: ViewOptions, parse_yaml: Callable[[str], Any]) -> None:
        """``parse_yaml`` reads the configuration of runs that have no history of it."""
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        with naming_address(options.host, options.port):
            self._socket = socket.create_server((options.host, options.port), family=family)
        self.guard = AccessGuard(token=options.token, host=options.host, port=self._socket.getsockname()[1])
        self.catalogue = RunCatalogue(places, parse_yaml)
        self.api = ViewRoutes(self.catalogue, self.guard)

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        token = "" if self.guard.token is None else f"?token={self.guard.token}"
        return f"{make_local(make_address(self.guard.host, self.guard.port))}/{token}"

    async def serve(self) -> None:
        """Serve until Ctrl-C. SIGTERM ends the process at once: it writes only whole files."""
        stopped = stop_event([signal.SIGINT])
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(REQUESTS))
        async with listening(self.api.make_app(), self._socket, cancels=False):
            await stopped.wait()

    def close(self) -> None:
        self._socket.close()
