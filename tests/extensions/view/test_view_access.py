"""Who may look at runs: the token, the address, other sites, paths, and what a model wrote."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from httpx import Client

from strop.cli import main
from strop.extensions.view.access_guard import AccessGuard
from strop.extensions.view.view_routes import ViewOptions, ViewServer, read_page_file
from support.each import each
from support.stored_steps import HTML, write_stored_run
from support.view_client import asking

TOKEN = "a-token-for-tests"


def parse_nothing(text: str) -> object:
    return {}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ViewServer]:
    write_stored_run(tmp_path / "logs" / "a", 1, text=HTML)
    (tmp_path / "secret.js").write_text("what lies outside")
    found = ViewServer([tmp_path / "logs"], ViewOptions(token=TOKEN), parse_nothing)
    yield found
    found.close()


@pytest.fixture
def stranger(server: ViewServer) -> Iterator[Client]:
    with asking(server) as client:
        yield client


@pytest.fixture
def reader(stranger: Client) -> Client:
    stranger.get(f"/?token={TOKEN}")
    return stranger


STAR = {"step": 1, "group": 0, "sample": 1, "starred": True, "note": "good"}


def origin(client: Client) -> dict[str, str]:
    return {"Origin": str(client.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}


@each("path", ["/", "/main.js", "/api/runs", "/api/runs/a/rollouts", "/api/stars/export", "/nothing", "/api/runs?token=" + TOKEN])
def test_nothing_is_shown_without_the_token(stranger: Client, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 401 and "token" in answer.text and "arithmetic" not in answer.text


@each("given", ["", "wrong", TOKEN[:-1], TOKEN + "x", "\u00e9"])
def test_a_wrong_token_is_refused_wherever_it_is_given(stranger: Client, given: str) -> None:
    assert stranger.get("/", params={"token": given}).status_code == 401
    assert stranger.get("/api/runs", headers={"Authorization": f"Bearer {given}".strip().encode()}).status_code == 401
    cookie = f"strop_view_{stranger.base_url.port}={given}".encode()
    assert stranger.get("/api/runs", headers={"Cookie": cookie}).status_code == 401


def test_the_printed_address_sets_a_strict_cookie_and_leads_to_the_page_without_the_token(
    server: ViewServer, stranger: Client
) -> None:
    assert server.address == f"http://127.0.0.1:{server.guard.port}/?token={TOKEN}"
    answer = stranger.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert answer.headers["set-cookie"].endswith("; Path=/; HttpOnly; SameSite=Strict")
    assert stranger.get("/").status_code == 200
    assert stranger.get("/api/runs").json()[0]["id"] == "a"


def test_a_link_of_another_site_to_the_printed_address_goes_on_from_a_page_of_this_one(stranger: Client) -> None:
    answer = stranger.get(f"/?token={TOKEN}", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
    assert answer.status_code == 200 and 'content="0;url=/"' in answer.text and TOKEN not in answer.text


def test_a_program_sends_the_token_in_a_header(stranger: Client) -> None:
    assert stranger.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


@each(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1.evil.example:{port}",
        "",
        "10.0.0.1:{port}",
        "[::2]:{port}",
    ],
)
def test_a_request_to_another_host_is_refused_even_with_the_token(reader: Client, host: str) -> None:
    answer = reader.get("/api/runs", headers={"Host": host.format(port=reader.base_url.port), "Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 421 and "not served" in answer.json()["error"]


@each("headers", [
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
], ids=lambda headers: "-".join(headers.values()))  # fmt: skip
@each("path", ["/", "/api/runs", "/api/stars/export"])
def test_requests_of_other_sites_are_refused_even_with_the_cookie(reader: Client, headers: dict[str, str], path: str) -> None:
    assert reader.get(path, headers=headers).status_code == 403


def test_a_change_needs_the_pages_own_origin_and_json(reader: Client) -> None:
    path = "/api/runs/a/stars"
    assert reader.put(path, json=STAR).status_code == 403  # a cookie alone says nothing of who sends it
    assert reader.put(path, json=STAR, headers={"Origin": "http://evil.example"}).status_code == 403
    assert reader.put(path, content="{}", headers={**origin(reader), "Content-Type": "text/plain"}).status_code == 403
    assert reader.post(path, json=STAR, headers=origin(reader)).status_code == 405
    assert reader.delete(path, headers=origin(reader)).status_code == 405
    answer = reader.put("/api/runs", json=STAR, headers=origin(reader))
    assert answer.status_code == 405 and "GET" in answer.headers["allow"] and "Not Allowed" in answer.json()["error"]
    assert reader.get(path).json() == []
    assert reader.put(path, json=STAR, headers=origin(reader)).json() == [
        {"step": 1, "group": 0, "sample": 1, "note": "good", "validation": False}
    ]


def test_a_large_body_is_refused(reader: Client) -> None:
    large = {**STAR, "note": "x" * 100_000}
    assert reader.put("/api/runs/a/stars", json=large, headers=origin(reader)).status_code == 413
    parts = (b"x" * 1000 for _ in range(100))  # without a length
    kind = {"Content-Type": "application/json"}
    assert reader.put("/api/runs/a/stars", content=parts, headers={**origin(reader), **kind}).status_code == 413


PATHS_OUT = """
/../secret.js /..%2fsecret.js /%2e%2e/secret.js /..%5csecret.js //etc/passwd /%2fetc%2fpasswd /vendor/../../view_server.py
/api/runs/../../secret.js /api/runs/a/images/..%2f..%2fconfig /api/runs/a/images/%2e%2e%2fconfig.yaml /api/runs/..%2f../rollouts
/api/runs/%2e%2e/config /api/runs/a/images/x%00.png /__init__.py /api/runs/a/replays/..%2fconfig.yaml
"""


@each("path", PATHS_OUT.split())
def test_no_path_leads_out_of_the_folders(reader: Client, path: str) -> None:
    answer = reader.get(path)
    assert answer.status_code in (400, 404) and "what lies outside" not in answer.text and "policy:" not in answer.text


@each("name", ["../access_guard.py", "../../__init__.py", "/etc/passwd", "", ".", "vendor", "vendor/../index.html"])
def test_a_name_that_is_no_file_of_the_page_reaches_none(name: str) -> None:
    assert read_page_file(name) is None
    assert read_page_file("index.html") is not None


def test_what_a_model_wrote_is_json_and_never_a_page(reader: Client) -> None:
    for path in (
        "/api/runs/a/rollouts",
        "/api/runs/a/rollouts/1/0/0",
        "/api/runs/a/groups/1/0",
        "/api/runs/a/rollouts?validation=1",
    ):
        answer = reader.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json", path
        assert (
            "\x1b" not in answer.text and "\\u001b" not in answer.text and "\\u202e" not in answer.text.replace("\\\\u202e", "")
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert (answer.headers["x-frame-options"], answer.headers["referrer-policy"]) == ("DENY", "no-referrer")


def test_a_file_that_is_no_image_is_not_sent_as_one(reader: Client, tmp_path: Path) -> None:
    images = tmp_path / "logs" / "a" / "rollouts" / "images"
    images.mkdir()
    (images / "aaaa.png").write_text(HTML)
    (images / "bbbb.svg").write_text("<svg onload='alert(1)'/>")
    (images / "cccc.html").write_bytes(b"\x89PNG\r\n\x1a\n" + HTML.encode())
    assert reader.get("/api/runs/a/images/aaaa").status_code == 415
    assert reader.get("/api/runs/a/images/bbbb.svg").status_code == 415
    answer = reader.get("/api/runs/a/images/cccc")
    assert (answer.status_code, answer.headers["content-type"], answer.headers["x-content-type-options"]) == (
        200,
        "image/png",
        "nosniff",
    )


def test_an_image_that_links_out_of_the_folder_is_not_sent(reader: Client, tmp_path: Path) -> None:
    images = tmp_path / "logs" / "a" / "rollouts" / "images"
    images.mkdir()
    (tmp_path / "other.png").write_bytes(b"\x89PNG\r\n\x1a\n secret")
    (images / "dddd.png").symlink_to(tmp_path / "other.png")
    assert reader.get("/api/runs/a/images/dddd").status_code == 404


def test_secrets_of_a_configuration_are_hidden(tmp_path: Path) -> None:
    write_stored_run(tmp_path / "a", 1)
    parsed = {"cluster": {"env_vars": {"HF_TOKEN": "hidden", "LEVEL": "info"}}}
    server = ViewServer([tmp_path], ViewOptions(token=None), lambda text: parsed)
    with asking(server) as client:
        answer = client.get("/api/runs/a/config")
    assert "hidden" not in answer.text and answer.json()["values"]["cluster.env_vars.HF_TOKEN"] == "<redacted>"


def test_every_address_in_numbers_is_right_where_all_are_served_and_no_other_name() -> None:
    guard = AccessGuard(token=None, host="0.0.0.0", port=80)
    assert guard.refuse("GET", "/", "", {"host": "10.1.2.3"}) is None
    assert guard.refuse("GET", "/", "", {"host": "[fe80::1]:80"}) is None
    assert guard.refuse("GET", "/", "", {"host": "evil.example"}) is not None


def test_a_path_that_no_client_tidies_leads_nowhere_and_no_answer_names_the_server(server: ViewServer, stranger: Client) -> None:
    statuses = []
    for path, headers in (
        ("/api/runs", {"Authorization": f"Bearer {TOKEN}"}),
        ("/api/runs", {}),
        ("/../../../../etc/passwd", {"Authorization": f"Bearer {TOKEN}"}),
        ("/api/runs", {"Authorization": f"Bearer {TOKEN}", "Host": "evil.example"}),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.guard.port, timeout=10)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        statuses.append(answer.status)
        assert "server" not in {name.lower() for name in answer.headers} and b"root:" not in answer.read()
        connection.close()
    assert statuses == [200, 401, 404, 421]


def test_a_request_may_name_more_metrics_than_fit_a_usual_line(reader: Client) -> None:
    names = ",".join(f"train/metric_{number}" for number in range(2000))
    assert reader.get("/api/runs/a/metrics", params={"names": names}).status_code == 200


def test_the_command_says_what_is_wrong_with_its_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view"]) == 2
    assert "there is no folder logs here" in capsys.readouterr().err
    assert main(["view", "nowhere"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["view", "--port", "70000"])
    assert "is not a port" in capsys.readouterr().err
    taken = ViewServer([tmp_path], ViewOptions(), parse_nothing)
    assert main(["view", str(tmp_path), "--port", str(taken.guard.port)]) == 1
    assert "set another --host or --port" in capsys.readouterr().err
    taken.close()
