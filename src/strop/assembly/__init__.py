"""From a configuration to a running system: the only place that knows every part."""

from strop.assembly.describe import describe
from strop.assembly.evaluation import run_evaluation
from strop.assembly.run import run_training

__all__ = ["describe", "run_evaluation", "run_training"]
