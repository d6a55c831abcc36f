"""Calls of Strop to the processes that hold an engine's model, carried by SGLang's weights checker."""

from __future__ import annotations

import base64
import pickle
from typing import Any

WEIGHTS_VARIABLE = "STROP_SGLANG_WEIGHTS"  # module:Class that takes the calls
CALL_PREFIX = "strop:"  # of the action of a request to the weights checker
RESULT = "result"  # where the answer is, among the checksums of a rank


def encode_call(method: str, *arguments: Any) -> dict[str, Any]:
    """Return the body of the request that calls ``method`` of ``ModelWeights`` on every rank."""
    return {"action": f"{CALL_PREFIX}{method} {base64.b64encode(pickle.dumps(arguments)).decode()}", "selector": "target"}


def decode_answers(body: dict[str, Any]) -> list[Any]:
    """Return the answer of each rank. They are pickles of our own engine's processes, which need the engine's key to be reached."""
    return [pickle.loads(base64.b64decode(rank["checksums"][RESULT])) for rank in body.get("ranks", ())]
