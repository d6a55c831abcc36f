"""Do the sizes of a model, its tokenizer and a run fit each other? Read from their files, without torch and Transformers.

A token id beyond the embedding, and a position beyond learned ones, is an index error in the middle of a run; on a GPU, a device assert.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.models.local_files import override_values
from strop.problems import Problem

# Model families with learned position embeddings, which cannot be exceeded. Other embeddings extrapolate.
LEARNED_POSITIONS = frozenset({"gpt2", "opt", "gpt_neo", "gpt_bigcode", "biogpt", "openai-gpt", "imagegpt", "xglm", "codegen2"})
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
SHOWN = 4


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokens found in a tokenizer's files."""

    ids: Mapping[str, int] = field(default_factory=dict)  # of all tokens
    special: frozenset[str] = frozenset()  # tokens that ordinary text never produces
    ends: Mapping[str, str] = field(default_factory=dict)  # eos_token and bos_token
    template: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model from its config.json; None if not given there."""

    name: str
    vocabulary: int | None
    positions: int | None
    learned_positions: bool

    @classmethod
    def of(cls, name: str, values: Mapping[str, Any]) -> ModelSizes:
        nested = values.get("text_config") or values.get("llm_config")
        text = nested if isinstance(nested, Mapping) else values
        positions = next((text[key] for key in POSITION_KEYS if isinstance(text.get(key), int)), None)
        vocabulary = text.get("vocab_size", values.get("vocab_size"))
        return cls(
            name=name,
            vocabulary=vocabulary if isinstance(vocabulary, int) else None,
            positions=positions,
            learned_positions=text.get("model_type") in LEARNED_POSITIONS,
        )

    def errors(self, tokenizer: TokenizerFiles, key: str, length: int | None, length_key: str) -> Iterator[Problem]:
        """Yield problems that would end a run. ``length``: the longest sequence of the run, set by ``length_key``."""
        if used := self._tokens_outside(tokenizer, used=True):
            yield Problem(key, self._describe(used), self._advise())
        if length is not None and self.positions is not None and length > self.positions and self.learned_positions:
            yield Problem(
                length_key,
                f"found {length}, and {self.name} has {self.positions} learned positions (max_position_embeddings): there is no embedding "
                "of a later one",
                f"Set it to {self.positions} or less.",
            )

    def warnings(self, tokenizer: TokenizerFiles, key: str, length: int | None, length_key: str) -> Iterator[Problem]:
        """Yield settings that may not be as intended."""
        if (rest := self._tokens_outside(tokenizer, used=False)) and not self._tokens_outside(tokenizer, used=True):
            yield Problem(key, f"{self._describe(rest)} The chat template writes none of them; data must not either")
        if length is not None and self.positions is not None and length > self.positions and not self.learned_positions:
            yield Problem(
                length_key,
                f"found {length}, and {self.name} was trained on at most {self.positions} positions (max_position_embeddings in its "
                "config.json): beyond them most models predict badly",
                f"Set it to {self.positions}, or scale the rotary embeddings (policy.hf_config_overrides.rope_parameters).",
            )

    def _tokens_outside(self, tokenizer: TokenizerFiles, *, used: bool) -> dict[str, int]:
        """Return the tokens whose ids exceed the embedding: those possible in a prompt or ordinary text, or all of them."""
        if self.vocabulary is None:
            return {}
        outside = {token: index for token, index in tokenizer.ids.items() if index >= self.vocabulary}
        if not used:
            return outside
        written = {*tokenizer.ends.values()}
        return {
            token: index
            for token, index in outside.items()
            if token in written or token in tokenizer.template or token not in tokenizer.special
        }

    def _describe(self, outside: Mapping[str, int]) -> str:
        first = sorted(outside.items(), key=lambda item: item[1])[:SHOWN]
        named = ", ".join(f"{token!r} ({index})" for token, index in first) + (", ..." if len(outside) > SHOWN else "")
        return (
            f"the tokenizer has {len(outside)} tokens beyond the embedding of {self.name}, which has vocab_size = {self.vocabulary} rows: "
            f"{named}."
        )

    def _advise(self) -> str:
        return (
            "Save the model with a larger embedding (model.resize_token_embeddings(len(tokenizer))), or set policy.tokenizer.name to the "
            "tokenizer that it was trained with."
        )


def read_model_sizes(name: str, overrides: Mapping[str, Any] | None = None) -> ModelSizes | None:
    """Return the sizes of a model in a folder or in the hub's cache (for adapters, those of their base); None without a
    config.json.
    """
    folder = find_folder(name)
    if folder is not None and not (folder / "config.json").exists():
        base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        folder = find_folder(base) if isinstance(base, str) else None
    values = {} if folder is None else _read_json(folder / "config.json")
    return ModelSizes.of(name, override_values(values, overrides or {})) if values else None


def find_folder(name: str) -> Path | None:
    """Return the folder of a model: a local one, or the one that is in the hub's cache."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except Exception:  # an invalid hub name, or a cache error: reported when the model is loaded
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def find_cached_commit(kind: str, name: str, revision: str | None) -> str:
    """Return the cached commit of a hub repository; empty if it is not cached. ``kind``: models or datasets."""
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        refs = Path(HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "refs"
        return (refs / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def read_tokenizer_files(name: str, template: str | None) -> TokenizerFiles:
    """Return the tokens of a tokenizer with a tokenizer.json. ``template``: the configured one; None uses the tokenizer's own."""
    folder = find_folder(name)
    if folder is None:
        return TokenizerFiles()
    saved, settings = _read_json(folder / "tokenizer.json"), _read_json(folder / "tokenizer_config.json")
    vocabulary = saved.get("model", {}).get("vocab", {}) if isinstance(saved.get("model"), Mapping) else {}
    ids = dict(vocabulary) if isinstance(vocabulary, Mapping) else {each[0]: index for index, each in enumerate(vocabulary)}
    added = [each for each in saved.get("added_tokens") or () if isinstance(each, Mapping)]
    ids |= {str(each.get("content")): int(each.get("id", 0)) for each in added}
    ends = {name: _text_of(settings.get(name)) for name in ("eos_token", "bos_token")}
    return TokenizerFiles(
        ids={token: index for token, index in ids.items() if isinstance(index, int)},
        special=frozenset(str(each.get("content")) for each in added if each.get("special")),
        ends={name: token for name, token in ends.items() if token},
        template=template if template not in (None, "default") else _read_template(folder, settings),
    )


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str:
    found = settings.get("chat_template")
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False) if found else ""


def _text_of(token: Any) -> str:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty for a missing or invalid file, whose error its actual loader reports."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
