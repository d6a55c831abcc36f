"""``strop export``: write a checkpoint of any layout as a folder that Transformers and vLLM load."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from strop.checkpointing.convert import convert_model
from strop.checkpointing.saved_model import ATTACHED_CONFIG, SavedModel
from strop.data.sources.hub_upload import require_token, upload_folder
from strop.models.draft_head import FOLDER, WEIGHTS
from strop.models.export import AS_THEY_ARE, ConversionError, ExportFormat
from strop.runs.exit_codes import run_command
from strop.runs.jobs.model_card import format_model_card

CARD_FILE = "README.md"


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """What to write, and where."""

    source: SavedModel
    target: Path
    form: ExportFormat = AS_THEY_ARE
    merge: bool = False
    push: str | None = None  # OWNER/NAME on the hub
    private: bool = False


def run_export(job: ExportJob) -> int:
    """Export as requested. Return 0 on success, 1 after printing an error."""
    return run_command(_export(job))


async def _export(job: ExportJob) -> None:
    if job.push is not None:
        require_token()  # before the work
    print(f"exporting {job.source.description} to {job.target}")
    export_model(job)
    size = sum(path.stat().st_size for path in job.target.rglob("*") if path.is_file())
    print(f"{job.target} holds {_name_content(job)} and its card, {size / 1e6:,.1f} MB")
    if job.push is not None:
        print(f"uploaded to {upload_folder(job.target, job.push, private=job.private)}")


def export_model(job: ExportJob) -> None:
    """Write the folder: weights, tokenizer, model card and the configuration of the run. Raises ConversionError."""
    if job.merge and job.source.layout != "adapters":
        raise ConversionError(f"{job.source.weights} has no adapters to merge; leave out --merge")

    def finish(draft: Path) -> None:
        (draft / CARD_FILE).write_text(format_model_card(job.source, merged=job.merge), encoding="utf-8")
        if job.source.config_file is not None:
            shutil.copyfile(job.source.config_file, draft / ATTACHED_CONFIG)
        copy_head(Path(job.source.weights).parent / FOLDER, draft / FOLDER)

    base = (job.source.run_values.get("policy") or {}).get("model_name")
    convert_model(job.source, job.target, job.form, merge=job.merge, model_name=base, finish=finish)


def copy_head(source: Path, target: Path) -> None:
    """Copy the draft head trained with the model, if there is one, without its training state."""
    if (source / WEIGHTS).is_file() and (source / "config.json").is_file():
        target.mkdir()
        for name in ("config.json", WEIGHTS):
            shutil.copyfile(source / name, target / name)


def _name_content(job: ExportJob) -> str:
    match job.source.layout:
        case "adapters" if not job.merge:
            return "the adapters (PEFT; --merge writes an ordinary model)"
        case "value head":
            return "the value head"
        case _:
            return "the model, its tokenizer"
