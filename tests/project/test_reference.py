"""The documentation of the keys is generated, complete, and what is committed."""

import subprocess
import sys
from pathlib import Path

import pytest

from strop.base_config import BaseConfig, fields_of
from strop.config import EvalRunConfig, GrpoRunConfig
from strop.config.source import yaml_text
from strop.config.source.keys import SchemaKey, iter_keys
from strop.extensions.reading.key_reference import ROOT_CONFIGS, collect_blocks, render_annotated_yaml, render_page
from support.each import each

ROOT = Path(__file__).parents[2]
ROOTS = (GrpoRunConfig, EvalRunConfig)


def test_the_committed_page_is_what_the_schema_generates() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == render_page(), "run: python -m strop.extensions.reading.key_reference > docs/configuration.md"


@each("run", ROOT_CONFIGS)
def test_the_page_has_every_key_of_a_run_and_says_nothing_twice(run: str) -> None:
    found: dict[tuple[str, ...], list[str]] = {}  # what the tables say of a key, in the order of the page
    for block in collect_blocks():
        for path in (path for path, runs in block.runs_by_section.items() if run in runs):
            for key in block.keys:
                found.setdefault((*path, *key.path), []).append(said_of(key))
    assert {key.path: said_of(key) for key in iter_keys(ROOT_CONFIGS[run]) if len(key.path) > 1}.items() <= {
        path: rows[-1] for path, rows in found.items()
    }.items()
    assert [path for path, rows in found.items() if len(set(rows)) < len(rows)] == []


def said_of(key: SchemaKey) -> str:
    return repr((key.type, key.default, key.required, key.field.description))


@each("key", [key for root in ROOTS for key in iter_keys(root)], ids=lambda key: key.dotted)
def test_every_key_has_a_line_of_doc(key: SchemaKey) -> None:
    assert key.field.description and key.field.description.endswith(".")


@pytest.mark.parametrize("root", ROOTS)
def test_the_annotated_keys_are_yaml_that_has_every_key(root: type[BaseConfig]) -> None:
    values = yaml_text.parse_value(render_annotated_yaml(root))
    assert set(values) == set(fields_of(root))


def test_reading_a_configuration_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, strop.config; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "[]"
