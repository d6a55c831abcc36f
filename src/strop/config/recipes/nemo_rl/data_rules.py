"""Section ``data``: data sets, their columns, prompts."""

from __future__ import annotations

from strop.config.recipes.rules import Refused, Rule, Unused

DATA_RULES: tuple[Rule, ...] = (
    Unused("data.num_workers", "tasks are read in the driver process"),
    Refused(
        ("data.use_multiple_dataloader",),
        "one order is drawn over all entries",
        "List the entries under data.train, with their weights. Remove the key.",
    ),
    Unused("data*.processor", "input_key, output_key, prompt_file and the environment turn a row into a task"),
    Unused("data*.add_bos", "the chat template determines it"),
    Unused("data*.add_generation_prompt", "the chat template determines it"),
)
