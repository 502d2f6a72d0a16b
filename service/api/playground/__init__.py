"""The playground: a page at `/` that runs every task in a browser. It serves static files; `forms.json` describes the form of each task."""

import html
from pathlib import Path

from bertserve.service.api.routing import GuardedRoute, file_route

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
PAGE = "index.html"
FILES = sorted(path.name for path in _FOLDER.iterdir() if path.suffix in _TYPES and path.name != PAGE)
# The page runs only its own scripts and connects only to this service, so that a text on the page can do nothing.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)


def playground_routes(root_path: str = "") -> list[GuardedRoute]:
    """Returns the routes of the page and its files; the URLs of the page are relative to the proxy's path prefix."""
    page = (_FOLDER / PAGE).read_bytes()
    if root_path:
        # without it, a browser at `/bert` without a final slash would resolve relative URLs against `/`
        page = page.replace(b"<head>", f'<head>\n  <base href="{html.escape(root_path)}/">'.encode(), 1)
    routes = []
    for name, content in [(PAGE, page), *((name, (_FOLDER / name).read_bytes()) for name in FILES)]:
        headers = {
            "content-type": f"{_TYPES[Path(name).suffix]}; charset=utf-8",
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        routes.append(file_route("/" if name == PAGE else f"/playground/{name}", content, headers))
    return routes
