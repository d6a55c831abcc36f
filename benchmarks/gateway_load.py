"""Thousands of concurrent episodes of agents against the gateway and an engine that only waits: latency, memory, nothing lost or mixed.

    python benchmarks/gateway_load.py --sessions 2000 --minutes 10 --processes 2

The agents are plain HTTP clients in a process of their own; every second one speaks Anthropic's Messages, every fourth one streams. Each
continues its history for 12 turns, then another session takes its place, so that the number of open sessions stays the same. The engine
answers after 5 to 15 seconds (a uniform draw) with the numbers of the session and of its turn. The client checks both in each reply; the
training process checks each closed session: all turns there, in one path, each token of this session. Half-way one process of the gateway
is killed.

What is printed: requests per second; quantiles of the time that a request took beyond what its engine waited; resident memory of the
training process and of the gateway's over the run; sessions by ending; what the event loop of the training process was late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from loop.tiny import tiny_tokenizer
from strop.base_config import validate_section
from strop.endings import Ending, find_ending
from strop.extensions.agents.gateway.agent_session import SessionOptions
from strop.extensions.agents.gateway.gateway import Gateway
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.generation.base import Completion
from strop.models.chat_template import ChatTemplate
from strop.sampling import Sampling
from strop.types import Rollout, Task

TURNS = 12
WAITS = (5.0, 15.0)  # seconds that the engine takes
RULES = "You are an agent in a container. Read the files, run the tests, and say what you found. " * 6
RESULT = "drwxr-xr-x 2 root root 4096 Nov 29 06:35 tests\n" * 4
EMPTY = torch.zeros(0, dtype=torch.int64)


class WaitingEngine:
    """Answers with the session, the number of its turn and how long it waited."""

    version = 0

    def __init__(self, tokenizer: Any, scale: float) -> None:
        self.tokenizer, self.scale = tokenizer, scale
        self.turns: Counter[str] = Counter()

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        self.turns[session] += 1
        turn = self.turns[session]
        if turn == TURNS:
            del self.turns[session]
        wait = self.scale * random.uniform(*WAITS)
        begun = time.perf_counter()
        await asyncio.sleep(wait)
        text = f"session={int(session, 16)} turn={turn} wait={time.perf_counter() - begun:.5f} I look at the files and go on."
        tokens = [*self.tokenizer.convert_tokens_to_ids(list(text)), self.tokenizer.eos_token_id]
        count = len(tokens)
        return Completion(
            tokens=torch.tensor(tokens), logprobs=torch.full((count,), -0.5), versions=torch.zeros(count, dtype=torch.int32), text=text,
            stopped=True,
        )  # fmt: skip

    async def close(self) -> None: ...


class Agent:
    """A client of one session."""

    def __init__(self, http: aiohttp.ClientSession, stopping: asyncio.Event, number: int, url: str, key: str) -> None:
        self.http, self.stopping, self.number, self.url, self.key = http, stopping, number, url, key
        self.answered: list[tuple[float, float]] = []  # when, and how long it took beyond the engine's wait (s)

    async def ask(self, messages: list[dict[str, str]]) -> str:
        """Return the text of a reply."""
        stream, anthropic = self.number % 4 == 0, self.number % 2 == 1
        headers = {"Authorization": f"Bearer {self.key}"}
        body: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": messages, "stream": stream}
        path = "chat/completions"
        if anthropic:
            path, body = "messages", {**body, "system": RULES}
        else:
            body["messages"] = [{"role": "system", "content": RULES}, *messages]
        while True:
            async with self.http.post(f"{self.url}/{path}", json=body, headers=headers) as answer:
                if answer.status in (429, 503, 529):
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                    continue
                answer.raise_for_status()
                if not stream:
                    found = await answer.json()
                    text: str = found["content"][0]["text"] if anthropic else found["choices"][0]["message"]["content"]
                    return text
                events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: {")]
                deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
                return "".join(delta.get("content") or "" for delta in deltas)

    async def run(self) -> str:
        """Run the session. Returns what is wrong, "" if nothing is."""
        messages = [{"role": "user", "content": f"task of session {self.number}"}]
        try:
            for turn in range(1, TURNS + 1):
                if self.stopping.is_set():
                    break
                begun = time.perf_counter()
                text = await self.ask(messages)
                took = time.perf_counter() - begun
                said = dict(part.split("=") for part in text.split()[:3])
                if (int(said["session"]), int(said["turn"])) != (self.number, turn):
                    return f"turn {turn} of session {self.number} got {text}"
                self.answered.append((time.perf_counter(), took - float(said["wait"])))
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}\n{RESULT}"}]
        except (aiohttp.ClientError, OSError) as error:
            return f"lost: {error!r:.300}"
        return ""


def run_clients(connection: Any) -> None:
    """Run agents as they are told to: (number, url, key) in, (number, problem, answered) out; "stop" ends them after a turn, None all."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        connector, unlimited = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        tasks: set[asyncio.Task[None]] = set()
        stopping = asyncio.Event()
        async with aiohttp.ClientSession(connector=connector, timeout=unlimited) as http:

            async def run(number: int, url: str, key: str) -> None:
                agent = Agent(http, stopping, number, url, key)
                problem = await agent.run()
                connection.send((number, problem, agent.answered))

            arrived: asyncio.Queue[Any] = asyncio.Queue()
            loop.add_reader(connection.fileno(), lambda: arrived.put_nowait(connection.recv()))
            while (asked := await arrived.get()) is not None:
                if asked == "stop":
                    stopping.set()
                    continue
                task = asyncio.ensure_future(run(*asked))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(main())


def resident_mb(pid: int | None) -> float:
    """Return the memory that a process has to itself or shares, 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def check_rollout(rollout: Rollout, number: int, turns: int, tokenizer: Any) -> str:
    """Return what is wrong with the rollout of a session whose agent got this many replies."""
    if rollout.branches or len(rollout.policy_turns) != turns:
        return f"session {number} has {len(rollout.policy_turns)} turns of {turns} and {len(rollout.branches)} branches"
    if f"task of session {number}<" not in tokenizer.decode(rollout.prompt.tolist()):
        return f"session {number} has another prompt"
    for index, turn in enumerate(rollout.policy_turns, 1):
        text = tokenizer.decode(turn.tokens.tolist())
        if not text.startswith(f"session={number} turn={index} wait=") or len(turn.logprobs) != len(turn.tokens):
            return f"turn {index} of session {number} is {text}"
    return ""


class Load:
    """Keeps the sessions open, and counts how they end."""

    def __init__(self, gateway: Gateway, connection: Any, engine: WaitingEngine, sessions: int) -> None:
        self.gateway, self.connection, self.engine = gateway, connection, engine
        self.template = ChatTemplate(engine.tokenizer)
        self.sessions, self.next, self.stopping = sessions, 0, False
        self.done: dict[int, asyncio.Future[tuple[str, int]]] = {}
        self.answered: list[tuple[float, float]] = []
        self.steady = (0.0, 0.0)  # from when to when all sessions were open
        self.endings: Counter[str] = Counter()
        self.lost_after: list[float] = []  # seconds from the kill to the end of a session that it ended
        self.killed_at = 0.0
        self.wrong: list[str] = []
        self.late: list[float] = []
        self.memory: list[Mapping[str, float]] = []

    def receive(self) -> None:
        number, problem, answered = self.connection.recv()
        self.answered += answered
        done = self.done.pop(number, None)
        if done is not None:
            if not done.done():  # cancelled with its session
                done.set_result((problem, len(answered)))
        elif not problem.startswith("lost"):
            self.wrong.append(f"session {number} ended twice")

    async def run_session(self) -> None:
        number, self.next = self.next, self.next + 1
        rollout = Rollout(task=Task(id=f"t{number}"), sample=0, seed=number, messages=(), prompt=EMPTY)
        options = SessionOptions(seed=number, sample=0, sampling=Sampling(max_new_tokens=200), max_turns=1000, max_length=16_384)
        self.done[number] = asyncio.get_running_loop().create_future()
        try:
            async with self.gateway.open(rollout, options, self.engine, self.template) as opened:
                self.connection.send((number, opened.endpoint.base_url, opened.endpoint.api_key))
                problem, turns = await self.done[number]
        except Exception as error:
            self.done.pop(number, None)
            self.endings[str(find_ending(error))] += 1
            self.lost_after.append(time.perf_counter() - self.killed_at)
            return
        found = opened.outcome.rollout
        if found is not None:
            problem = problem or check_rollout(found, number, turns, self.engine.tokenizer)
        elif turns:
            problem = problem or f"session {number} has no rollout of {turns} turns"
        self.endings["wrong" if problem else str(found.ending) if found is not None else "not begun"] += 1
        if problem:
            self.wrong.append(problem)

    async def keep_open(self, delay: float) -> None:
        await asyncio.sleep(delay)
        while not self.stopping:
            await self.run_session()

    async def measure(self) -> None:
        """Record memory every ten seconds, and how late the event loop is."""
        while True:
            processes = {f"gateway {index}": resident_mb(each.pid) for index, each in enumerate(self.gateway.processes)}
            self.memory.append({"training process": resident_mb(os.getpid()), **processes})
            for _ in range(100):
                begun = time.perf_counter()
                await asyncio.sleep(0.1)
                self.late.append(time.perf_counter() - begun - 0.1)

    async def run(self, minutes: float, ramp: float) -> None:
        """Keep the sessions open for some minutes after the first ones began, and kill a process half-way."""
        asyncio.get_running_loop().add_reader(self.connection.fileno(), self.receive)
        measuring = asyncio.ensure_future(self.measure())
        running = [asyncio.ensure_future(self.keep_open(ramp * index / self.sessions)) for index in range(self.sessions)]
        await asyncio.sleep(ramp)
        begun = time.perf_counter()
        await asyncio.sleep(30 * minutes)
        if victim := next((each.pid for each in self.gateway.processes if each.pid), None):
            print(f"killing process {victim} after {30 * minutes:.0f} s", flush=True)
            self.killed_at = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
        await asyncio.sleep(30 * minutes)
        self.stopping, self.steady = True, (begun, time.perf_counter())
        self.connection.send("stop")
        await asyncio.gather(*running)
        asyncio.get_running_loop().remove_reader(self.connection.fileno())
        measuring.cancel()


def report(load: Load) -> None:
    def quantiles(values: Sequence[float]) -> dict[str, float]:
        cuts = statistics.quantiles(values, n=100)
        return {name: round(1000 * cuts[index], 1) for name, index in (("p50 ms", 49), ("p95 ms", 94), ("p99 ms", 98))}

    begun, ended = load.steady
    seconds = [took for at, took in load.answered if begun <= at <= ended]
    rate = round(len(seconds) / (ended - begun), 1)
    print("requests", json.dumps({"answered": len(load.answered), "per second while all sessions were open": rate}))
    print("beyond the engine's wait", json.dumps({**quantiles(seconds), "max ms": round(1000 * max(seconds), 1)}))
    print("event loop of the training process late", json.dumps(quantiles(load.late)))
    for name in load.memory[-1]:
        values = [each[name] for each in load.memory if each.get(name)]
        middle = values[len(values) // 4 : len(values) // 2] or values
        late = values[3 * len(values) // 4 :]
        print(f"memory of {name}: {max(middle):.0f} MiB in the second quarter, {max(late):.0f} MiB in the last")
    service = load.endings[str(Ending.SERVICE)]
    after = f", {max(load.lost_after):.2f} s after the kill at most" if load.lost_after else ""
    print("sessions by ending", dict(load.endings), f"; {service} by the killed process{after}")
    opened = load.next
    print(f"sessions opened {opened}, accounted for {sum(load.endings.values())}, wrong {len(load.wrong)}", *load.wrong[:5])
    if load.wrong or opened != sum(load.endings.values()):
        raise SystemExit("sessions were lost or mixed")


async def main(arguments: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    clients = context.Process(target=run_clients, args=(other,))
    clients.start()
    gateway = Gateway(validate_section(GatewayConfig, {"processes": arguments.processes}))
    load = Load(gateway, own, WaitingEngine(tiny_tokenizer(), arguments.wait_scale), arguments.sessions)
    try:
        async with gateway.held():
            await load.run(arguments.minutes, arguments.ramp)
    finally:
        own.send(None)
        clients.join(10)
        clients.kill()
    report(load)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ramp", type=float, default=30, help="seconds over which the first sessions begin")
    parser.add_argument("--wait-scale", type=float, default=1.0, help="of the engine's waits")
    asyncio.run(main(parser.parse_args()))
