"""Interpolations that are resolved without OmegaConf give what OmegaConf gives, and YAML that is written without ruamel.yaml is its own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.base_config import KeyPath, to_tree
from strop.config import TRAINING_RUNS, load_config
from strop.config.load.load import escape_values
from strop.config.schema.run_config import EvalRunConfig
from strop.config.source import interpolation, yaml_text
from strop.config.source.defaults import add_defaults
from strop.config.source.plain_interpolation import parse_plain, resolve_plain
from strop.config.source.yaml_source import read_config_file

ROOT = Path(__file__).parents[3]
NAMES = ["a", "b", "c", "null", "0", "a.b"]
TEXTS = [
    "${a}", "${.a}", "${..b}", "${...c}", "${a.b}", "${.b.c}", "${a.b.a}", "${b.0}", "${null}", "${a }", "x ${s}", "${s}${t}", "\\${a}",
    "${mul:${..a},${..b}}", "${add:${a},-1}", "${div:${a},0}", "${div:${a.b},${b}}", "${sub:1,${max:${.a},3}}", "${add:${a}, 2}",
    "${mul:${a},1.5}", "${env:STROP_UNSET}", "${env:HOME}", "${nothing:${a}}", "${a", "${}", "${mul:}", "${mul:${a},}", "${sub:${a}}",
    "plain", "back\\slash", "???", "", "7",
]  # fmt: skip
SCALARS = [None, True, False, 0, 3, -2, 2.5, 6.0, 10**12]


def draw(random_: random.Random, depth: int = 0) -> Any:
    kind = random_.random()
    if kind < 0.3:
        return random_.choice(TEXTS if random_.random() < 0.5 else TEXTS[:5])
    if kind < 0.7 or depth > 1:
        return random_.choice(SCALARS)
    if kind < 0.75:
        return [draw(random_, depth + 1) for _ in range(2)]
    return {name: draw(random_, depth + 1) for name in ("a", "b", random_.choice(NAMES))}


def by_omegaconf(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpolation, "resolve_plain", lambda values, resolvers: {})
        return interpolation.resolve_interpolations(values)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same type: 1, 1.0 and true are three values."""
    return repr(one) == repr(other)


@pytest.mark.filterwarnings("ignore:In the sequence:UserWarning")
@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.exhaustive)])
def test_drawn_trees_are_resolved_as_by_omegaconf(count: int) -> None:
    random_, plain = random.Random(0), 0
    for _ in range(count):
        values = {**{name: draw(random_) for name in NAMES}, "s": random_.choice(SCALARS), "t": "text"}
        plain += len(resolve_plain(values, interpolation.ARITHMETIC))
        (found, errors), (expected, others) = interpolation.resolve_interpolations(values), by_omegaconf(values)
        if any("repeats texts" in error for error in others.values()):  # all that could grow are dropped, also what would not
            assert errors
        else:
            assert same(found, expected) and sorted(errors) == sorted(others), values
    assert plain > count / 3


@pytest.mark.parametrize("section", sorted(TRAINING_RUNS))
def test_the_defaults_of_every_kind_of_run_are_plain_and_resolved_as_by_omegaconf(section: str) -> None:
    values = add_defaults({}, TRAINING_RUNS[section])
    resolved = resolve_plain(values, interpolation.ARITHMETIC)
    assert len(resolved) > 10
    found = interpolation.resolve_interpolations(values)
    assert same(found, by_omegaconf(values))


def test_the_examples_are_resolved_as_by_omegaconf() -> None:
    files = sorted((ROOT / "examples" / "configs").rglob("*.yaml"))
    assert len(files) > 5
    for file in files:
        source = read_config_file(file)
        root = next((root for kind, root in TRAINING_RUNS.items() if kind in source.values), EvalRunConfig)
        values = add_defaults(source.values, root)
        assert same(interpolation.resolve_interpolations(values), by_omegaconf(values)), file


@pytest.mark.parametrize(
    "text", ["x${a}", "${a}y", "${a.b", "${env:HOME}", "${.}", "${a..b}", "${1}", "${true}", "${mul:}", "${ a}"]
)
def test_what_is_not_plain_is_left_to_omegaconf(text: str) -> None:
    assert parse_plain(text) is None or text == "${env:HOME}"
    assert resolve_plain({"a": 1, "b": text}, interpolation.ARITHMETIC) == {}


def test_a_long_chain_and_a_circle_end() -> None:
    chain = {f"k{number}": f"${{k{number + 1}}}" for number in range(500)} | {"k500": 1, "x": "${y}", "y": "${x}"}
    resolved = resolve_plain(chain, interpolation.ARITHMETIC)
    assert resolved[("k499",)] == 1 and ("k0",) not in resolved and ("x",) not in resolved


WORDS = [
    "a", "", "null", "True", "yes", "n", "1", "1.0", "- a", "a: b", "#x", "x #y", "${a}", "{a}", "[b]", "é", "\u200b", "a\nb", " lead",
    "trail ", "'q'", '"d"', "~", "0x1f", "1e5", "<<", "=", "a:", "@x", "`x", "%x", "!t", "&a", "*a", "|", ">", "?", "? x", "-", "...",
    "x" * 200, "word " * 40, "2024-01-01", "12:30", ".inf", "\t", "_", "a.b/c-d", "a.", "b-", "off", "x" * 61, "x" * 62,
]  # fmt: skip


def draw_document(random_: random.Random, depth: int = 0) -> Any:
    kind = random_.random()
    if kind < 0.4:
        return random_.choice(WORDS)
    if kind < 0.6 or depth > 3:
        return random_.choice([*SCALARS, 0.0, -0.0, 1e-6, 5e-6, 1e22, float("inf"), float("nan"), {}, [], ()])
    size = random_.randrange(4)
    if kind < 0.8:
        return [draw_document(random_, depth + 1) for _ in range(size)]
    return {
        random_.choice(WORDS if random_.random() < 0.1 else ["a", "key_2", "b.c"]): draw_document(random_, depth + 1)
        for _ in range(size)
    }


def test_drawn_documents_are_written_as_by_ruamel() -> None:
    random_, quick = random.Random(0), 0
    for _ in range(300):
        values = {"first": draw_document(random_), "second": draw_document(random_)}
        written = yaml_text.dump(values)
        assert written == yaml_text._dump_with_ruamel(values)
        quick += is_written_quickly(values)
    assert quick > 100


def test_a_whole_configuration_is_written_quickly_and_as_by_ruamel() -> None:
    overrides = ["policy.model_name=model", "data.train.env_name=arithmetic", "env.arithmetic={}"]
    config = load_config(None, overrides, root=TRAINING_RUNS["grpo"], has_gpus=False).config
    values = escape_values(to_tree(config, mode="python"))
    assert is_written_quickly(values)
    assert yaml_text.dump(values) == yaml_text._dump_with_ruamel(values)


def is_written_quickly(values: Mapping[str, Any]) -> bool:
    try:
        list(yaml_text._iter_lines(values, 0))
    except yaml_text._UnusualValueError:
        return False
    return True
