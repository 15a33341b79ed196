"""Everything about entries but the blob path: list, delete, look up, count."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from torchtpu_cache_core.names import Key, KeyPrefix, Namespace
from torchtpu_cache_core.wire import MAX_PAGE, lookup_response, parse_lookup_request
from torchtpu_cache_server.edge import Edge
from torchtpu_cache_server.problems import ProblemKind, Refusal, no_entry

NamespaceName = Annotated[str, Path(description="`[a-z0-9][a-z0-9-]{0,62}`")]
KeyName = Annotated[str, Path(description="`<scheme>-<64 hex digits>`")]


def create_entries_router(edge: Edge) -> APIRouter:
    """Routes below `/v1/{namespace}`. They raise CacheError and Refusal, which the app turns into problems."""
    router = APIRouter(prefix="/v1/{namespace}", tags=["entries"])
    service = edge.service

    @router.get("/entries", summary="List entries, in the order of their keys")
    async def list_entries(
        namespace: NamespaceName,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        cursor: Annotated[str, Query(max_length=100, description="of the page before")] = "",
        prefix: Annotated[str | None, Query(max_length=100, description="how a key or its digits begin")] = None,
        target: Annotated[str | None, Query(max_length=256, description="the whole name of a target")] = None,
    ) -> dict[str, Any]:
        name = Namespace(namespace)
        after = Key(cursor) if cursor else ""
        wanted = KeyPrefix(prefix) if prefix else None

        def read() -> dict[str, Any]:
            return service.page(name, after=after, limit=limit, prefix=wanted, target=target).to_json()

        return await edge.blocking(read)

    @router.delete("/entries/{key}", status_code=204, summary="Delete an entry")
    async def delete_entry(namespace: NamespaceName, key: KeyName) -> Response:
        if not await edge.blocking(service.delete, Namespace(namespace), Key(key)):
            raise no_entry()
        return Response(status_code=204)

    @router.post("/lookup", summary="Ask for up to 1,000 keys at once")
    async def lookup(namespace: NamespaceName, request: Request) -> dict[str, Any]:
        name = Namespace(namespace)
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            raise Refusal(400, ProblemKind.INVALID, "the body is no JSON") from None
        keys = parse_lookup_request(body)
        return lookup_response(await edge.blocking(service.lookup, name, keys))

    @router.get("/stats", summary="How full the namespace is; the limits are of the whole service")
    async def stats(namespace: NamespaceName) -> dict[str, Any]:
        found = await edge.blocking(service.stats, Namespace(namespace))
        return {
            "entries": found.entries,
            "size_bytes": found.size_bytes,
            "limit_bytes": found.limit_bytes,
            "limit_entries": found.limit_entries,
        }

    return router
