# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: exactly the files of the folder `page`, which talk to this server and to nobody else."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.http.desk import Desk

TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A browser asks each time whether its copy still holds, so that a newer server is never met by an older page.
HEADERS = MappingProxyType(
    {
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
)


@dataclass(frozen=True)
class _File:
    """A file as it is sent."""

    body: bytes
    content_type: str
    tag: str

    async def sent(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.tag}
        if self.tag in _tags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.content_type)


def routes(desk: Desk) -> list[Route]:
    """The page's routes, open to all: it holds nothing of anybody. Its files are read here, once."""
    if not desk.settings.page:
        return []
    made = {name: _File(body, TYPES[name[name.rindex(".") :]], _tag(body)) for name, body in page_files().items()}
    index = made.pop(INDEX)
    return [Route("/", index.sent), *(Route(f"/page/{name}", file.sent) for name, file in made.items())]


def page_files() -> dict[str, bytes]:
    """The files by name."""
    folder = files("serving.http").joinpath("page")
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir(), key=lambda file: file.name)}


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _tags(header: str) -> set[str]:
    # What went through a compressing proxy comes back as a weak tag.
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}
