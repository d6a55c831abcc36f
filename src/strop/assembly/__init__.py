"""Build a running system from a configuration. The only package that knows all others."""

from strop.assembly.describe import summarize
from strop.assembly.evaluation import run_evaluation
from strop.assembly.run import run_training

__all__ = ["run_evaluation", "run_training", "summarize"]
