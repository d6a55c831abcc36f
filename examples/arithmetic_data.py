"""Generate recorded data for the examples in docs/algorithms: sums, without access to a hub.

    python examples/arithmetic_data.py            # writes data/arithmetic/{conversations,preferences,judgements}_{train,validation}.jsonl

A hash of each sum assigns it to one of the two splits, so no question is in both.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop.data.sources.records import is_held_out

Row = Mapping[str, Any]


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer with just the number."


def conversation(a: int, b: int, draw: random.Random) -> Row:
    """Return a question and its answer; every third conversation has a second turn."""
    messages = [{"role": "user", "content": question(a, b)}, {"role": "assistant", "content": str(a + b)}]
    if draw.random() < 1 / 3:
        more = draw.randint(1, 20)
        messages += [{"role": "user", "content": f"Now add {more}."}, {"role": "assistant", "content": str(a + b + more)}]
    return {"messages": messages}


def wrong_answer(a: int, b: int, draw: random.Random) -> int:
    return a + b + draw.choice([-10, -2, -1, 1, 2, 10])


def preference(a: int, b: int, draw: random.Random) -> Row:
    """Return the correct answer as chosen, and a wrong or an evasive one as rejected. The margin is larger for the evasive one."""
    if draw.random() < 0.5:
        return {"prompt": question(a, b), "chosen": str(a + b), "rejected": str(wrong_answer(a, b, draw)), "margin": 0.5}
    evasive = f"That is not easy to say, but it might be {wrong_answer(a, b, draw)}."
    return {"prompt": question(a, b), "chosen": str(a + b), "rejected": evasive, "margin": 1.0}


def judgement(a: int, b: int, draw: random.Random) -> Row:
    """Return one answer of a preference and whether it is the chosen one."""
    row = preference(a, b, draw)
    desirable = draw.random() < 0.5
    return {"prompt": row["prompt"], "completion": row["chosen" if desirable else "rejected"], "label": desirable}


KINDS: Mapping[str, Callable[[int, int, random.Random], Row]] = {
    "conversations": conversation,
    "preferences": preference,
    "judgements": judgement,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("data/arithmetic"))
    parser.add_argument("--largest", type=int, default=50, help="the largest number in a sum")
    parser.add_argument("--train", type=int, default=1000, help="rows for training")
    parser.add_argument("--validation", type=int, default=100, help="rows held out")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sums = [(a, b) for a in range(1, options.largest + 1) for b in range(1, options.largest + 1)]
    random.Random(0).shuffle(sums)
    held = [is_held_out(question(*pair), 0.1) for pair in sums]
    parts = {
        "train": [pair for pair, out in zip(sums, held, strict=True) if not out][: options.train],
        "validation": [pair for pair, out in zip(sums, held, strict=True) if out][: options.validation],
    }
    for kind, make in KINDS.items():
        for part, pairs in parts.items():
            draw = random.Random(kind + part)
            path = options.folder / f"{kind}_{part}.jsonl"
            path.write_text("".join(json.dumps(make(a, b, draw)) + "\n" for a, b in pairs))
            print(f"{path}: {len(pairs)} rows")


if __name__ == "__main__":
    main()
