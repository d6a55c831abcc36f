"""The memory of a machine, and of a container on it."""

from __future__ import annotations

from pathlib import Path

from strop.hardware import total_memory


def machine(folder: Path, limit: str) -> tuple[Path, Path]:
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       4000 kB\nMemAvailable:       1000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod\n")
    (groups / "pod").mkdir(parents=True)
    (groups / "pod" / "memory.max").write_text(limit)
    (groups / "pod" / "memory.current").write_text("1000")
    return proc, groups


def test_the_memory_of_a_container_is_its_limit(tmp_path):
    assert total_memory(*machine(tmp_path, "2000000\n")) == 2_000_000


def test_without_a_limit_it_is_that_of_the_machine(tmp_path):
    assert total_memory(*machine(tmp_path, "max\n")) == 4000 * 1024


def test_memory_that_cannot_be_read_is_none(tmp_path):
    assert total_memory(tmp_path, tmp_path) == 0
