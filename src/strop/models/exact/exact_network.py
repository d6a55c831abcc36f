"""A network whose passes are exact: what ``strop.models.network`` and the embedded engine need of it."""

from __future__ import annotations

import logging
from typing import Any

from strop.models.exact.exact_modules import make_exact
from strop.models.exact.packed_weights import PackedWeights

log = logging.getLogger(__name__)


class ExactPasses:
    """The exact forward passes of one model, whose modules are changed in place."""

    def __init__(self, model: Any) -> None:
        """Raises NotExactError for a model with operations that have no exact form."""
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.weights: PackedWeights = make_exact(model.get_decoder(), vocabulary)
        self.forget_weights()  # they are loaded, or restored, after this
        log.info("exact_on_policy: learner and engine compute with products, attention and functions of fixed order")

    def forget_weights(self) -> None:
        """Make the copies of weights again when they are next read. Called where weights change: not every way of it can be seen."""
        self.weights.clear()


def forget_exact_weights(network: object) -> None:
    """Call ``forget_weights`` of a network that computes exactly; nothing for others."""
    exact = getattr(network, "exact", None)
    if isinstance(exact, ExactPasses):
        exact.forget_weights()
