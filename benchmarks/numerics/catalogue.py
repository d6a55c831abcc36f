"""All sections of the page, in its order."""

from __future__ import annotations

from numerics.definitions import definitions
from numerics.families import families, sampling, vllm
from numerics.nemo_rl import nemo_rl
from numerics.page import Measurement, measure
from numerics.papers import papers
from numerics.ranks import coarse_ranks, ranks
from numerics.sections import Section
from numerics.trl_losses import trl_losses
from numerics.trl_runs import trl_runs


def sections() -> tuple[Section, ...]:
    return (papers(), trl_losses(), nemo_rl(), trl_runs(), ranks(), coarse_ranks(), families(), sampling(), vllm(), definitions())


def measure_section(place: int) -> Measurement:
    """Measure one of them, in a process of its own."""
    return measure(sections()[place])
