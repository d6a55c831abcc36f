"""What is thought of nodes that say this or that of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.extensions.checks.preflight import (
    TOKEN_FILE,
    AllReduceSpeed,
    ClusterSurvey,
    Finding,
    FolderStatus,
    Gpu,
    NodeInfo,
    NodeReport,
    RunNeeds,
    check_folder,
    find_problems,
    format_survey,
    probe_node,
)

VERSIONS = {"python": "3.12.3", "torch": "2.13.0", "vllm": "0.32.0"}
FOLDER = "/shared/results"
H100 = Gpu("H100", 80.0, "550.1")


def facts(**changes: Any) -> NodeInfo:
    settings: dict[str, Any] = {"host": "machine", "versions": VERSIONS, "folders": {FOLDER: FolderStatus(True, "node-a")}}
    return NodeInfo(**settings | changes)


def node(number: int, found: NodeInfo | None = None, *, gpus: int = 0) -> NodeReport:
    return NodeReport(number=number, address=f"10.0.0.{number}", gpus=gpus, info=found or facts())


def survey(*nodes: NodeReport, **changes: Any) -> ClusterSurvey:
    settings: dict[str, Any] = {
        "driver": VERSIONS,
        "nodes": nodes,
        "needs": RunNeeds(devices=8, folder_keys={FOLDER: "checkpointing.checkpoint_dir"}),
        "on_cpu": True,
        "visible_files": {FOLDER: frozenset(range(len(nodes)))},
    }
    return ClusterSurvey(**settings | changes)


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


def all_reduce(*nodes: int, **changes: Any) -> AllReduceSpeed:
    settings: dict[str, Any] = {"backend": "gloo", "size": 2**24, "bandwidth": 1e9}
    return AllReduceSpeed(**settings | {"nodes": nodes} | changes)


def test_nodes_that_are_alike_and_share_their_folder_are_well() -> None:
    assert find_problems(survey(node(0), node(1), node(2), all_reduce=all_reduce(0, 1, 2))) == []


def test_a_node_with_another_torch_is_named_with_both_versions_and_what_to_install() -> None:
    other = node(1, facts(versions=VERSIONS | {"torch": "2.12.0"}))
    finding = only(find_problems(survey(node(0), other, node(2))))
    assert finding == Finding("node 1 (10.0.0.1)", "torch is 2.12.0 there, and 2.13.0 here", "Install torch 2.13.0 there.")


def test_a_folder_that_is_not_shared_names_its_key_and_the_node() -> None:
    other = node(2, facts(folders={FOLDER: FolderStatus(False, error="there is no such folder")}))
    finding = only(find_problems(survey(node(0), node(1), other)))
    assert finding.fatal and finding.where == "checkpointing.checkpoint_dir, node 2 (10.0.0.2)"
    assert FOLDER in finding.problem and "there is no such folder" in finding.problem
    assert "mounted under the same path" in finding.fix


def test_a_folder_that_a_node_only_reads_is_a_problem() -> None:
    other = node(1, facts(folders={FOLDER: FolderStatus(True, "", "Read-only file system")}))
    finding = only(find_problems(survey(node(0), other, visible_files={FOLDER: frozenset({0})})))
    assert "the driver does not see the files that it writes there (Read-only file system)" in finding.problem


def gpus(count: int, kind: Gpu = H100) -> NodeInfo:
    return facts(gpus=(kind,) * count)


def test_too_few_gpus_name_the_node_and_the_key() -> None:
    finding = only(find_problems(survey(node(0, gpus(8), gpus=8), node(1, gpus(4), gpus=4), on_cpu=False)))
    assert finding.fatal and finding.where.startswith("node 1") and "4 GPUs, and cluster.gpus_per_node is 8" in finding.problem


def test_gpus_that_only_ray_believes_in_are_a_problem() -> None:
    finding = only(find_problems(survey(node(0, gpus(0), gpus=8), on_cpu=False)))
    assert finding.fatal and "Ray schedules 8 GPUs, and nvidia-smi finds 0" in finding.problem


def test_nodes_that_do_not_have_what_the_run_asks_for_are_the_first_problem() -> None:
    findings = find_problems(survey(node(0, facts(versions={})), placement_error="cluster.num_nodes is 3"))
    assert findings[0] == Finding("cluster", "cluster.num_nodes is 3", "The nodes above are the ones in the cluster.")


def test_a_node_without_an_answer_says_why() -> None:
    failure = "ModuleNotFoundError: No module named 'strop'"
    silent = NodeReport(number=1, address="10.0.0.1", gpus=0, failure=failure)
    finding = only(find_problems(survey(node(0), silent)))
    assert finding.fatal and "No module named 'strop'" in finding.problem and "Install" in finding.fix
    assert "no answer" in "\n".join(format_survey(survey(node(0), silent)))


def test_nodes_that_do_not_reach_each_other_are_a_problem_that_names_the_variables() -> None:
    finding = only(
        find_problems(survey(node(0), node(1), all_reduce_failure="a process group of 2 ranks failed: connection refused"))
    )
    assert finding.fatal and "GLOO_SOCKET_IFNAME" in finding.fix


# --- looking ---------------------------------------------------------------------------------------------------------------------------


def test_a_node_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    (tmp_path / "token" / TOKEN_FILE).write_text("token")
    found = probe_node(("torch", "no-such-package"), (str(tmp_path),), "token")
    assert found.versions["torch"] and found.versions["no-such-package"] == "" and "sources" in found.versions["strop"]
    assert found.host
    seen = found.folders[str(tmp_path)]
    assert seen.shared and (tmp_path / "token" / seen.file).exists()


def test_a_folder_of_the_same_name_elsewhere_is_not_taken_for_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.extensions.checks.preflight.FOLDER_TIMEOUT", 0.1)
    assert not check_folder(tmp_path, "token").shared
    assert "no such folder" in check_folder(tmp_path / "none", "token").error
    assert list(tmp_path.iterdir()) == [], "nothing is left in a folder that is somebody else's"
