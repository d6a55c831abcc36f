"""Local copies of the hub: a folder with data sets as ``hf download`` leaves them, and with files of addresses.

The environment variable ``STROP_DATASETS`` names the folder. A hub dataset is in FOLDER/OWNER/NAME, the file of a URL in
FOLDER/HOST/PATH. If a copy is found there, neither the hub nor the URL is contacted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.sources.files import is_url
from strop.data.sources.records import DataError

COPIES_VARIABLE = "STROP_DATASETS"  # environment variable
HUB_ADDRESS = "hf://datasets/"
COMMIT = re.compile(r"[0-9a-f]{40}")


def copies_folder() -> Path | None:
    """Return the folder of local copies; None if there is none. Raises DataError if the variable names something else."""
    name = os.environ.get(COPIES_VARIABLE)
    if not name:
        return None
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(
            f"{COPIES_VARIABLE} is {name!r}, and there is no such folder; set it to the one that holds the copies of data sets "
            "(OWNER/NAME in it), or unset it"
        )
    return folder


def find_copy(name: str, revision: str | None = None) -> Path | None:
    """Return the local copy of a hub dataset (a folder) or URL (a file); None if there is none.

    Raises DataError if the copy is of another commit, if ``hf download`` recorded one. The revision pinned by a built-in set
    applies only to the hub.
    """
    folder = copies_folder()
    if folder is None:
        return None
    if is_url(name):
        parts = _address_parts(name)
        copy = folder.joinpath(*parts)
        return copy if ".." not in parts and (copy.is_file() or _matches_files(folder, parts)) else None
    copy = folder / name
    if not copy.is_dir():
        return None
    _check_revision(name, copy, revision)
    return copy


def _matches_files(folder: Path, parts: Sequence[str]) -> bool:
    """Whether the parts of a path, with * in the last ones, match files in the folder."""
    return "*" in "/".join(parts) and any(path.is_file() for path in folder.glob("/".join(parts)))


def _address_parts(address: str) -> list[str]:
    if address.startswith(HUB_ADDRESS):  # a file in a hub dataset, perhaps OWNER/NAME@REVISION/...
        owner, _, rest = address.removeprefix(HUB_ADDRESS).partition("/")
        name, _, path = rest.partition("/")
        return [owner, name.partition("@")[0], *path.split("/")]
    parsed = urlsplit(address)
    return [parsed.netloc, *parsed.path.strip("/").split("/")]


def _check_revision(name: str, copy: Path, revision: str | None) -> None:
    pinned = {entry.revision for entry in BUILTIN_DATASETS.values() if entry.hub == name}
    if revision is None or revision in pinned or not COMMIT.fullmatch(revision):
        return
    for file in sorted(copy.glob(".cache/huggingface/download/**/*.metadata")):
        found = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
        if COMMIT.fullmatch(found) and found != revision:
            raise DataError(
                f"{copy} is a copy of {name} at the revision {found}, but the revision {revision} is asked for; download that one "
                f"(hf download {name} --repo-type dataset --revision {revision} --local-dir {copy}), or set revision to {found}"
            )
