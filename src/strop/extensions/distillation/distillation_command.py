"""``strop distillation``."""

from __future__ import annotations

from strop.cli.commands import training_command

DISTILLATION = training_command("distillation", "distillation from a teacher")
