"""Section ``data``: the tasks, their sources and their mix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_serializer, model_validator

from strop.base_config import NAMES_FILE, BaseConfig, PathText, default_of, fields_of, follows, subsection, to_tree
from strop.data.prompt_template import AUTO_PROMPT
from strop.data.sources.dataset_class import is_dataset_class
from strop.data.sources.files import FILE_SUFFIXES, is_url
from strop.packages import are_assumed
from strop.problems import Problem


class DataEntryConfig(BaseConfig):
    """One source of tasks. Keys that an entry of train or validation does not set come from data.default."""

    dataset_name: PathText | None = Field(
        None,
        description="A built-in dataset, OWNER/NAME on the hub, a .jsonl, .json, .csv, .parquet or .arrow file, or a class or function "
        "that returns rows (package.module.Class, module:name, file.py:name); null for an environment that generates its tasks.",
    )
    dataset_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the class or the function that dataset_name names."
    )
    subset: str | None = Field(None, description="Configuration of a hub dataset; null is its default.")
    split: str | None = Field(
        None,
        description="Split of a hub dataset; null is the built-in dataset's default, otherwise train, including for validation.",
    )
    revision: str | None = Field(
        None,
        description="Revision of a hub dataset, a commit, a tag or a branch; null is the built-in dataset's, else the newest.",
    )
    input_key: str | None = Field(
        None,
        description="Column of the prompt; null is the built-in dataset's, else problem, else prompt (in recorded data, prompt "
        "comes first).",
    )
    output_key: str | None = Field(
        None,
        description="Column of the expected answer; null is the built-in dataset's, else answer, else solution or "
        "completion (in recorded data, completion and response come first).",
    )
    messages_key: str | None = Field(
        None,
        description="Column of a conversation, a list of {role, content}; null looks for messages and conversations. If input_key or "
        "output_key is set too, it is used where the data has it.",
    )
    text_key: str | None = Field(
        None,
        description="Column of raw text, for sft: all of it is trained on, without a prompt and a chat template; null is none.",
    )
    characters_per_sample: int | None = Field(
        None, ge=1, description="Join rows of raw text with newlines up to this length; null is one row (characters)."
    )
    chosen_key: str | None = Field(None, description="Column of the better answer, for dpo and rm; null is chosen.")
    rejected_key: str | None = Field(None, description="Column of the worse answer, for dpo and rm; null is rejected.")
    label_key: str | None = Field(None, description="Column that says whether an answer is desirable, for kto; null is label.")
    system_key: str | None = Field(
        None, description="Column of a system prompt to put before the messages of a conversation; null is none."
    )
    tool_key: str | None = Field(
        None, description="Column of the definitions of tools, which the chat template shows; null is tools, if there is one."
    )
    margin_key: str | None = Field(
        None, description="Column with the margin of the chosen answer; null is margin, if there is one."
    )
    image_key: str | None = Field(
        None,
        description="Column of the images of a record, one or a list: paths, addresses, bytes, or the images of a hub dataset; null "
        "looks for images and image. A text marks their places with <image>; otherwise they come first.",
    )
    media_data_dir: PathText | None = Field(
        None,
        description="Folder of images whose paths are relative; null is the working directory, or else the folder of the data file.",
    )
    prompt_file: PathText | None = Field(
        None,
        json_schema_extra=NAMES_FILE,
        description="Text file with {question} or {} where the question goes; null is only the question, and auto the usual wording of a "
        "built-in dataset that has one. Like system_prompt_file, it is relative to the working directory, or else to the folder of the "
        "configuration that names it or one above.",
    )
    system_prompt_file: PathText | None = Field(
        None, json_schema_extra=NAMES_FILE, description="Text file with the system prompt; null is none."
    )
    system_prompt: str | None = Field(None, description="The system prompt; null is none.")
    shuffle_choices: bool = Field(
        False,
        description="Shuffle the options of a built-in dataset's multiple-choice questions, by seed and question; the letter of the "
        "right one is adjusted. GPQA's options are always shuffled, by question.",
    )
    env_name: str | None = Field(
        None, description="Alias (in env) of the environment that scores the tasks; null is the only one."
    )
    weight: float | None = Field(
        1.0,
        gt=0,
        description="Share of this entry in the mix, relative to the other weights; null for all entries means proportional to their "
        "sizes.",
    )
    prompts_per_step: int | None = Field(
        None,
        ge=1,
        description="Exact number of groups per step from this entry, instead of weight; the numbers of all entries must add up to the "
        "groups of a step (prompts).",
    )
    size: int | None = Field(
        None, ge=1, description="Number of tasks to generate, or to take from the dataset; null is all (tasks)."
    )
    streaming: bool = Field(
        False,
        description="Read the dataset in order with only a few blocks in memory, for any size: a file, a folder of files, a pattern such "
        "as data/*.jsonl, or a hub set, which is not downloaded as a whole.",
    )
    shuffle_buffer: int = Field(
        10_000, ge=1, description="Rows of a block of a streamed dataset, within which they are shuffled (rows)."
    )
    seed: int | None = Field(None, ge=0, description="Seed of generated tasks and of splits; null is the run's.")
    repeat: int = Field(1, ge=1, description="How often each task appears (times).")
    split_validation_size: float = Field(
        0.0, ge=0, description="Hold this out for validation: below 1 a fraction of the entry, from 1 on a number (tasks)."
    )

    # In-memory data instead of ``dataset_name``: a list of dicts, or a ``datasets.Dataset``. Set from Python only; not saved.
    rows: Any = Field(None, exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_rows_in_files(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("rows") is not None:
            raise ValueError(
                "rows is for in-memory data, which can be set only from Python; name a file or a hub set in dataset_name"
            )
        return values

    def with_rows(self, rows: Any) -> Self:
        return replace(self, dataset_name=None, rows=rows)

    @property
    def data_name(self) -> str | None:
        """The data in messages: ``dataset_name``, or "rows"."""
        return self.dataset_name if self.rows is None else "rows"

    @property
    def share(self) -> float | None:
        """Share of this entry in the mix, relative to the others; None for all means proportional to their sizes."""
        return self.weight if self.prompts_per_step is None else self.prompts_per_step

    @property
    def is_file(self) -> bool:
        name = self.dataset_name
        return name is not None and name.endswith(FILE_SUFFIXES) and not is_url(name) and not (self.streaming and has_magic(name))

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_files(key)
        yield from self._check_unread(key)
        yield from self._check_system_prompt(key)
        yield from self._check_streaming(key)
        if self.dataset_kwargs and not is_dataset_class(self.dataset_name or ""):
            yield Problem(
                f"{key}.dataset_kwargs",
                f"found {', '.join(self.dataset_kwargs)}, but {self.data_name} is no class or function, which alone takes arguments",
                "Set dataset_name to package.module.Class, module:name or file.py:name, or remove dataset_kwargs.",
            )

    def _check_files(self, key: str) -> Iterator[Problem]:
        for name in ("prompt_file", "system_prompt_file", *(("dataset_name",) if self.is_file else ())):
            path = getattr(self, name)
            if are_assumed() and name == "dataset_name":
                continue  # data of a run for other machines need not exist here
            if path is not None and not (name == "prompt_file" and path == AUTO_PROMPT) and not _is_file(path):
                beside = "" if name == "dataset_name" else ", nor in the folder of the configuration that names it or one above"
                where = "" if Path(path).is_absolute() else f" in the working directory {Path.cwd()}{beside}"
                yield Problem(
                    f"{key}.{name}",
                    f"there is no file {path}{where}",
                    "Set the path of an existing file, absolute or relative to the working directory.",
                )

    def _check_unread(self, key: str) -> Iterator[Problem]:
        for name, value in list_unread_keys(self).items() if self.is_file else ():
            yield Problem(
                f"{key}.{name}",
                f"found {value}, but {self.dataset_name} is a file, of which all rows are read",
                "Set it to null; size and split_validation_size choose a part of a file.",
            )

        if self.characters_per_sample is not None and self.text_key is None:
            yield Problem(
                f"{key}.characters_per_sample",
                f"found {self.characters_per_sample}, but only raw text is joined, and text_key names none",
                "Set text_key to its column, or characters_per_sample to null.",
            )

    def _check_streaming(self, key: str) -> Iterator[Problem]:
        if self.streaming and self.data_name is None:
            yield Problem(
                f"{key}.streaming", "there is no dataset_name", "Set dataset_name, or streaming=false for generated tasks."
            )
        if self.streaming and self.split_validation_size >= 1:
            yield Problem(
                f"{key}.split_validation_size",
                f"{self.split_validation_size:g} rows are to be held out of a streamed dataset, whose number of rows is not known",
                "Set a fraction below 1: the held-out rows are chosen by their questions.",
            )

    def _check_system_prompt(self, key: str) -> Iterator[Problem]:
        if self.system_prompt is not None and self.system_prompt_file is not None:
            yield Problem(f"{key}.system_prompt", "both system_prompt and system_prompt_file are set", "Set one of them to null.")


def list_unread_keys(entry: Any) -> dict[str, str]:
    """Return the keys of an entry or data source that do not apply to files: subset, revision, and a split other than all rows."""
    given = {name: getattr(entry, name) for name in ("subset", "split", "revision")}
    return {name: value for name, value in given.items() if value is not None and (name, value) != ("split", "train")}


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


class DefaultEntryConfig(DataEntryConfig):
    """Default keys for entries of train and validation. Checks apply to those entries."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    def errors(self, key: str) -> Iterator[Problem]:
        return iter(())


Entries = Annotated[tuple[DataEntryConfig, ...], Field(strict=False)]


class DataConfig(BaseConfig):
    """Training and validation tasks."""

    identity_keys: ClassVar[tuple[str, ...]] = ("train", "shuffle", "add_bos", "add_eos", "add_generation_prompt")

    max_input_seq_length: int = follows(
        "..policy.max_total_sequence_length",
        standalone=512,
        ge=1,
        description="Skip and count tasks with a longer prompt (tokens).",
    )
    shuffle: bool = Field(True, description="Shuffle the training tasks with the run's seed.")
    num_workers: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Processes that tokenize recorded data ahead of the training loop; 0 uses a thread, null one process per eight "
        "processor cores, at most four (processes).",
    )
    prefetch: int | None = Field(
        None,
        ge=0,
        description="How many groups data is tokenized ahead of the training loop, beyond the step in progress; 0 turns this off, null "
        "is one step (groups).",
    )
    add_eos: bool = Field(
        True, description="In recorded data, end the loss tokens with a stop token where the chat template does not."
    )
    add_bos: bool = Field(
        False,
        description="In recorded data, begin a conversation with the tokenizer's bos_token where the chat template does not.",
    )
    add_generation_prompt: bool = Field(
        True, description="In recorded data, treat the chat template's opening of an answer as context; false trains on it too."
    )
    train: Entries = Field((), description="One entry, or a list of entries that are mixed by weight.")
    validation: Entries | None = Field(
        None, description="One entry, or a list of entries; null is the part of train held out by split_validation_size, if any."
    )
    default: DefaultEntryConfig = subsection(DefaultEntryConfig)

    def errors(self, key: str) -> Iterator[Problem]:
        if len({entry.weight is None for entry in self.train}) > 1:
            yield Problem(
                f"{key}.train",
                "some entries have a weight and some have weight=null",
                "Set the weight of each entry, or of none.",
            )
        yield from self._check_quotas(key)
        yield from self._check_streamed(key)

    def _check_streamed(self, key: str) -> Iterator[Problem]:
        streamed = [entry for entry in self.train if entry.streaming]
        if streamed and len(self.train) > 1 and self.train[0].share is None:
            yield Problem(
                f"{key}.train",
                f"{streamed[0].data_name} is streamed, so its size, by which entries without a weight are mixed, is not known",
                "Set the weight of each entry.",
            )
        for entry in self.validation_entries:
            if entry.streaming and entry.size is None:
                yield Problem(
                    f"{key}.validation",
                    f"{entry.data_name} is streamed, and all of its validation rows would be read into memory",
                    "Set data.validation to a separate entry, with the same split_validation_size if there is one, and with size=N.",
                )

    def _check_quotas(self, key: str) -> Iterator[Problem]:
        quotas = [entry.prompts_per_step for entry in self.train]
        if None in quotas and any(quotas):
            yield Problem(
                f"{key}.train",
                f"some entries have prompts_per_step and some do not ({quotas})",
                "Set prompts_per_step of each entry, or of none.",
            )
        for place, entry in zip(entry_keys(f"{key}.train", len(self.train)), self.train, strict=True):
            if entry.prompts_per_step is not None and entry.weight not in (default_of(entry, "weight"), None):
                yield Problem(
                    f"{place}.weight",
                    f"found {entry.weight}, but prompts_per_step={entry.prompts_per_step} already determines the share of this entry",
                    "Remove one of the two.",
                )

    def warnings(self, key: str) -> Iterator[Problem]:
        places = entry_keys(f"{key}.validation", len(self.validation or ()))
        for place, entry in zip(places, self.validation or (), strict=True):
            if entry.prompts_per_step not in (None, self.default.prompts_per_step):
                yield Problem(f"{place}.prompts_per_step", "it has no effect: validation goes through the tasks in their order")

    @property
    def validation_entries(self) -> tuple[DataEntryConfig, ...]:
        """The entries to validate on: those of ``validation``, otherwise the entries of ``train`` with a held-out part."""
        if self.validation is not None:
            return self.validation
        return tuple(entry for entry in self.train if entry.split_validation_size)

    @model_validator(mode="before")
    @classmethod
    def _merge_defaults(cls, values: Any) -> Any:
        """Turn entries into a list, with the keys of ``default`` as defaults. Idempotent."""
        if not isinstance(values, Mapping):
            return values
        default = values.get("default") or {}
        if isinstance(default, DataEntryConfig):
            default = _changed_values(default)
        merged = {key: _merge_entries(values[key], default) for key in ("train", "validation") if values.get(key) is not None}
        return {**values, **merged}

    @field_serializer("train", "validation")
    def _serialize_entries(self, entries: tuple[DataEntryConfig, ...] | None) -> Any:
        """Write a single entry without a list, so that ``data.train.dataset_name=...`` also works on a saved file."""
        dumped = None if entries is None else [to_tree(entry, mode="python") for entry in entries]
        return dumped[0] if dumped is not None and len(dumped) == 1 else dumped

    @field_serializer("default")
    def _serialize_default(self, default: DataEntryConfig) -> dict[str, Any]:
        return _changed_values(default)


def entry_keys(key: str, count: int) -> tuple[str, ...]:
    """Return the keys of ``count`` list entries as named in messages: a single entry has no number."""
    return (key,) if count == 1 else tuple(f"{key}.{index}" for index in range(count))


def _changed_values(entry: DataEntryConfig) -> dict[str, Any]:
    return {name: value for name in fields_of(type(entry)) if (value := getattr(entry, name)) != default_of(entry, name)}


def _merge_entries(entries: Any, default: Any) -> Any:
    if isinstance(entries, Mapping | DataEntryConfig):
        entries = [entries]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return entries
    if not isinstance(default, Mapping):
        return list(entries)
    return [{**default, **entry} if isinstance(entry, Mapping) else entry for entry in entries]


class EvalEntryConfig(DataEntryConfig):
    """A set of tasks to evaluate on."""

    prompt_file: PathText | None = Field(
        AUTO_PROMPT,
        json_schema_extra=NAMES_FILE,
        description="Text file with {question} or {} where the question goes; auto is the usual wording of a built-in dataset that has "
        "one, otherwise only the question; null is only the question. Like system_prompt_file, it is relative to the working directory, "
        "or else to the folder of the configuration that names it or one above.",
    )


class EvalSetConfig(EvalEntryConfig):
    """One of several sets to evaluate on. Unset keys come from data."""

    name: str | None = Field(
        None,
        min_length=1,
        description="Name in metrics; null is the dataset's name, with its subset if needed to distinguish two sets.",
    )
    num_tests_per_prompt: int | None = Field(
        None, ge=1, description="Samples per task of this set; null is eval.num_tests_per_prompt (samples)."
    )
    temperature: float | None = Field(None, ge=0, description="Sampling temperature of this set; null is generation.temperature.")


class EvalDataConfig(EvalEntryConfig):
    """The tasks to evaluate on."""

    max_input_seq_length: int = follows(
        "..generation.vllm_cfg.max_model_len",
        standalone=2048,
        ge=1,
        description="Skip and count tasks with a longer prompt (tokens).",
    )
    sets: Annotated[tuple[EvalSetConfig, ...], Field(strict=False)] = Field(
        (),
        description="Several sets; keys that a set does not set come from data. Several names in dataset_name, as a list or separated by "
        "commas, have the same effect.",
    )

    @property
    def entries(self) -> tuple[EvalEntryConfig, ...]:
        return self.sets or (self,)

    def errors(self, key: str) -> Iterator[Problem]:
        if not self.sets:
            yield from super().errors(key)
            return
        named = [each.name for each in self.sets if each.name is not None]
        for name in sorted({name for name in named if named.count(name) > 1}):
            yield Problem(f"{key}.sets", f"found {named.count(name)} sets with the name {name}", "Give each its own name.")

    def warnings(self, key: str) -> Iterator[Problem]:
        if self.sets and self.dataset_name is not None and all(each.dataset_name != self.dataset_name for each in self.sets):
            yield Problem(
                f"{key}.dataset_name",
                f"{self.dataset_name} is not evaluated: each of data.sets names its own dataset",
                "Set data.sets=[] to evaluate it, or add it to the sets.",
            )

    @model_validator(mode="before")
    @classmethod
    def _split_sets(cls, values: Any) -> Any:
        """Turn several names into ``sets``, and fill in unset keys of each set from ``data``. Idempotent."""
        if not isinstance(values, Mapping):
            return values
        names = split_names(values.get("dataset_name"))
        given = values.get("sets") or ()
        if names and given:
            raise ValueError("dataset_name has several names, and sets is given, too; keep one of them")
        if names:
            given, values = [{"dataset_name": name} for name in names], {**values, "dataset_name": None}
        if not isinstance(given, Sequence) or isinstance(given, str):
            return values
        shared = {key: value for key, value in values.items() if key not in ("sets", "max_input_seq_length")}
        return {**values, "sets": [{**shared, **each} if isinstance(each, Mapping) else each for each in given]}


def split_names(value: Any) -> list[str]:
    """Return the names of several data sets, given as a list or separated by commas; none for a single name."""
    if isinstance(value, str) and "," in value and not _is_file(value):
        value = [name.strip() for name in value.split(",") if name.strip()]
    return [str(name) for name in value] if isinstance(value, list | tuple) else []
