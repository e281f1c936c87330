# SPDX-License-Identifier: Apache-2.0
"""/openapi.json: what is served, as OpenAPI 3.1, out of the routes themselves."""

import re
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serving.http.desk import Desk
from serving.http.endpoint import Asked, Endpoint, get, json_answer
from serving.http.operations import Operation, described

PATH = "/openapi.json"
CONVERTOR = re.compile(r"\{(\w+):\w+\}")
ABOUT = Operation("This description.")
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def route_of(desk: Desk, routes: Iterable[BaseRoute]) -> Route:
    """The route that describes the others, and itself."""
    listed = list(routes)

    async def describe(desk: Desk, asked: Asked) -> Response:
        return json_answer(schema_of([*listed, own], desk.version))

    own = get(desk, PATH, describe, is_open=True, about=ABOUT)
    return own


def schema_of(routes: Iterable[BaseRoute], version: str) -> dict[str, Any]:
    """The OpenAPI object of all endpoints among the routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route) and isinstance(route.endpoint, Endpoint):
            one = route.endpoint
            made = described(one.about, route.path, one.form.schema, one.has_body, one.is_open)
            for method in sorted(route.methods - {"HEAD"}):
                paths.setdefault(CONVERTOR.sub(r"{\1}", route.path), {})[method.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {"title": "metrale-jax", "version": version or "0"},
        "paths": paths,
        "components": {"securitySchemes": SCHEMES},
        "security": [{}, *({name: []} for name in SCHEMES)],
    }
