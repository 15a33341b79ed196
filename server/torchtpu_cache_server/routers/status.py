"""Probes, metrics, and two small pages for a person with a browser."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response

from torchtpu_cache_server.edge import Edge
from torchtpu_cache_server.metrics import CONTENT_TYPE
from torchtpu_cache_server.problems import ProblemKind, Refusal

# No page of ours loads or runs anything, from here or elsewhere.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:3rem auto;padding:0 1rem}"
    "td,th{padding:.2rem 1.2rem .2rem 0;text-align:left;vertical-align:top}code{font-size:.95em}"
)


def create_status_router(edge: Edge, openapi: Callable[[], dict[str, Any]]) -> APIRouter:
    """Routes at the root. They raise Refusal, which the app turns into a problem.

    Args:
        openapi: gives the document that `/docs` lists.
    """
    router = APIRouter(tags=["status"])

    @router.get("/healthz", summary="The process is alive")
    async def live() -> dict[str, str]:
        return {"status": "alive"}

    @router.get("/readyz", summary="The service can read and write; 503 where not")
    async def ready() -> dict[str, str]:
        reason = await edge.blocking(edge.health.reason)
        if reason is not None:
            raise Refusal(503, ProblemKind.INTERNAL, f"not ready: {reason}", retry_after_seconds=5)
        return {"status": "ready"}

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        service = edge.service
        text = edge.metrics.render(service.stats(), index_complete=service.index.complete)
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/", include_in_schema=False)
    async def home() -> Response:
        stats = edge.service.stats()
        rows = {
            "Entries": f"{stats.entries:,}",
            "Size": f"{stats.size_bytes:,} bytes of {stats.limit_bytes or 0:,}",
            "Index": "complete" if edge.service.index.complete else "being rebuilt; everything is served meanwhile",
        }
        table = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
        links = " · ".join(f'<a href="{path}">{path}</a>' for path in ("/docs", "/metrics", "/readyz"))
        return _page("torchtpu-cache", f"<table>{table}</table><p>{links}</p>")

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        rows = []
        for path, methods in openapi()["paths"].items():
            for method, operation in methods.items():
                call = html.escape(f"{method.upper()} {path}")
                rows.append(f"<tr><td><code>{call}</code></td><td>{html.escape(operation['summary'])}</td></tr>")
        link = '<p>The whole document: <a href="/openapi.json">/openapi.json</a></p>'
        return _page("torchtpu-cache: HTTP API", f"<table>{''.join(rows)}</table>{link}")

    return router


def _page(title: str, body: str) -> Response:
    content = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{body}</html>"
    )
    return Response(content, media_type="text/html", headers=_PAGE_HEADERS)
