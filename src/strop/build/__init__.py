"""Build a running system from a configuration. The only package that knows all others."""

from strop.build.evaluate import run_evaluation
from strop.build.summary import summarize
from strop.build.training_run import run_training

__all__ = ["run_evaluation", "run_training", "summarize"]
