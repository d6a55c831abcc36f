"""What each service's own reader finds of a run that was logged without a network.

MLflow, SwanLab and Trackio are in environments of their own: `make test-adapters`.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.adapter_servers import interpreter

from strop.extensions.trackers.tensorboard import TensorBoardTracker
from strop.extensions.trackers.wandb import ID_FILE, WandbTracker
from strop.monitoring.trackers.base import MetricHistogram, SampleImage, SampleRow, SampleTable, SavedCheckpoint, StepMedia

HOSTILE = "<script>alert(1)</script> ![x](http://evil.example/x.png) ```\nend"
CONFIG = {"grpo": {"seed": 42, "note": None}, "policy": {"model_name": "m"}}


def make_image(path: Path) -> Path:
    """Write a PNG of one red pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0\xff\0\0")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))
    return path


def make_media(folder: Path) -> StepMedia:
    row = SampleRow(
        environment="sum", task="sum:1", prompt="user: 1+1?", completion=HOSTILE, answer="2", reward=0.5, ending="stop"
    )
    return StepMedia(
        tables=(SampleTable(name="samples/train", rows=(row,)),),
        histograms=(MetricHistogram(name="histograms/reward", values=(0.0, 0.5, 1.0, 1.0)),),
        images=(SampleImage(name="images/train", caption="sum:1", path=make_image(folder / "pixel.png")),),
    )


# The same run for every service, in the interpreter that has it: two steps, then a resumed process with the third.
RUN = """
import sys
from pathlib import Path
from strop.monitoring.trackers.base import SavedCheckpoint
from tests.extensions.trackers.test_tracker_readers import CONFIG, make_media
folder = Path(sys.argv[1])
media = make_media(folder)
for begin, steps in ((-1, (1, 2)), (2, (3,))):
    tracker = make(folder)
    tracker.resume(begin)
    for step in steps:
        tracker.log_media(step, media)
        tracker.log(step, {"train/reward": step / 2, "train/odd name+": 1.0})
    (folder / "step_2").mkdir(exist_ok=True)
    (folder / "step_2" / "weights.bin").write_bytes(b"1234")
    tracker.log_checkpoint(SavedCheckpoint(step=2, folder=folder / "step_2"))
    tracker.note("a note")
    tracker.close()
"""


def run_in(name: str, program: str, folder: Path, **environment: str) -> Any:
    """Run a program in a service's own environment, and return the JSON that its last line prints."""
    root = Path(__file__).parents[3]
    path = {"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", **environment}
    command = [interpreter(name), "-c", program, str(folder)]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **path}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # a service prints lines of its own
    return json.loads(line)


def test_tensorboards_reader_finds_texts_histograms_images_and_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path / "events", config=CONFIG)
    tracker.log_media(1, make_media(tmp_path))
    tracker.log(1, {"train/reward": 0.5})
    tracker.note("# not a headline")
    tracker.close()
    reader = EventAccumulator(str(tmp_path / "events"), size_guidance={"histograms": 0, "images": 0, "tensors": 0}).Reload()
    tags = reader.Tags()
    assert tags["scalars"] == ["train/reward"] and tags["images"] == ["images/train/0"]
    (histogram,) = reader.Histograms("histograms/reward")
    assert histogram.step == 1 and histogram.histogram_value.num == 4 and histogram.histogram_value.max == 1.0
    assert reader.Images("images/train/0")[0].encoded_image_string.startswith(b"\x89PNG")
    (text,) = [event.tensor_proto.string_val[0].decode() for event in reader.Tensors("samples/train/text_summary")]
    assert HOSTILE.split("\n")[0] in text
    assert all(line.startswith("    ") for line in text.split("\n"))  # a block of code in Markdown, to its last line
    plugin = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert plugin.plugin_name == "hparams" and b"grpo.seed" in plugin.content


def test_tensorboard_renders_nothing_of_what_a_model_wrote() -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    from strop.extensions.trackers.tensorboard import verbatim

    shown = markdown_to_safe_html(verbatim(HOSTILE))
    assert "<img" not in shown and "<script" not in shown and "&lt;script&gt;" in shown
    assert shown.startswith("<pre><code>") and shown.rstrip().endswith("</code></pre>")


def read_wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, in the package's own messages. It is a log of LevelDB: 7 bytes, then blocks of 32 KiB, in which
    a record is checksum, length, kind (whole, first, middle, last) and data; the package has no reader in Python any more."""
    from wandb.proto import wandb_internal_pb2

    content, place, parts = file.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # too little of the block is left for a header
            place += 32768 - place % 32768
            continue
        checksum, length, kind = struct.unpack("<IHB", content[place : place + 7])
        data = content[place + 7 : place + 7 + length]
        assert zlib.crc32(bytes([kind]) + data) == checksum
        parts, place = parts + data, place + 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_wandbs_file_has_the_run_its_settings_samples_and_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"entity": "team", "group": "seeds", "tags": ["a", "b"], "notes": "why", "job_type": "train", "mode": "offline"}
    tracker = WandbTracker(tmp_path, project="adding", name="first", config=CONFIG, checkpoints="reference", **options)
    tracker.resume(-1)
    tracker.log_media(1, make_media(tmp_path))
    tracker.log(1, {"train/reward": 0.5})
    tracker.log(2, {"train/reward": 0.75})
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "weights.bin").write_bytes(b"1234")
    tracker.log_checkpoint(SavedCheckpoint(step=2, folder=tmp_path / "step_2"))
    tracker.close()

    wandb.teardown()  # its service writes the rest of the file when it ends
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = list(read_wandb_records(file))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert run.run_id == (tmp_path / ID_FILE).read_text().strip()
    assert (run.project, run.entity, run.run_group, run.job_type) == ("adding", "team", "seeds", "train")
    assert (run.display_name, run.notes, list(run.tags)) == ("first", "why", ["a", "b"])
    assert {update.key: json.loads(update.value_json) for update in run.config.update}["grpo"]["seed"] == 42
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["_step"], row["train/reward"]) for row in rows] == [(1, 0.5), (2, 0.75)]
    assert rows[0]["histograms/reward/_type"] == "histogram" and sum(rows[0]["histograms/reward/values"]) == 4
    assert rows[0]["images/train/_type"].startswith("images") and rows[0]["samples/train/_type"] == "table-file"
    (table,) = (file.parent / "files" / "media" / "table" / "samples").glob("train_*.table.json")
    stored = json.loads(table.read_text())
    assert stored["columns"] == list(SampleTable.COLUMNS) and stored["data"][0][3] == HOSTILE
    (saved,) = [record.artifact for record in records if record.artifact.type == "model"]
    assert saved.name == f"{run.run_id}-checkpoint" and "step_2" in saved.aliases
    assert saved.manifest.contents[0].ref == (tmp_path / "step_2" / "weights.bin").as_uri()


@pytest.mark.slow
def test_mlflows_client_finds_one_run_with_metrics_samples_and_checkpoint(tmp_path: Path) -> None:
    program = f"""
import json
from strop.extensions.trackers.mlflow import MlflowTracker
def make(folder):
    return MlflowTracker(folder, experiment="adding", name="first", tags={{"k": "v"}}, config=CONFIG, checkpoints="upload")
{RUN.replace("import sys", "import sys", 1)}
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{{folder / 'mlflow.db'}}")
(experiment,) = [each for each in client.search_experiments() if each.name == "adding"]
(run,) = client.search_runs([experiment.experiment_id])
def files(path=None):
    for each in client.list_artifacts(run.info.run_id, path):
        if each.is_dir:
            yield from files(each.path)
        else:
            yield each.path
text = client.download_artifacts(run.info.run_id, "samples/train/step_000001.txt")
print(json.dumps({{
    "name": run.info.run_name, "status": run.info.status, "tags": run.data.tags, "params": run.data.params,
    "reward": [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/reward")],
    "metrics": sorted(run.data.metrics), "files": sorted(files()), "text": open(text).read(),
}}))
"""
    found = run_in("mlflow", program, tmp_path)
    assert (found["name"], found["status"], found["tags"]["k"]) == ("first", "FINISHED", "v")
    assert found["params"] == {"grpo.seed": "42", "policy.model_name": "m"}
    assert found["reward"] == [[1, 0.5], [2, 1.0], [3, 1.5]]
    assert "train/odd name_" in found["metrics"] and "histograms/reward/p50" in found["metrics"]
    assert "checkpoints/step_2/weights.bin" in found["files"] and HOSTILE in found["text"]
    assert "images/train/step_000001/pixel.png" in found["files"]
    drawn = [file for file in found["files"] if file.startswith("images/histograms~reward+step+1+") and file.endswith(".png")]
    assert len(drawn) == 1 and found["tags"]["mlflow.loggedImages"] == "True"  # MLflow's charts have a slider over its steps


@pytest.mark.slow
def test_swanlabs_reader_finds_the_run_in_its_file(tmp_path: Path) -> None:
    program = f"""
import json
from strop.extensions.trackers.swanlab import SwanlabTracker
def make(folder):
    return SwanlabTracker(folder, project="adding", name="first", mode="offline", tags=["a"], group="seeds", config=CONFIG)
{RUN}
from swanlab.sdk.internal.core_python.store import DataStoreReader
from swanlab.proto.swanlab.record.v1 import record_pb2
ids, rewards, texts, kinds = set(), [], [], set()
for file in sorted(folder.glob("swanlab/run-*/*.swanlab"), key=lambda path: path.stat().st_mtime_ns):
    ids.add(file.name)
    reader = DataStoreReader()
    reader.open(file)
    for data in reader:
        record = record_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        kinds.add(kind)
        if kind == "scalar" and record.scalar.key == "train/reward":
            rewards.append([record.scalar.step, record.scalar.value.number])
for file in folder.glob("swanlab/run-*/media/text/*"):
    texts.append(file.read_text())
charts = [json.loads(file.read_text()) for file in sorted(folder.glob("swanlab/run-*/media/echarts/*"))]
bars = [(chart["xAxis"][0]["data"], chart["series"][0]["data"]) for chart in charts]
print(json.dumps({{"ids": sorted(ids), "rewards": rewards, "texts": texts, "kinds": sorted(map(str, kinds)), "bars": bars}}))
"""
    found = run_in("swanlab", program, tmp_path)
    (run_id,) = found["ids"]
    assert run_id == f"run-{(tmp_path / 'swanlab_run_id').read_text().strip()}.swanlab"
    assert found["rewards"] == [[1, 0.5], [2, 1.0], [3, 1.5]]
    assert found["texts"] and HOSTILE in found["texts"][0]
    assert found["bars"] == [[["0", "0.5", "1"], [1, 1, 2]]] * 3


@pytest.mark.slow
def test_trackios_reader_finds_one_run_with_metrics_tables_and_histograms(tmp_path: Path) -> None:
    program = f"""
import json
from strop.extensions.trackers.trackio import TrackioTracker
def make(folder):
    return TrackioTracker(folder, project="adding", name="first", config=CONFIG)
{RUN}
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("adding")
print(json.dumps({{"name": run.name, "config": run.config, "logs": SQLiteStorage.get_logs("adding", run.name)}}))
"""
    found = run_in("trackio", program, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert found["name"] == (tmp_path / "trackio_run_name").read_text().strip() and found["name"].startswith("first-")
    assert found["config"]["grpo"]["seed"] == 42
    rewards = [(row["step"], row["train/reward"]) for row in found["logs"] if "train/reward" in row]
    assert rewards == [(1, 0.5), (2, 1.0), (3, 1.5)]
    (table, *_) = [row["samples/train"] for row in found["logs"] if "samples/train" in row]
    assert table["_type"] == "trackio.table" and table["_value"][0]["completion"] == HOSTILE
    (histogram, *_) = [row["histograms/reward"] for row in found["logs"] if "histograms/reward" in row]
    assert sum(histogram["values"]) == 4
