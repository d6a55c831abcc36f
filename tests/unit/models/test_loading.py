"""Models and tokenizers that are not there."""

from __future__ import annotations

import pytest

from strop.models.loading import ModelNotFound, load_tokenizer


def test_a_tokenizer_that_is_not_there_is_named_by_its_own_key() -> None:
    with pytest.raises(ModelNotFound, match=r"policy\.tokenizer\.name: there is no folder /nowhere/at-all"):
        load_tokenizer("/nowhere/at-all", key="policy.tokenizer.name")
