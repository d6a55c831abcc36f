"""Distillation from teachers, on rollouts of the student: `strop distillation`."""
