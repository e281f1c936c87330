# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from serving.core.lifecycle import Lifecycle
from serving.http.app import make_app
from serving.http.desk import Desk
from serving.http.page import POLICY, page_files
from serving.http.settings import HttpSettings
from tests.serving.scripted import ScriptedService

FOLDER = Path(__file__).parents[3] / "serving/http/page"


def client(**settings) -> TestClient:
    """A client of a server that loads yet: the page is there from the first moment."""
    return TestClient(make_app(Desk(ScriptedService(keys={}), Lifecycle(), HttpSettings(**settings))))


def test_the_files_of_the_folder_are_served_and_no_others():
    served = client()
    for path in FOLDER.iterdir():
        answer = served.get("/" if path.name == "index.html" else f"/page/{path.name}")
        assert answer.content == path.read_bytes(), path.name
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    for name in ("index.html", "", "../page.py", "%2e%2e/page.py", "nothing.js"):
        assert served.get(f"/page/{name}").status_code == 404


@pytest.mark.parametrize(
    "name, content_type",
    [
        ("", "text/html; charset=utf-8"),
        ("page/main.js", "text/javascript; charset=utf-8"),
        ("page/style.css", "text/css; charset=utf-8"),
        ("page/icon.svg", "image/svg+xml"),
    ],
    ids=["html", "js", "css", "svg"],
)
def test_a_copy_that_still_holds_is_not_sent_again(name, content_type):
    served = client()
    first = served.get(f"/{name}")
    assert (first.headers["content-type"], first.headers["cache-control"]) == (content_type, "no-cache")
    for tag in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = served.get(f"/{name}", headers={"if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert (again.headers["etag"], again.headers["content-security-policy"]) == (first.headers["etag"], POLICY)
    assert served.get(f"/{name}", headers={"if-none-match": '"other"'}).status_code == 200
    assert served.head(f"/{name}").headers["content-length"] == first.headers["content-length"]


def test_a_server_can_be_without_the_page():
    served = client(page=False)
    assert served.get("/").status_code == served.get("/page/main.js").status_code == 404


def test_the_page_names_only_files_that_there_are():
    names = set(page_files())
    html = (FOLDER / "index.html").read_text()
    wanted = {part.split('"')[0] for part in html.split('"page/')[1:]}
    scripts = [name for name in names if name.endswith(".js")]
    for name in scripts:
        for line in (FOLDER / name).read_text().splitlines():
            if line.startswith(("import ", "} from ")):
                wanted.add(line.split('"./')[1].split('"')[0])
    assert wanted | {"index.html"} == names


def test_scripts_are_small_enough_to_be_read_and_say_what_they_are_for():
    for name, body in page_files().items():
        text = body.decode()
        assert "SPDX-License-Identifier: Apache-2.0" in text, name
        if name.endswith(".js"):
            assert text.startswith("// SPDX-License-Identifier: Apache-2.0\n// "), name
            assert len(text.splitlines()) <= 300, name


@pytest.mark.slow
def test_a_wheel_holds_the_page(tmp_path):
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(root)]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name.removeprefix("serving/http/page/") for name in archive.namelist() if "serving/http/page/" in name}
    assert held == {path.name for path in FOLDER.iterdir()}
