"""Rewards of programs: 64 rollouts at once, 10 tests each. How many programs a second, how long a rollout waits, and whether generation
waits with it (the lag of the event loop that both share).

    python benchmarks/code_grading.py
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from strop.extensions.code.grade_code import CodeGrade, GradingRules, grade_code
from strop.extensions.code.problem_rows import AssertTest, CallTest, CodeProblem, StdioTest, Test
from strop.extensions.code.sandbox.base import Limits
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox

RULES = GradingRules(limits=Limits(cpu_s=6, wall_s=30))
TICK_S = 0.005


def make_tests(kind: str, count: int) -> tuple[Test, ...]:
    if kind == "stdin":
        return tuple(StdioTest(f"{n}\n", f"{n * n}\n") for n in range(count))
    if kind == "calls":
        return tuple(CallTest("square", (n,), (n * n,)) for n in range(count))
    return tuple(AssertTest(f"assert square({n}) == {n * n}") for n in range(count))


async def measure_lag(lags: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - started - TICK_S)


async def measure(kind: str, rollouts: int, tests: int) -> None:
    problem = CodeProblem(question="", tests=make_tests(kind, tests))
    code = "print(int(input()) ** 2)" if kind == "stdin" else "def square(x):\n    return x * x"
    waits: list[float] = []

    async def grade(number: int) -> CodeGrade:
        started = time.perf_counter()
        grade = await grade_code(get_sandbox(), problem, f"{code}\n# {number}", "python", RULES)
        waits.append(time.perf_counter() - started)
        return grade

    await asyncio.gather(*(grade(-number) for number in range(8)))  # workers are warm
    waits.clear()
    lags: list[float] = []
    ticking = asyncio.create_task(measure_lag(lags))
    started = time.perf_counter()
    grades = await asyncio.gather(*(grade(number) for number in range(rollouts)))
    seconds = time.perf_counter() - started
    ticking.cancel()
    assert all(grade.correct for grade in grades)
    print(
        f"{kind:8} {rollouts / seconds:6.1f} rollouts/s  {rollouts * tests / seconds:7.1f} tests/s  "
        f"rollout p50 {find_percentile(waits, 0.5):.2f} s p95 {find_percentile(waits, 0.95):.2f} s  "
        f"loop lag p50 {1000 * find_percentile(lags, 0.5):.1f} ms p95 {1000 * find_percentile(lags, 0.95):.1f} ms "
        f"max {1000 * max(lags):.1f} ms"
    )


def find_percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--tests", type=int, default=10)
    options = parser.parse_args()
    for kind in ("stdin", "calls", "asserts"):
        await measure(kind, options.rollouts, options.tests)


if __name__ == "__main__":
    asyncio.run(main())
