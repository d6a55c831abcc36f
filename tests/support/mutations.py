"""Configurations and data files as a slip of the hand or a broken copy would leave them, the same for the same seed."""

from __future__ import annotations

import csv
import io
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet

ROOT = Path(__file__).parents[2]

KINDS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation", "eval")


class TookTooLong(BaseException):
    """A case ran past its limit; not an Exception, so that nothing under test catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the main thread after this much processor time, so that a busy machine does not matter."""

    def stop(*_: object) -> None:
        raise TookTooLong

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


# --- configurations --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigCase:
    """A configuration file, the kind of run it is read as, and overrides."""

    text: bytes
    kind: str
    overrides: tuple[str, ...] = ()


def example_texts() -> list[tuple[str, str]]:
    """(kind of run, text) of every example and of a recipe in NeMo-RL's style."""
    found = []
    for path in sorted((ROOT / "examples" / "configs").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8").replace("\ndefaults: ", f"\ndefaults: {path.parent}/")
        found.append((next((kind for kind in KINDS if f"\n{kind}:" in f"\n{text}"), "grpo"), text))
    return [*found, ("grpo", NEMO_RL_LIKE)]


NEMO_RL_LIKE = """
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 10, val_period: 0, val_batch_size: 4}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.2, token_level_loss: true}
checkpointing: {enabled: true, checkpoint_dir: results/x, metric_name: null, model_save_format: safetensors}
policy:
  model_name: &model Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}", chat_template_kwargs: null}
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}
  max_total_sequence_length: 512
  dtensor_cfg: {_v2: true, enabled: true, cpu_offload: false, tensor_parallel_size: 1}
  megatron_cfg: {enabled: false, converter_type: Qwen2ForCausalLM}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1e-8}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - {milestones: [50]}
  generation: {backend: torch, max_new_tokens: 64, temperature: 1.0, top_p: 1.0, top_k: null}
data: {train: {env_name: arithmetic, size: 64}}
env: {arithmetic: {}}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""

WRONG_VALUES = (
    "null", "~", "true", "-1", "0", "1e400", ".inf", "-.inf", ".nan", "1e30", "9" * 5000, "''", "[]", "{}", "[[]]",
    "'\\0'", '"\\0"', '"\\ud800"', "${policy.model_name}", "${", "${nope.nope}", "${mul:x,2}", "${div:1,0}", "\\${x}",
    "${env:HOME}", "${..a}", "${oc.env:HOME}", "!!python/object:os.system x", "!!binary aGk=", "!!set {a}",
    "2026-01-01", "1:30:00", "*model", "&a [*a]", "{null: 1}", "{[1, 2]: 3}", "{? {a: 1} : 2}",
    "<<", "{<<: 3}", "|\n    x\n    y", "'" + "\\" * 50 + "'", "\u202e\u0000", "nan", "inf", "1_000", "0o17", "+5", "5.",
    "../../..", "/dev/null", "{type: nowhere.py:Thing}", "{type: math, no_such: 1}", "{reward: os:system}", "x:y", "grpo", "sapo",
    "/", ".", "[1, a, null]", "-",
)  # fmt: skip

WRONG_DOCUMENTS = (
    "policy: &p {q: *p}",
    "a: &a [*a]",
    "defaults: " + "d" * 5000,
    'defaults: "a\\0b"',
    "defaults: [1, {a: b}]",
    "defaults: .",
    "policy: {null: 3}",
    "policy: {? [1] : 3}",
    "\x00\x01\x02",
    "- a\n- b",
    "true",
    "{",
    "%YAML 9.9\n---\na: 1",
    "a: 1\n---\nb: 2",
    "? a",
    "policy: {optimizer: {kwargs: {lr: .nan}}}",
    "\ufeffgrpo: {seed: 1}",
)


def mutate_config(random: Random, examples: list[tuple[str, str]]) -> ConfigCase:
    """Return an example with one to three changes, or a document that is wrong as a whole."""
    if random.random() < 0.03:
        return ConfigCase(random.choice(WRONG_DOCUMENTS).encode(errors="surrogatepass"), random.choice(KINDS))
    kind, text = random.choice(examples)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        text = random.choice(TEXT_MUTATIONS)(random, text)
    data = text.encode(errors="surrogatepass")
    if random.random() < 0.1 and data:
        place = random.randrange(len(data))
        data = data[:place] + bytes([random.randrange(256)]) + data[place + 1 :]
    overrides = (_override(random, text),) if random.random() < 0.15 else ()
    return ConfigCase(data, kind if random.random() < 0.95 else random.choice(KINDS), overrides)


def _override(random: Random, text: str) -> str:
    key = random.choice(["grpo.seed", "policy", "data.train", "env", "policy.optimizer.kwargs.lr", "", "data.train.0.size"])
    return random.choice(["", "+", "++", "~"]) + key + "=" + random.choice(WRONG_VALUES)


def _set_value(random: Random, text: str) -> str:
    lines = text.split("\n")
    places = [n for n, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("#")]
    if places:
        place = random.choice(places)
        lines[place] = lines[place].split(":")[0] + ": " + random.choice(WRONG_VALUES)
    return "\n".join(lines)


def _drop_line(random: Random, text: str) -> str:
    lines = text.split("\n")
    lines.pop(random.randrange(len(lines)))
    return "\n".join(lines)


def _repeat_line(random: Random, text: str) -> str:
    lines = text.split("\n")
    lines.insert(random.randrange(len(lines)), random.choice(lines))
    return "\n".join(lines)


def _indent_line(random: Random, text: str) -> str:
    lines = text.split("\n")
    place = random.randrange(len(lines))
    lines[place] = random.choice(["  ", "\t", "      ", ""]) + (lines[place].lstrip() if random.random() < 0.5 else lines[place])
    return "\n".join(lines)


def _cut(random: Random, text: str) -> str:
    return text[: random.randrange(len(text) + 1)]


def _misspell(random: Random, text: str) -> str:
    place = random.randrange(len(text) + 1)
    written: str = random.choice([*"{}[]:,&*!|>'\"%@`#-? \t\n", "\0", "\u2028", "é", "${", "}", ""])
    return text[:place] + written + text[place + random.randint(0, 2) :]


TEXT_MUTATIONS: tuple[Callable[[Random, str], str], ...] = (
    _set_value, _set_value, _set_value, _drop_line, _repeat_line, _indent_line, _cut, _misspell, _misspell,
)  # fmt: skip

# --- data files ------------------------------------------------------------------------------------------------------------

ROWS: tuple[dict[str, Any], ...] = tuple(
    {
        "problem": f"What is {n} + 1?",
        "answer": str(n + 1),
        "messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}"}],
        "prompt": f"{n}?",
        "chosen": f"{n + 1}",
        "rejected": "no",
        "margin": 0.5,
        "label": n % 2 == 0,
    }
    for n in range(6)
)

WRONG_FIELDS: tuple[Any, ...] = (
    None, True, 0, -1, 10**400, 1e308, float("nan"), float("inf"), "", " ", "\0", "\ud800", "nan", "inf", "x" * 5000, [], {}, [[]],
    [None], [{"role": "user"}], [{"role": "x", "content": "y"}], [{"role": "user", "content": None}], {"a": {"b": 1}}, "\u202e",
    "a\nb", [{"role": "user", "content": "\ud800"}], [1, "a", None], "maybe",
    [{"role": "user", "content": [{"type": "image"}]}],
)  # fmt: skip


@dataclass(frozen=True)
class DataCase:
    """A data file and how it is read."""

    suffix: str
    data: bytes
    kind: str  # tasks, conversations, preferences or judgements
    split: float = 0.0


def mutate_data(random: Random) -> DataCase:
    """Return a data file with wrong fields, or bytes changed, cut, doubled or in another encoding."""
    suffix = random.choice([".jsonl", ".jsonl", ".json", ".csv", ".parquet"])
    rows = [dict(row) for row in ROWS]
    for _ in range(random.randint(0, 2)):
        row = random.choice(rows)
        key = random.choice([*row, "other", "\ud800", ""])
        if random.random() < 0.3:
            row.pop(key, None)
        else:
            row[key] = random.choice(WRONG_FIELDS)
    data = _write_rows(rows, suffix)
    for _ in range(random.randint(0, 2)):
        data = random.choice(BYTE_MUTATIONS)(random, data)
    kind = random.choice(["tasks", "conversations", "preferences", "judgements"])
    return DataCase(suffix, data, kind, random.choice([0.0, 0.0, 0.5, 2.0]))


def _write_rows(rows: list[dict[str, Any]], suffix: str) -> bytes:
    if suffix == ".jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if suffix == ".json":
        return json.dumps(rows).encode()
    if suffix == ".csv":
        text = io.StringIO()
        names = sorted({name for row in rows for name in row})
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode(errors="surrogatepass")
    sink = pyarrow.BufferOutputStream()
    try:
        table = pyarrow.Table.from_pylist(rows)
    except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError, ValueError, TypeError):
        table = pyarrow.Table.from_pylist(list(ROWS))
    pyarrow.parquet.write_table(table, sink)
    return bytes(sink.getvalue())


def _flip(random: Random, data: bytes) -> bytes:
    place = random.randrange(len(data) + 1)
    return data[:place] + bytes([random.randrange(256)]) + data[place + 1 :]


def _cut_bytes(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _recode(random: Random, data: bytes) -> bytes:
    try:
        return data.decode().encode(random.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"]))
    except UnicodeError:
        return data


def _insert(random: Random, data: bytes) -> bytes:
    place = random.randrange(len(data) + 1)
    deep = b"[" * 100_000 + b"]" * 100_000
    written = (
        b"\0",
        b"\n",
        b'"',
        b"{",
        b"}",
        b",",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"1" * 5000,
        b'{"a":' * 5000,
        b"\r",
        b"NaN",
        b"1e999",
    )
    what = random.choice([*written, deep])
    return data[:place] + what + data[place:]


def _deepen(random: Random, data: bytes) -> bytes:
    depth = random.choice([500, 50_000])
    return b'{"problem": ' + b"[" * depth + b"]" * depth + b', "answer": "1"}\n' + data


BYTE_MUTATIONS: tuple[Callable[[Random, bytes], bytes], ...] = (_flip, _flip, _cut_bytes, _recode, _insert, _deepen)
