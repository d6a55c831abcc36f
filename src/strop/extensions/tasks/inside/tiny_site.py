"""A shop on 127.0.0.1:8000, for tiny tasks: ``python3 tiny_site.py SHOP.json`` serves it until it is killed."""

import hashlib
import html
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

PORT, SHOWN = 8000, 5  # items on a page of the catalogue
with open(sys.argv[1]) as file:
    SHOP = json.load(file)
HOME = (
    '<h1>{}</h1><ul><li><a href="/catalogue">Catalogue</a><li><a href="/search">Search</a><li><a href="/account">Account</a></ul>'
)
SEARCH = '<form action="/search"><input name="words" value="{}"><input type="submit" value="Search"></form>'
LOGIN = '<form method="post" action="/account"><input name="user"><input name="password" type="password"><button>Log in</button></form>'
ORDER = (
    '<form method="post" action="/order"><input type="hidden" name="item" value="{}"><input name="quantity" value="1">'
    "<button>Order</button></form>"
)


def find_code(*parts: object) -> str:
    """A code that only this shop's secret gives."""
    return hashlib.sha256("|".join(map(str, (SHOP["secret"], *parts))).encode()).hexdigest()[:8]


def list_items(items: "list[int]") -> str:
    return "<ul>{}</ul>".format(
        "".join('<li><a href="/item/{}">{}</a>'.format(n, html.escape(SHOP["items"][n]["name"])) for n in items)
    )


def answer(path: str, query: "dict[str, str]", form: "dict[str, str]", cookie: str) -> "tuple[str, str]":
    """Return a page, and a cookie to set."""
    numbers = list(range(len(SHOP["items"])))
    if path == "/catalogue":
        page = int(query.get("page", "1"))
        more = f'<a href="/catalogue?page={page + 1}">Next page</a>' if page * SHOWN < len(numbers) else ""
        return f"<h2>Page {page}</h2>" + list_items(numbers[(page - 1) * SHOWN : page * SHOWN]) + more, ""
    if path == "/search":
        words = query.get("words", "").lower()
        found = [n for n in numbers if words and words in SHOP["items"][n]["name"].lower()]
        return SEARCH.format(html.escape(words, quote=True)) + (list_items(found) if found else "<p>Nothing was found."), ""
    if path.startswith("/item/"):
        item = SHOP["items"][int(path[6:])]
        text = "<h2>{}</h2><p>Price: {} EUR<p>In stock: {}".format(html.escape(item["name"]), item["price"], item["stock"])
        return text + ORDER.format(path[6:]), ""
    if path == "/order":
        number, quantity = int(form["item"]), int(form["quantity"])
        if not 0 < quantity <= SHOP["items"][number]["stock"]:
            return "<p>There are fewer in stock.", ""
        return "<p>Thank you. Your order has the code {}.".format(find_code("order", number, quantity)), ""
    if path == "/account":
        known = cookie == "session=" + find_code("session")
        if (form.get("user") == SHOP["user"] and form.get("password") == SHOP["password"]) or known:
            return "<p>You have one message: your voucher is {}.".format(find_code("voucher")), "session=" + find_code("session")
        return ("<p>Wrong user or password." if form else "") + LOGIN, ""
    return HOME.format(html.escape(SHOP["name"])), ""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        form = dict(parse_qsl(self.rfile.read(length).decode())) if length else {}
        parts = urlsplit(self.path)
        try:
            text, cookie = answer(parts.path, dict(parse_qsl(parts.query)), form, self.headers.get("Cookie", ""))
            status = 200
        except (ValueError, LookupError):
            text, cookie, status = "<p>There is no such page.", "", 404
        self.send_response(status)
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write("<html><title>{}</title><body>{}</body></html>".format(html.escape(SHOP["name"]), text).encode())

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
