"""A browser without pictures and scripts: pages as text, links, fields and buttons by name. Runs in a ``kernel``."""

import http.cookiejar
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from typing import Any

MOST = 1 << 20  # bytes of a page
BLOCKS = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "br", "form", "ul", "ol", "table", "title", "section", "hr"}
BUTTONS = {"submit", "button", "image"}


class Page(HTMLParser):
    """Reads a page: ``text``, ``links`` (label, address), ``forms``."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self._hidden, self._select = "", 0, ""
        self.links: list[tuple[str, str]] = []
        self.forms: list[dict[str, Any]] = []
        self._open: Any = None  # of a link or a button whose label is being read: its kind, what it does, where it starts
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        values = {key: value or "" for key, value in attributes}
        if tag in BLOCKS:
            self.text += "\n"
        if tag in ("script", "style"):
            self._hidden += 1
        elif tag == "form":
            action, method = values.get("action", ""), values.get("method", "get").lower()
            self.forms.append({"action": action, "method": method, "fields": {}, "buttons": []})
        elif tag == "a" and "href" in values:
            self._open = ("link", values["href"], len(self.text))
        elif tag == "button":
            self._open = ("button", values, len(self.text))
        elif tag in ("input", "textarea", "select") and self.forms:
            self._add_field(tag, values)
        elif (
            tag == "option"
            and self.forms
            and self._select
            and ("selected" in values or not self.forms[-1]["fields"][self._select])
        ):
            self.forms[-1]["fields"][self._select] = values.get("value", "")

    def _add_field(self, tag: str, values: Any) -> None:
        form, name, kind = self.forms[-1], values.get("name", ""), values.get("type", "text").lower()
        if kind in BUTTONS:
            form["buttons"].append((values.get("value", "Submit"), name, values.get("value", "")))
            self.text += " (button: {}) ".format(values.get("value", "Submit"))
        elif name:
            form["fields"][name] = values.get("value", "")
            self._select = name if tag == "select" else ""
            if kind != "hidden":
                self.text += " [field {}: {!r}] ".format(name, values.get("value", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._hidden = max(self._hidden - 1, 0)
        if self._open is not None and (tag == "a" or tag == "button"):
            kind, what, start = self._open
            label = " ".join(self.text[start:].split())
            if kind == "link":
                self.links.append((label, what))
                self.text = f"{self.text[:start]}[{len(self.links)}: {label}]"
            elif self.forms:
                self.forms[-1]["buttons"].append((label, what.get("name", ""), what.get("value", "")))
                self.text = f"{self.text[:start]} (button: {label}) "
            self._open = None

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data


class Browser:
    """One window. Each method returns what is seen then."""

    def __init__(self) -> None:
        self.address, self.page = "", Page("")
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self.opener = urllib.request.build_opener(cookies, urllib.request.ProxyHandler({}))

    def open(self, address: str, body: "bytes | None" = None) -> str:
        self.address = urllib.parse.urljoin(self.address, address)
        if urllib.parse.urlsplit(self.address).scheme not in ("http", "https"):
            return "only http and https addresses can be opened"
        try:
            answer = self.opener.open(self.address, body, timeout=20)
        except urllib.error.HTTPError as error:
            answer = error  # type: ignore[assignment]
        except (OSError, ValueError) as error:
            return f"the page cannot be opened: {error}"
        self.address = answer.geturl()
        self.page = Page(answer.read(MOST).decode("utf-8", "replace"))
        return self.read()

    def read(self) -> str:
        lines = [" ".join(line.split()) for line in self.page.text.splitlines()]
        return "{}\n{}".format(self.address, "\n".join(line for line in lines if line))

    def click(self, what: str) -> str:
        """Follow a link, by number or label, or press a button, by label."""
        for number, (label, address) in enumerate(self.page.links, 1):
            if what.strip() in (str(number), label):
                return self.open(address)
        for form in self.page.forms:
            for label, name, value in form["buttons"]:
                if what.strip() == label:
                    return self._send(form, {name: value} if name else {})
        return f"there is no link and no button {what!r}"

    def fill(self, field: str, value: str) -> str:
        for form in self.page.forms:
            if field in form["fields"]:
                form["fields"][field] = value
                return f"{field} = {value!r}"
        known = ", ".join(name for form in self.page.forms for name in form["fields"])
        return "there is no field {!r}; there are: {}".format(field, known or "none")

    def _send(self, form: Any, more: Any) -> str:
        data = urllib.parse.urlencode(dict(form["fields"], **more))
        if form["method"] == "post":
            return self.open(form["action"] or self.address, data.encode())
        return self.open("{}?{}".format((form["action"] or self.address).split("?")[0], data))
