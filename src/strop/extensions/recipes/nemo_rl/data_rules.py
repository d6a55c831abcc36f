"""Section ``data``: data sets, their columns, prompts, and files that prompts and chat templates are in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strop.base_config import fields_of
from strop.config.source.yaml_source import get_at
from strop.data.data_config import DataEntryConfig
from strop.data.sources.dataset_class import is_dataset_class
from strop.extensions.recipes.nemo_rl.generation_rules import IMAGE_DATASETS, SOUND_DATASETS, note_image_options
from strop.extensions.recipes.rules import Effect, Recipe, Rule, Unused, is_switched_off

PROMPT = "prompt_file, the system prompt and the chat template make a prompt of a question, as it does"
PROCESSORS = {
    "default": PROMPT,
    "math_hf_data_processor": PROMPT,
    "math_data_processor": PROMPT,
    "multichoice_qa_processor": "a built-in data set with options shows them below its question",
    "sft_processor": "the chat template cuts a conversation into loss tokens and context; white space after the end of a turn is context",
    "kd_data_processor": "it hands raw text to distillation across tokenizers",
    "helpsteer3_data_processor": PROMPT,
    "nemo_gym_data_processor": "its prompts are made by NeMo-Gym",
    "vlm_hf_data_processor": "the columns of images are read, and the model's processor makes a prompt of them and the question",
}
ANSWERS_ARE_NOT_SHOWN = (
    "the context is the prompt, and the preferred response what the environment compares with; helpsteer3_data_processor writes that "
    "response into the prompt, too, for the policy to go on after it"
)
SEPARATE_SYSTEM_PROMPT = ("math_data_processor", "multichoice_qa_processor")
CUSTOM_LOADER = "data.custom_dataloader"
EXAMPLE_DATALOADER = "example_custom_dataloader"
CHOOSING_DATALOADER = "example_custom_dataloader_with_chosen_task"


def translate_entries(recipe: Recipe) -> None:
    """Translate each entry of the data, with what it inherits from ``data.default``."""
    names = [get_at(recipe.source.values, tuple(key.split("."))) for key in recipe.find("data*.dataset_name")]
    if any(isinstance(name, list | dict) for name in names):
        return  # the schema refuses them
    if all(_is_own_name(name) for name in names) and all(
        recipe.is_own_key(".".join(path)) for path in recipe.source.origins if path[0] == "data"
    ):
        return
    default = recipe.value("data.default") or {}
    for key, entry in list(_list_entries(recipe)):
        merged = {**default, **entry} if isinstance(default, Mapping) else dict(entry)
        _translate_processor(recipe, key, merged)
        _translate_dataset(recipe, key, merged)
        _translate_fixed_options(recipe, key, merged)
        _translate_other_keys(recipe, key, merged)
    for name in (
        "processor",
        "data_path",
        "data_files",
        "prompt_key",
        *(name for kind in DATASET_FORMATS.values() for name in kind.keys),
    ):
        if recipe.is_set(key := f"data.default.{name}") and not recipe.is_own_key(key):
            recipe.unused(key, "each entry of data.train and data.validation has it now")
    if str(recipe.value("data.default.dataset_name")) in DATASET_FORMATS:
        recipe.unused("data.default.dataset_name", "each entry of data.train and data.validation has it now")


def _is_own_name(name: Any) -> bool:
    return isinstance(name, str) and "${" not in name and name not in DATASET_FORMATS


def _list_entries(recipe: Recipe) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not recipe.is_own_key("data.train"):  # of an evaluation, the section is the entry
        entry = recipe.value("data")
        yield from [("data", entry)] if isinstance(entry, Mapping) else []
        return
    for part in ("train", "validation"):
        entries = recipe.value(f"data.{part}")
        if isinstance(entries, Mapping):
            yield f"data.{part}", entries
        elif isinstance(entries, list):
            yield from [(f"data.{part}.{index}", entry) for index, entry in enumerate(entries) if isinstance(entry, Mapping)]


def _translate_processor(recipe: Recipe, key: str, entry: Mapping[str, Any]) -> None:
    name = entry.get("processor")
    if name is None:
        recipe.unused_if_set(f"{key}.processor", PROMPT)
    elif str(name) not in PROCESSORS:
        recipe.refuse(
            _place(recipe, key, "processor"),
            f"found {name!r:.80}: a processor is code of NeMo-RL, and this one is not built in",
            "Write the prompts into a column of the data, and name it in input_key.",
        )
    else:
        recipe.unused_if_set(f"{key}.processor", PROCESSORS[name])
        if name == "helpsteer3_data_processor":
            recipe.note(_place(recipe, key, "processor"), Effect.CHANGED, ANSWERS_ARE_NOT_SHOWN)
        if name in SEPARATE_SYSTEM_PROMPT and (entry.get("system_prompt_file") or entry.get("system_prompt")):
            recipe.note(
                _place(recipe, key, "processor"),
                Effect.CHANGED,
                f"the system prompt and the question are rendered as one conversation; {name} renders each separately, and joins the texts",
            )


def _translate_dataset(recipe: Recipe, key: str, entry: Mapping[str, Any]) -> None:
    name, path = entry.get("dataset_name"), entry.get("data_path")
    if str(name) in IMAGE_DATASETS:
        note_image_options(recipe, key, str(name))
    if str(name) in SOUND_DATASETS:
        for option in ("data_path", "download_dir", "allowed_problem_types", "max_samples", "repeat"):
            if not recipe.is_own_key(f"{key}.{option}"):
                recipe.unused_if_set(f"{key}.{option}", f"it is an option of {name}")
        return
    if kind := DATASET_FORMATS.get(str(name)):
        _name_path(recipe, key, str(name), kind, entry)
    elif is_dataset_class(str(name)):
        _pass_arguments(recipe, key, str(name), entry)
    elif path is not None and name is None:
        recipe.rename(_place(recipe, key, "data_path"), f"{key}.dataset_name", path)
    else:
        recipe.unused_if_set(f"{key}.data_path", f"{name} is not read from a path")


def _translate_fixed_options(recipe: Recipe, key: str, entry: Mapping[str, Any]) -> None:
    """Options of a built-in set that Strop's entry has fixed: the rows that it leaves out, the answer that it reads."""
    name = str(entry.get("dataset_name"))
    for option, value in FIXED_OPTIONS.get(name, {}).items():
        if not recipe.is_set(f"{key}.{option}"):
            continue
        if bool(entry.get(option)) == value:
            recipe.unused(f"{key}.{option}", f"{name} is read so here")
        elif option == "extract_answer":
            _read_whole_answers(recipe, key, entry)
        else:
            recipe.refuse(
                _place(recipe, key, option),
                f"found {entry.get(option)!r:.80}, but {name} is read without the rows that cannot be checked",
                f"Set {key}.dataset_name=AI-MO/NuminaMath-1.5 for all rows.",
            )


def _read_whole_answers(recipe: Recipe, key: str, entry: Mapping[str, Any]) -> None:
    """GSM8K's whole solutions: the set of the hub, of which nothing is extracted."""
    whole = {
        "dataset_name": "openai/gsm8k",
        "subset": entry.get("subset") or "main",
        "input_key": "question",
        "output_key": "answer",
    }
    for own, value in whole.items():
        recipe.set(f"{key}.{own}", value, because=f"{key}.extract_answer")
    recipe.note(f"{key}.extract_answer", Effect.RENAMED, f"{key}.dataset_name=openai/gsm8k here, whose answers are read whole")
    recipe.drop(f"{key}.extract_answer")


def _pass_arguments(recipe: Recipe, key: str, name: str, entry: Mapping[str, Any]) -> None:
    """Hand every key that only a user's class can know to the class, as NeMo-RL does."""
    for option in [option for option in entry if option != "processor" and not recipe.is_own_key(f"{key}.{option}")]:
        recipe.set(f"{key}.dataset_kwargs.{option}", entry[option], because=_place(recipe, key, option))
        recipe.note(_place(recipe, key, option), Effect.RENAMED, f"{key}.dataset_kwargs.{option} here, an argument of {name}")
        recipe.drop(f"{key}.{option}")
        recipe.drop(f"data.default.{option}")


def _name_path(recipe: Recipe, key: str, name: str, kind: DatasetFormat, entry: Mapping[str, Any]) -> None:
    """Name the path itself, and the columns that a format of NeMo-RL reads unless other keys say so."""
    path, place = entry.get(kind.path_key), _place(recipe, key, kind.path_key)
    if path is None:
        fix = f"Set {key}.{kind.path_key} to a file or to OWNER/NAME of the hub."
        at = place if recipe.is_written(place) else _place(recipe, key, "dataset_name")
        recipe.refuse(at, f"found {'null' if at == place else name}, but no {kind.path_key} to read", fix)
        return recipe.drop(f"{key}.{kind.path_key}")
    recipe.set(f"{key}.dataset_name", path, because=place)
    recipe.note(place, Effect.RENAMED, f"{key}.dataset_name={path} here, with the columns of {name}")
    for option, (own, usual) in kind.keys.items():
        if (column := entry.get(option) or usual) is not None:
            recipe.set(f"{key}.{own}", column, because=_place(recipe, key, option))
        if option != own:
            recipe.drop(f"{key}.{option}")
    recipe.drop(f"{key}.{kind.path_key}")
    recipe.drop(f"{key}.use_preserving_dataset")


def _translate_other_keys(recipe: Recipe, key: str, entry: Mapping[str, Any]) -> None:
    for option, own in (("problem_key", "input_key"), ("solution_key", "output_key"), ("prompt_key", "input_key")):
        if recipe.is_set(f"{key}.{option}"):
            recipe.rename(f"{key}.{option}", f"{key}.{own}")
    if recipe.is_set(f"{key}.max_samples"):
        if is_switched_off(entry.get("max_samples")):
            recipe.unused(f"{key}.max_samples", "it is switched off")
        else:
            text = f"{key}.size={entry['max_samples']} takes the first rows; NeMo-RL draws as many by the seed"
            recipe.rename(f"{key}.max_samples", f"{key}.size", effect=Effect.CHANGED, text=text)
    recipe.unused_if_set(f"{key}.file_format", "the ending of the file says it")
    recipe.unused_if_set(f"{key}.download_dir", "HF_HOME says where data sets are kept")


def translate_preference_validation(recipe: Recipe) -> None:
    """``val_data_paths``: files of preferences by name."""
    key = "data.val_data_paths"
    if not recipe.is_set(key):
        return
    paths = recipe.value(key)
    if isinstance(paths, Mapping) and paths:
        recipe.set("data.validation", [{"dataset_name": path} for path in paths.values()], because=key)
        text = "data.validation lists the files; their metrics are of all of them together, not one by one"
        recipe.note(key, Effect.CHANGED, text)
        recipe.drop(key)
    else:
        recipe.unused(key, "it is switched off")


def translate_dataloaders(recipe: Recipe) -> None:
    """Several data loaders: a number of tasks of each entry in a step, and each entry has its own order and epochs."""
    loader, number, switch = CUSTOM_LOADER, "data.num_prompts_per_dataloader", "data.use_multiple_dataloader"
    if not recipe.is_set(switch):
        return
    entries = recipe.value("data.train")
    if not recipe.value(switch):
        if isinstance(entries, list) and len(entries) > 1 and not any(entry.get("weight") for entry in entries):
            for index in range(len(entries)):
                recipe.set(f"data.train.{index}.weight", None, because=switch)
        for key in (switch, loader, number):
            recipe.unused_if_set(key, "the entries of data.train are joined, and a larger one has a larger share")
        return
    if str(recipe.value(loader, "")).rpartition(".")[2] == EXAMPLE_DATALOADER:
        _set_quotas(recipe, entries, number, switch)
    else:
        _refuse_loader(recipe, loader if recipe.is_set(loader) else switch)
    for key in (switch, loader, number):
        recipe.drop(key)


def _set_quotas(recipe: Recipe, entries: Any, number: str, switch: str) -> None:
    quota = recipe.value(number)
    if quota is None:
        fix = "Set it to the tasks of each entry in a step."
        return recipe.refuse(switch, f"found true, but {number} is not set, which says how many tasks each loader gives", fix)
    several = isinstance(entries, list) and len(entries) > 1
    for index in range(len(entries) if isinstance(entries, list) else 1):
        recipe.set(f"data.train.{index}.prompts_per_step" if several else "data.train.prompts_per_step", quota, because=number)
    recipe.note(number, Effect.RENAMED, f"prompts_per_step={quota} of each entry of data.train")
    note = "the entries of data.train take turns within a step, and the last tasks of an entry's epoch are not left out"
    recipe.note(switch, Effect.RENAMED, note)
    for epochs in (f"{section}.max_num_epochs" for section in ("grpo", "ppo", "distillation")):
        if recipe.value(epochs) is not None:
            recipe.set(epochs, None, because=switch)
            recipe.note(epochs, Effect.CHANGED, "null here: with several data loaders NeMo-RL ends after max_num_steps alone")


def _refuse_loader(recipe: Recipe, key: str) -> None:
    name = str(recipe.value(CUSTOM_LOADER, ""))
    why = "it joins batches of NeMo-RL out of iterators, and has no position to continue from"
    if not name:
        why = "data.custom_dataloader is not set, without which NeMo-RL does not run either"
    elif name.rpartition(".")[2] == CHOOSING_DATALOADER:
        why = "it is told by a changed training loop of which entries a step is (set_records)"
    recipe.refuse(
        key,
        f"found {name or True!r:.80}, but which entry a task is of is drawn by weight, not by code: {why}",
        "Set data.use_multiple_dataloader=false and data.train.N.prompts_per_step or weight of each entry, or write a class that chooses "
        "among the tasks of an entry, data.curriculum.name=file.py:Class.",
    )


def drop_stray_keys(recipe: Recipe) -> None:
    """Drop keys of an entry that stand in ``data`` itself: only an evaluation reads them there."""
    for name in fields_of(DataEntryConfig):
        if not recipe.is_own_key(f"data.{name}"):
            recipe.unused_if_set(
                f"data.{name}",
                "NeMo-RL does not read it here either; data.train, data.validation and data.default have it",
            )


def warn_of_null_template(recipe: Recipe) -> None:
    """Say what null means in a recipe of NeMo-RL, which has keys that Strop does not have."""
    for key in recipe.find("*tokenizer.chat_template"):
        if recipe.differences and recipe.is_written(key) and recipe.value(key) is None:
            text = (
                "null is the tokenizer's own template here; NeMo-RL joins the contents of the messages, which is passthrough here"
            )
            recipe.note(key, Effect.CHANGED, text)


def _place(recipe: Recipe, key: str, option: str) -> str:
    """Return the key that sets an option of an entry: its own, or that of ``data.default``."""
    places = (f"{at}.{option}" for at in (key, "data.default"))
    return next(filter(recipe.is_written, places), f"{key}.{option}")


DATA_RULES: tuple[Rule, ...] = (
    Unused("data.num_workers", "tasks are read in the driver process"),
    translate_dataloaders,
    translate_preference_validation,
    translate_entries,
    drop_stray_keys,
    warn_of_null_template,
    Unused("data.add_system_prompt", "only the game of NeMo-RL's sliding puzzle reads it"),
    Unused("data.default.video_*", "models read no video"),
)


# NeMo-RL's names of data sets that are formats of files, options of its built-in sets, and sets that Strop does not have.


@dataclass(frozen=True)
class DatasetFormat:
    """How rows at a path are read: key of NeMo-RL -> Strop's key, and its default."""

    keys: Mapping[str, tuple[str, str | None]]
    path_key: str = "data_path"


RESPONSES = DatasetFormat(
    {
        "input_key": ("input_key", "input"),
        "output_key": ("output_key", "output"),
        "messages_key": ("messages_key", "messages"),  # read in place of the two where the data has it
    }
)
CONVERSATIONS = DatasetFormat({"chat_key": ("messages_key", "messages"), "system_key": ("system_key", None)})
DATASET_FORMATS: Mapping[str, DatasetFormat] = {
    "ResponseDataset": RESPONSES,
    "openai_format": CONVERSATIONS,
    "OpenAIFormatDataset": CONVERSATIONS,
    "general-conversation-jsonl": DatasetFormat({}),  # from and value, with places for images
    "NemoGymDataset": DatasetFormat({}),  # whole rows, for the servers of NeMo-Gym
    "PreferenceDataset": DatasetFormat({}),  # context and completions with ranks
    "BinaryPreferenceDataset": DatasetFormat(
        {
            "prompt_key": ("input_key", "prompt"),
            "chosen_key": ("chosen_key", "chosen"),
            "rejected_key": ("rejected_key", "rejected"),
        }
    ),
    "arrow_text": DatasetFormat(
        {"text_key": ("text_key", "text"), "characters_per_sample": ("characters_per_sample", None)}, path_key="data_files"
    ),
}

# Options of built-in sets that Strop's entries have fixed: name -> option -> the value that they have.
FIXED_OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "gsm8k": {"extract_answer": True},
    "GSM8K": {"extract_answer": True},
    "NuminaMath-1.5": {"verifiable_only": True, "require_valid": True},
}
