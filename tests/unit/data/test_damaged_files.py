"""Data files that are damaged, hostile, or change while a run reads them: a DataError with the place, never a traceback or a signal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from strop.data.sources.files import open_file
from strop.data.sources.peek import FIRST_ROWS, peek_file
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource

ROW = {"problem": "1 + 1?", "answer": "2"}


def read_all(path: Path) -> None:
    rows = DataSource(dataset_name=str(path), input_key="problem", output_key="answer").load_rows()
    for index in range(len(rows)):
        rows[index]


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("deep.jsonl", lines(ROW) + b"[" * 100_000 + b"]" * 100_000, r"deep.jsonl:2 is not JSON \(it is nested too deeply\)"),
        ("deep.json", b"[" * 100_000 + b"]" * 100_000, r"deep.json is not JSON \(it is nested too deeply\)"),
        ("wide.jsonl", lines(ROW).decode().encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("wide.csv", b"problem,answer\n1,2\n".decode().encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("half.jsonl", lines(ROW, {**ROW, "problem": "\ud800?"}), "half.jsonl:2: 'problem' has a lone surrogate"),
        ("answer.jsonl", lines(ROW, {**ROW, "answer": "\udfff"}), "answer.jsonl:2: 'answer' has a lone surrogate"),
        ("nan.jsonl", lines(ROW, {**ROW, "answer": float("nan")}), "nan.jsonl:2: 'answer' is nan, which is not text"),
        ("inf.jsonl", lines(ROW, {**ROW, "answer": float("inf")}), "inf.jsonl:2: 'answer' is inf, which is not text"),
        ("digits.jsonl", lines(ROW) + b'{"problem": ' + b"1" * 5000 + b"}\n", "digits.jsonl:2 is not JSON"),
        ("nul.jsonl", lines(ROW) + b"\0\0\0\n", "nul.jsonl:2 is not JSON"),
        ("bad.parquet", b"PAR1" + b"\0" * 50 + b"PAR1", "bad.parquet cannot be read as Parquet"),
        ("short.parquet", b"PAR1", "short.parquet cannot be read as Parquet"),
        ("bad.arrow", b"ARROW1\0\0nothing", "bad.arrow cannot be read as Arrow"),
        ("zipped.jsonl.gz", b"\x1f\x8b\x08", "ends with '.gz'; supported data files end with"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_where(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_all(tmp_path / name)
    assert len(str(caught.value)) < 2_200


def test_undecodable_text_in_parquet_is_an_error_with_its_row(tmp_path: Path) -> None:
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(b"\0\0\0\0\x02\0\0\0\x04\0\0\0"), pyarrow.py_buffer(b"ok\xff\xfe")]
    )
    pyarrow.parquet.write_table(pyarrow.table({"problem": broken, "answer": ["1", "2"]}), tmp_path / "rows.parquet")
    records = open_file(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet, row 2 cannot be read \(UnicodeDecodeError"):
        records[1]


def test_a_file_that_is_cut_short_during_the_run_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """In a process of its own: a file that is mapped into memory would end it with SIGBUS."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(*[{**ROW, "problem": "x" * 2_000}] * 20))
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom strop.data.sources.files import open_file\n"
        "from strop.data.sources.records import DataError\n"
        "records = open_file(Path(sys.argv[1]))\nos.truncate(sys.argv[1], 100)\n"
        "try:\n    records[19]\nexcept DataError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "rows.jsonl:20 was removed while the run was reading it" in done.stdout


def test_an_arrow_file_that_is_cut_short_during_the_run_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    table = pyarrow.table({"problem": ["x" * 5_000] * 20, "answer": ["1"] * 20})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    records = open_file(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="was removed or cut short while it was read"):
        records[19]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_peek_counts_the_rows_and_reads_the_first(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 30), path)
    elif suffix == ".csv":
        path.write_text("problem,answer\n" + "1 + 1?,2\n" * 30)
    else:
        path.write_bytes(lines(*[ROW] * 30) if suffix == ".jsonl" else json.dumps([ROW] * 30).encode())
    peek = peek_file(path)
    assert peek.rows == 30 and peek.exact and len(peek.records) >= FIRST_ROWS and peek.records[0]["answer"] == "2"


def test_the_rows_of_a_large_file_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(*[ROW] * 1_000))
    monkeypatch.setattr("strop.data.sources.peek.LARGEST_READ", 1_000)
    peek = peek_file(path)
    assert not peek.exact and peek.rows == 1_000
