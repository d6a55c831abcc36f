"""What is thought of nodes that say this or that of themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.distributed import node_probe
from strop.distributed.node_probe import TOKEN_FILE, check_folder, get_versions, probe_node, try_in_process
from strop.distributed.preflight import (
    AllReduceSpeed,
    ClusterSurvey,
    Finding,
    FolderStatus,
    Gpu,
    NodeInfo,
    NodeReport,
    RunNeeds,
    find_problems,
    format_findings,
    format_survey,
)

VERSIONS = {"python": "3.12.3", "torch": "2.13.0", "vllm": "0.32.0"}
FOLDER = "/shared/results"
H100 = Gpu("H100", 80.0, "550.1")


def facts(**changes: Any) -> NodeInfo:
    settings: dict[str, Any] = {
        "host": "machine",
        "versions": VERSIONS,
        "shm": 16.0,
        "models": {"m": ""},
        "folders": {FOLDER: FolderStatus(True, "node-a", 100.0)},
    }
    return NodeInfo(**settings | changes)


def node(number: int, found: NodeInfo | None = None, *, gpus: int = 0) -> NodeReport:
    return NodeReport(number=number, address=f"10.0.0.{number}", gpus=gpus, info=found or facts())


def survey(*nodes: NodeReport, **changes: Any) -> ClusterSurvey:
    settings: dict[str, Any] = {
        "driver": VERSIONS,
        "nodes": nodes,
        "needs": RunNeeds(devices=8, models=("m",), folder_keys={FOLDER: "checkpointing.checkpoint_dir"}),
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


@pytest.mark.parametrize(
    ("there", "here", "found", "fix"),
    [
        ("", "0.32.0", "vllm is not installed there, and 0.32.0 here", "Install vllm 0.32.0 there."),
        ("0.32.0", "", "vllm is 0.32.0 there, and not installed here", "Install vllm 0.32.0 here."),
    ],
)
def test_a_package_that_only_one_side_has_is_a_problem(there: str, here: str, found: str, fix: str) -> None:
    finding = only(find_problems(survey(node(0, facts(versions=VERSIONS | {"vllm": there})), driver=VERSIONS | {"vllm": here})))
    assert (finding.problem, finding.fix, finding.fatal) == (found, fix, True)


def test_a_folder_that_is_not_shared_names_its_key_and_the_node() -> None:
    other = node(2, facts(folders={FOLDER: FolderStatus(False, error="there is no such folder")}))
    finding = only(find_problems(survey(node(0), node(1), other)))
    assert finding.fatal and finding.where == "checkpointing.checkpoint_dir, node 2 (10.0.0.2)"
    assert FOLDER in finding.problem and "there is no such folder" in finding.problem
    assert "mounted under the same path" in finding.fix


def test_a_folder_that_a_node_only_reads_is_a_problem() -> None:
    other = node(1, facts(folders={FOLDER: FolderStatus(True, "", 100.0, "Read-only file system")}))
    finding = only(find_problems(survey(node(0), other, visible_files={FOLDER: frozenset({0})})))
    assert "the driver does not see the files that it writes there (Read-only file system)" in finding.problem


def test_a_folder_that_the_driver_cannot_write_is_one_problem() -> None:
    nodes = [node(number, facts(folders={})) for number in range(3)]
    finding = only(find_problems(survey(*nodes, unwritable={FOLDER: "Permission denied"}, visible_files={})))
    assert finding.where == "checkpointing.checkpoint_dir" and "Permission denied" in finding.problem


def test_little_room_on_the_disk_is_a_warning() -> None:
    finding = only(find_problems(survey(node(0, facts(folders={FOLDER: FolderStatus(True, "node-a", 2.0)})))))
    assert not finding.fatal and "2.0 GiB are free" in finding.problem


def gpus(count: int, kind: Gpu = H100) -> NodeInfo:
    return facts(gpus=(kind,) * count)


def test_too_few_gpus_name_the_node_and_the_key() -> None:
    finding = only(find_problems(survey(node(0, gpus(8), gpus=8), node(1, gpus(4), gpus=4), on_cpu=False)))
    assert finding.fatal and finding.where.startswith("node 1") and "4 GPUs, and cluster.gpus_per_node is 8" in finding.problem


def test_gpus_that_ray_was_not_told_of_are_said_to_be_there() -> None:
    finding = only(find_problems(survey(node(0, gpus(8), gpus=2), on_cpu=False)))
    assert "though the machine has 8" in finding.problem and "--num-gpus=8" in finding.fix


def test_gpus_that_only_ray_believes_in_are_a_problem() -> None:
    finding = only(find_problems(survey(node(0, gpus(0), gpus=8), on_cpu=False)))
    assert finding.fatal and "Ray schedules 8 GPUs, and nvidia-smi finds 0" in finding.problem


def test_gpus_of_two_kinds_are_a_warning_that_names_both() -> None:
    other = gpus(8, Gpu("A100", 40.0, "550.1"))
    finding = only(find_problems(survey(node(0, gpus(8), gpus=8), node(1, other, gpus=8), on_cpu=False)))
    assert not finding.fatal and "A100, 40 GiB" in finding.problem and "H100, 80 GiB" in finding.problem


def test_gpus_left_unused_by_a_run_on_the_cpu_are_a_warning() -> None:
    finding = only(find_problems(survey(node(0, gpus(8), gpus=0))))
    assert not finding.fatal and "--num-gpus=8" in finding.fix


def test_a_model_that_a_node_cannot_read_is_a_problem() -> None:
    finding = only(find_problems(survey(node(0), node(1, facts(models={"m": "there is no folder m"})))))
    assert finding.fatal and "cannot read the model m: there is no folder m" in finding.problem


def test_a_small_dev_shm_is_a_warning() -> None:
    finding = only(find_problems(survey(node(0, facts(shm=0.06)), node(1))))
    assert not finding.fatal and "0.06 GiB" in finding.problem and "--shm-size" in finding.fix


def test_a_node_whose_processes_do_not_share_gpu_memory_is_a_problem_with_both_ways_out() -> None:
    found = only(find_problems(survey(node(0), node(1, facts(cuda_ipc="TransportError: receiver 0: CUDA error")))))
    assert found.fatal and found.where == "node 1 (10.0.0.1)" and "receiver 0: CUDA error" in found.problem
    assert "--ipc=host" in found.fix and "weight_sync.transport=memory" in found.fix


@pytest.mark.slow
@pytest.mark.usefixtures("workers_are_forks")
def test_memory_is_shared_between_two_processes_as_engines_share_it_and_what_fails_is_said() -> None:
    assert try_in_process("cpu") == ""
    assert "nonsense" in try_in_process("nonsense")


def test_a_node_without_gpus_tries_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(node_probe, "try_in_process", lambda device: tried.append(device) or "it cannot")
    assert probe_node((), (), (), "token", cuda_ipc=True).cuda_ipc == "" and not tried
    monkeypatch.setattr(node_probe, "list_gpus", lambda: (H100,))
    assert probe_node((), (), (), "token").cuda_ipc == "" and not tried
    assert probe_node((), (), (), "token", cuda_ipc=True).cuda_ipc == "it cannot" and tried == ["cuda"]


def test_nodes_that_do_not_have_what_the_run_asks_for_are_the_first_problem() -> None:
    findings = find_problems(survey(node(0, facts(versions={})), placement_error="cluster.num_nodes is 3"))
    assert findings[0] == Finding("cluster", "cluster.num_nodes is 3", "The nodes above are the ones in the cluster.")


def test_a_node_without_an_answer_says_why() -> None:
    failure = "ModuleNotFoundError: No module named 'strop'"
    silent = NodeReport(number=1, address="10.0.0.1", gpus=0, failure=failure)
    finding = only(find_problems(survey(node(0), silent)))
    assert finding.fatal and "No module named 'strop'" in finding.problem and "Install" in finding.fix
    assert "no answer" in "\n".join(format_survey(survey(node(0), silent)))


def test_an_ordinary_network_between_gpus_is_a_warning_and_within_one_node_it_is_not_asked() -> None:
    nodes = (node(0, gpus(8), gpus=8), node(1, gpus(8), gpus=8))
    slow = all_reduce(0, 1, backend="nccl", bandwidth=1.1e9)
    assert "1.1 GB/s" in only(find_problems(survey(*nodes, on_cpu=False, all_reduce=slow))).problem
    assert find_problems(survey(*nodes, on_cpu=False, all_reduce=replace(slow, nodes=(0, 0)))) == []


def test_nodes_that_do_not_reach_each_other_are_a_problem_that_names_the_variables() -> None:
    finding = only(
        find_problems(survey(node(0), node(1), all_reduce_failure="a process group of 2 ranks failed: connection refused"))
    )
    assert finding.fatal and "GLOO_SOCKET_IFNAME" in finding.fix


def test_problems_come_before_warnings_and_each_says_what_to_do() -> None:
    found = find_problems(survey(node(0, facts(shm=0.0)), node(1, facts(versions={}))))
    assert [finding.fatal for finding in found] == [True, True, True, False]
    rows = format_findings(found)
    assert (
        rows[0].startswith("problem  node 1")
        and rows[1].strip() == "Install python 3.12.3 there."
        and rows[-2].startswith("warning  ")
    )


def test_the_table_has_a_line_a_node_in_columns() -> None:
    rows = format_survey(survey(node(0, gpus(8), gpus=8), node(1, gpus(8), gpus=4), on_cpu=False))[:3]
    assert rows[1].index("machine") == rows[0].index("host") == rows[2].index("machine")
    assert "8 x H100, 80 GiB, driver 550.1" in rows[1] and "4 for Ray" in rows[2]


def test_below_the_table_are_versions_folders_models_and_the_speed_of_an_all_reduce() -> None:
    unreadable = facts(models={"m": "there is no folder m"})
    found = survey(node(0), node(1, unreadable), node(2), all_reduce=all_reduce(0, 1, 2, bandwidth=8.7e7))
    assert [row.split("  ", 1)[1].strip() for row in format_survey(found)[5:]] == [
        "python 3.12.3, torch 2.13.0, vllm 0.32.0",
        f"{FOLDER}: shared by 3 of 3 nodes, 100 GiB free",
        "m: readable on 2 of 3 nodes",
        "gloo, 3 ranks on 3 nodes: an all-reduce of 16 MiB runs at 87 MB/s per rank",
    ]
    assert format_survey(survey(node(0)))[-1].endswith("not measured: there is only one device")
    assert format_survey(survey(node(0), placement_error="too few"))[-1].endswith("not measured")


# --- looking ---------------------------------------------------------------------------------------------------------------------------


def test_a_node_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    (tmp_path / "token" / TOKEN_FILE).write_text("token")
    found = probe_node(("torch", "no-such-package"), ("/no/such/model",), (str(tmp_path),), "token")
    assert found.versions["torch"] and found.versions["no-such-package"] == "" and "sources" in found.versions["strop"]
    assert found.host and "there is no folder /no/such/model" in found.models["/no/such/model"]
    seen = found.folders[str(tmp_path)]
    assert seen.shared and (tmp_path / "token" / seen.file).exists()


def test_a_folder_of_the_same_name_elsewhere_is_not_taken_for_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.distributed.node_probe.FOLDER_TIMEOUT", 0.1)
    assert not check_folder(tmp_path, "token").shared
    assert "no such folder" in check_folder(tmp_path / "none", "token").error
    assert list(tmp_path.iterdir()) == [], "nothing is left in a folder that is somebody else's"


def test_the_version_of_strop_tells_two_working_copies_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = get_versions(())["strop"]
    (tmp_path / "changed.py").write_text("changed = True\n")
    monkeypatch.setattr("strop.__file__", str(tmp_path / "__init__.py"))
    assert get_versions(())["strop"] != here
