"""The commands that train on recorded data."""

from __future__ import annotations

from strop.cli.commands import training_command

SFT = training_command("sft", "supervised fine-tuning")
DPO = training_command("dpo", "preference optimisation: DPO and its family")
RM = training_command("rm", "a reward model")
