"""Upload a folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path


class HubUploadError(ValueError):
    """A folder cannot be uploaded; the message says why and what to do."""


def require_token() -> None:
    """Raise HubUploadError if there is no token that allows uploads."""
    from huggingface_hub import get_token

    if not get_token():
        raise HubUploadError("--push needs a token of the hub, and there is none: run `hf auth login`, or set HF_TOKEN")


def upload_folder(folder: Path, name: str, *, private: bool = False) -> str:
    """Create the repository ``name`` if it is missing, upload the folder, and return its address. Raises HubUploadError."""
    from huggingface_hub import HfApi

    require_token()
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=name, commit_message=f"Upload {folder.name}")
    except Exception as error:  # all network, naming and permission errors end in the same message
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0][:300]}"
        raise HubUploadError(
            f"{folder} was written and not uploaded to {name}: the hub returned {reason}. Upload it later: hf upload {name} {folder}"
        ) from error
    return str(address)
