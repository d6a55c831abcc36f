"""What every page that Strop writes has to be: one file, which loads nothing and runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import html.parser

VOID = {"meta", "br", "img", "input", "link"}


class ParsedPage(html.parser.HTMLParser):
    """The elements of a page, with their texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def values(self, attribute: str) -> list[str | None]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def check_page(text: str) -> ParsedPage:
    """Parse a page, and fail if it could load or run anything but its own style and script, or does not name its parts."""
    page = ParsedPage(text)
    assert not page.unbalanced, page.unbalanced
    kinds = [tag for tag, _ in page.elements]
    assert not {"img", "iframe", "object", "embed", "base", "form", "use", "image", "foreignobject"} & set(kinds)
    assert kinds.count("style") == 1 and [attributes.get("type") for tag, attributes in page.elements if tag == "script"] == [
        "application/json", "module",
    ]  # fmt: skip
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "style", "srcset", "xlink:href")]
    assert page.values("href") == ["data:,"]
    (policy,) = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert policy is not None and policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind][-1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert ("html", {"lang": "en"}) in page.elements
    assert not set("\x1b\x07\u202e\u2066\x9b\ud800") & set(text)
    return page
