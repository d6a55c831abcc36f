"""Rollouts as one HTML page that needs no network.

Everything is written as escaped text; the page's own script, which filters and colours, only sets text too. A content security policy
allows that script and the page's style by their hashes and nothing else, so that nothing a model wrote can run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_view.rollout_selection import SelectedRollouts
from strop.monitoring.rollout_view.shown_rollout import ShownMessage, show_rollout
from strop.safety.printable import make_printable

Decode = Callable[[list[int]], str]
_PLACEHOLDER = re.compile(r"\{(policy|title|summary|rollouts|tokens)\}")


def make_page(
    selected: SelectedRollouts,
    *,
    title: str,
    limit: int | None,
    decode: Decode | None,
    note: str = "",
    find_image: Callable[[str], Path | None] = lambda name: None,
) -> str:
    """Return the page. ``decode`` is the tokenizer's, for the texts of tokens; without it tokens are shown by their ids.

    ``find_image`` returns the file of an image by its name in a record."""
    template = files("strop.monitoring.rollout_view").joinpath("rollout_page.html").read_text(encoding="utf-8")
    tokens = {str(index): _list_tokens(record, decode) for index, record in enumerate(selected.records) if record.tokens}
    previews = _make_previews(selected.records, find_image)
    parts = {
        "policy": _make_policy(template, bool(previews)),
        "title": html.escape(make_printable(f"rollouts of {title}")),
        "summary": html.escape(make_printable(f"{selected.summary}. {note}".strip())),
        "rollouts": "\n".join(
            _format_article(index, record, limit, selected.flags_of(record), previews)
            for index, record in enumerate(selected.records)
        ),
        "tokens": json.dumps(tokens, allow_nan=False).replace("<", "\\u003c"),  # nothing can close the element
    }
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], template)


def _make_policy(template: str, has_images: bool) -> str:
    style, script = _between(template, "<style>", "</style>"), _between(template, "<script>", "</script>")
    images = " img-src data:;" if has_images else ""  # of the page itself
    return (
        f"default-src 'none';{images} style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )


def _make_previews(records: Sequence[RolloutRecord], find_image: Callable[[str], Path | None]) -> dict[str, str]:
    """Return the images of records as small ``data:`` URLs, by name; those that cannot be read are left out."""
    names = {image for record in records for image in (*(name for _, name in record.prompt_images), *_turn_images(record))}
    found = ((name, find_image(name)) for name in sorted(names))
    made = ((name, None if path is None else make_preview(path)) for name, path in found)
    return {name: preview for name, preview in made if preview is not None}


def _turn_images(record: RolloutRecord) -> Iterator[str]:
    for turn in record.turns:
        yield from turn.images


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _format_article(
    index: int, record: RolloutRecord, limit: int | None, flags: Sequence[str], previews: Mapping[str, str]
) -> str:
    shown = show_rollout(record, limit, flags)
    data = {
        "index": index, "step": record.step, "environment": record.environment, "ending": record.ending,
        "reward": record.reward if math.isfinite(record.reward) else 0,
    }  # fmt: skip
    attributes = " ".join(f'data-{name}="{html.escape(make_printable(str(value)))}"' for name, value in data.items())
    facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in shown.facts)
    button = (
        f'<button type="button" class="show" hidden>tokens</button><pre class="tokens" data-index="{index}" hidden></pre>\n'
        if record.tokens
        else ""
    )
    turns = "\n".join(_format_message(message, previews) for message in shown.messages)
    return (
        f"<article {attributes}>\n<h2>{html.escape(shown.title)}</h2>\n<dl>{facts}</dl>\n"
        f'<ol class="turns">\n{turns}\n</ol>\n{button}</article>'
    )


def _format_message(message: ShownMessage, previews: Mapping[str, str]) -> str:
    kind = message.role if message.role in ("tool", "system", "user") else ""
    classes = " ".join(part for part in ("turn", kind, "sampled" if message.sampled else "") if part)
    note = f" ({html.escape(message.note)})" if message.note else ""
    return (
        f'<li class="{classes}"><span class="role">{html.escape(message.role)}{note}</span>'
        f"{_format_reasoning(message)}"
        f'<pre class="text">{html.escape(message.text)}</pre>{"".join(_format_image(name, previews) for name in message.images)}</li>'
    )


def _format_reasoning(message: ShownMessage) -> str:
    if not message.reasoning:
        return ""
    return (
        f"<details><summary>reasoning, {html.escape(message.origin)}</summary>"
        f'<pre class="text">{html.escape(message.reasoning)}</pre></details>'
    )


def _format_image(name: str, previews: Mapping[str, str]) -> str:
    """Return an image, or its name where there is no preview."""
    shown = html.escape(make_printable(name))
    preview = previews.get(name)
    return (
        f'<p class="note">image {shown}</p>' if preview is None else f'<img alt="image {shown}" title="{shown}" src="{preview}">'
    )


def _list_tokens(record: RolloutRecord, decode: Decode | None) -> dict[str, object]:
    learner = record.learner_logprobs
    return {
        "ids": record.tokens,
        "texts": None if decode is None else [make_printable(piece) for piece in split_text(record.tokens, decode)],
        "sampler": _round(record.sampler_logprobs, record.sampled),
        "learner": None if learner is None else _round(learner, record.sampled),
        "advantage": None if record.advantage is None else round(record.advantage, 4),
    }


def _round(values: Sequence[float], sampled: Sequence[bool]) -> list[float | None]:
    pairs = zip(values, sampled, strict=True)
    return [round(value, 4) if is_sampled and math.isfinite(value) else None for value, is_sampled in pairs]


def split_text(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds. A character of several tokens belongs to the last of them."""
    pieces: list[str] = []
    start = done = 0  # decoding begins some tokens earlier, because some tokenizers drop a space at the beginning
    for end in range(1, len(tokens) + 1):
        before, text = decode(list(tokens[start:done])), decode(list(tokens[start:end]))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(tokens) and end - done < 4:
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, done = done, end
    return pieces


# Small copies of stored images for a page. PIL draws each anew, so that nothing of the file but its pixels reaches the page.


LARGEST_SIDE = 240  # pixels
MOST_PIXELS = 64 * 10**6  # of a file that is opened


def make_preview(path: Path) -> str | None:
    """Return an image as a small ``data:`` URL; None if it cannot be read, or without PIL."""
    try:
        from PIL import Image

        with Image.open(path) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                return None
            small = opened.convert("RGB")
            small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            file = io.BytesIO()
            small.save(file, format="PNG", optimize=True)
    except Exception:  # PIL is missing, or raises one of its many classes for a damaged file
        return None
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
