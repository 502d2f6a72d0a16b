"""Routes that declare who can use them and how their errors look. `Application` checks the access, and serves only such routes.

Each route declares its access, because a separate list of protected paths could disagree with the routes.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from bertserve.service.api.call import Call
from bertserve.service.api.error_responses import ErrorFormat, error_text
from bertserve.service.api.request import RequestContext
from bertserve.service.auth import Access
from bertserve.service.errors import CallerValue, HttpError, MalformedRequestError
from bertserve.service.tasks.catalog import TASKS

# control characters, invalid UTF-8, and the segments `.` and `..`: a proxy can interpret such a path in another way
_AMBIGUOUS = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]|/\.\.?(?:/|\Z)")
_ENCODED_SLASH = re.compile(rb"%(?:2f|5c)", re.IGNORECASE)


class GuardedRoute(APIRoute):
    """A route that declares its access and the format of its errors."""

    methods: set[str]  # FastAPI gives every route methods

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        access: Access = Access.ADMIN,
        error_format: ErrorFormat = error_text,
        **options: Any,
    ) -> None:
        """Creates the route; only admins can use a route without a declaration. FastAPI's class gets the options."""
        self.access = access
        self.error_format = error_format
        # without this response, FastAPI would describe its own errors
        options = {"responses": {"default": {"description": "An error."}}, "response_model": None} | options
        super().__init__(path, endpoint, **options)


class InferenceRoute(GuardedRoute):
    """A path that runs models, for POST; `{name}` in it is a model's name. `Application` serves its requests.

    Attributes:
        read_call: Returns the call of a body and its request; raises a CallerError if the body is wrong.
        bodies: Types of the body, for OpenAPI; each body is of one of them.
        response_type: Type of the response's body, for OpenAPI.
        task: The task of the path; None if it depends on the model or the body.
        streams: Whether a body can be JSON Lines.
        other_content: Other content types of the body and the response, with their descriptions for OpenAPI.
    """

    def __init__(
        self,
        path: str,
        read_call: Callable[[bytes, RequestContext], Call],
        summary: str,
        bodies: tuple[type[BaseModel], ...],
        response_type: Any,
        *,
        task: str | None = None,
        streams: bool = False,
        other_content: Mapping[str, Any] = {},
        **options: Any,
    ) -> None:
        """Creates the route; the attributes describe the arguments; `GuardedRoute` gets the options."""
        self.read_call = read_call
        self.bodies = bodies
        self.response_type = response_type
        self.task = task
        self.streams = streams
        self.other_content = other_content
        options = {"tags": ["other clients"]} | options
        # FastAPI never calls the function
        super().__init__(path, lambda: None, access=Access.KEY, methods=["POST"], summary=summary, **options)


class RouteTable:
    """Finds the route of a request, as FastAPI's router does."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        """Creates the table of the routes that declare their access; other routes are never found."""
        guarded = [route for route in routes if isinstance(route, GuardedRoute)]
        self._probes = [route for route in guarded if route.access in (Access.PROBE, Access.METRICS)]
        self._fixed = {(method, route.path): route for route in guarded if "{" not in route.path for method in route.methods}
        # fixed paths come last: `_fixed` finds them, unless the method is wrong
        self._routes = sorted(guarded, key=lambda route: "{" not in route.path)

    def match(self, scope: Scope) -> GuardedRoute:
        """Returns the route of a request, and sets `route` and `path_params` in its scope.

        Raises:
            MalformedRequestError: A proxy can have interpreted the path in another way: it has a control character, an encoded slash or
                backslash, a dot segment, or invalid UTF-8.
            HttpError: There is no such path (404), or it has other methods (405).
        """
        path, raw = scope["path"], scope.get("raw_path") or b""
        if _AMBIGUOUS.search(path) is not None or (b"%" in raw and _ENCODED_SLASH.search(raw) is not None):
            raise MalformedRequestError(
                "the path `{path}` has a control character, an encoded slash, a dot segment or bytes that are not UTF-8; send "
                "the plain path, see /docs.",
                path=CallerValue(path),
            )
        if (fixed := self._fixed.get((scope["method"], path))) is not None:
            scope["route"], scope["path_params"] = fixed, {}
            return fixed
        methods: set[str] = set()
        for route in self._routes:
            match, parameters = route.matches(scope)
            if match is Match.FULL:
                scope.update(parameters)
                return route
            if match is Match.PARTIAL:
                if not methods:
                    scope.update(parameters)  # the log names the path, and its route formats the error
                methods |= route.methods
        if methods:
            allow = ", ".join(sorted(methods))
            raise HttpError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "`{path}` takes only {allow}; see /docs.",
                headers={"Allow": allow},
                path=CallerValue(path),
                allow=allow,
            )
        raise HttpError(
            HTTPStatus.NOT_FOUND,
            "there is no path `{path}`; send a POST to {tasks} or /models/NAME, without a slash at the end; see /docs.",
            path=CallerValue(path),
            tasks=", ".join(f"/{spec.path}" for spec in TASKS.values()),
        )

    def is_probe(self, scope: Scope) -> bool:
        """Returns whether a request is a probe or a scrape of the metrics, which are neither traced nor logged."""
        return scope["method"] == "GET" and any(route.matches(scope)[0] is Match.FULL for route in self._probes)


def file_route(path: str, content: bytes, headers: Mapping[str, str]) -> GuardedRoute:
    """Returns a route that answers with a file from memory: all clients share its bytes, and it needs no descriptor and no thread."""

    async def file() -> Response:
        return Response(content, headers=headers)

    return GuardedRoute(path, file, access=Access.PUBLIC, include_in_schema=False)
