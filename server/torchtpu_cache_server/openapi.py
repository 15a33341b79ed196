"""The OpenAPI document: FastAPI's, with the blob path, which FastAPI does not see, and problems as the errors."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from torchtpu_cache_core.names import Digest, Key, KeyPrefix, Namespace
from torchtpu_cache_core.wire import (
    CONTENT_DIGEST_HEADER,
    ENTRY_CONTENT_TYPE,
    MANIFEST_HEADER,
    MAX_LOOKUP_KEYS,
    PROBLEM_CONTENT_TYPE,
)

_PATH: Final = "/v1/{namespace}/entries/{key}"
_LOOKUP: Final = "/v1/{namespace}/lookup"


def _header(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}


def _problem(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": description, "content": {PROBLEM_CONTENT_TYPE: {"schema": schema}}}


_ENTRY_HEADERS: Final = {
    "ETag": _header("the entry's digest in quotes"),
    CONTENT_DIGEST_HEADER: _header("the entry's SHA-256 (RFC 9530)"),
    MANIFEST_HEADER: _header("base64 of the manifest's JSON"),
}
_BINARY: Final = {ENTRY_CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_NAME_SCHEMAS: Final = {
    "namespace": {"type": "string", "pattern": Namespace.pattern()},
    "key": {"type": "string", "pattern": Key.pattern()},
    "cursor": {"type": "string", "pattern": f"{Key.pattern()}|^$", "default": ""},
    "prefix": {"type": "string", "pattern": f"{KeyPrefix.pattern()}|^$"},
}
"""Of parameters, by their names. FastAPI knows them as plain strings, since names are checked where they are built."""

_PARAMETERS: Final = [
    {"name": name, "in": "path", "required": True, "schema": _NAME_SCHEMAS[name]} for name in ("namespace", "key")
]
_CONTENT_DIGEST: Final = {"type": "string", "pattern": "^sha-256=:[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=:$"}
_IF_NONE_MATCH: Final = {"name": "If-None-Match", "in": "header", "required": False, "schema": {"type": "string"}}
_READ_ERRORS: Final = {
    "304": {"description": "`If-None-Match` names the entry's digest"},
    "400": _problem("not a namespace or key"),
    "404": _problem("the key has no entry: a miss (kind `not_found`)"),
    "500": _problem("the entry was damaged and is set aside"),
    "503": _problem("the storage did not answer"),
}
_BLOB_PATH: Final[dict[str, Any]] = {
    "get": {
        "tags": ["entries"],
        "summary": "Read an entry",
        "operationId": "read_entry",
        "parameters": [*_PARAMETERS, _IF_NONE_MATCH],
        "responses": {"200": {"description": "the entry", "headers": _ENTRY_HEADERS, "content": _BINARY}}
        | _READ_ERRORS,
    },
    "head": {
        "tags": ["entries"],
        "summary": "Ask for an entry without its bytes",
        "operationId": "head_entry",
        "parameters": [*_PARAMETERS, _IF_NONE_MATCH],
        "responses": {"200": {"description": "there is one", "headers": _ENTRY_HEADERS}} | _READ_ERRORS,
    },
    "put": {
        "tags": ["entries"],
        "summary": "Publish an entry, unless the key has one",
        "operationId": "put_entry",
        "parameters": [
            *_PARAMETERS,
            {"name": CONTENT_DIGEST_HEADER, "in": "header", "required": True, "schema": _CONTENT_DIGEST},
        ],
        "requestBody": {"required": True, "content": _BINARY},
        "responses": {
            "200": {"description": "the very same entry was there", "headers": _ENTRY_HEADERS},
            "201": {"description": "published", "headers": _ENTRY_HEADERS},
            "400": _problem("not a namespace or key, or no usable Content-Digest"),
            "403": _problem("not a process of the service's own user"),
            "408": _problem("no byte came for too long"),
            "409": _problem("another entry stands under the key; the answer names its digest"),
            "411": _problem("no Content-Length"),
            "413": _problem("over the limit that the answer names"),
            "415": _problem("a Content-Encoding"),
            "422": _problem("not an entry of this key; the kind says what is wrong"),
            "503": _problem("the storage did not answer"),
            "507": _problem("no room"),
        },
    },
}
_DELETE_ERRORS: Final = {
    "400": _problem("not a namespace or key"),
    "403": _problem("not a process of the service's own user"),
    "404": _problem("the key has no entry (kind `not_found`)"),
    "503": _problem("the storage did not answer"),
}
_PROBLEM_SCHEMA: Final = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "kind"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "kind": {"type": "string"},
        "limit_bytes": {"type": "integer"},
        "digest": {"type": "string"},
    },
}
_LOOKUP_BODY: Final = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["keys"],
                "additionalProperties": False,
                "properties": {"keys": {"type": "array", "maxItems": MAX_LOOKUP_KEYS, "items": _NAME_SCHEMAS["key"]}},
            }
        }
    },
}


def _object(**fields: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these fields."""
    return {"type": "object", "required": list(fields), "additionalProperties": False, "properties": fields}


_COUNT: Final = {"type": "integer", "minimum": 0}
_NUMBER: Final = {"type": "number"}
_ANSWERS: Final = {
    "/v1/{namespace}/entries": _object(
        entries={
            "type": "array",
            "items": _object(
                key=_NAME_SCHEMAS["key"],
                size_bytes=_COUNT,
                executable_bytes=_COUNT,
                compile_seconds=_NUMBER,
                created_seconds=_NUMBER,
                accessed_seconds=_NUMBER,
                target_name={"type": "string"},
                pinned={"type": "boolean"},
            ),
        },
        cursor={"type": ["string", "null"]},
    ),
    _LOOKUP: _object(
        found={
            "type": "object",
            "propertyNames": {"pattern": Key.pattern()},
            "additionalProperties": _object(
                digest={"type": "string", "pattern": Digest.pattern()}, size_bytes=_COUNT, compile_seconds=_NUMBER
            ),
        }
    ),
    "/v1/{namespace}/stats": _object(entries=_COUNT, size_bytes=_COUNT, limit_bytes=_COUNT, limit_entries=_COUNT),
}
"""What a 200 of these paths holds."""


def distribution_version() -> str:
    """Of torchtpu-cache as installed; `0` where it runs from a bare tree."""
    try:
        return version("torchtpu-cache")
    except PackageNotFoundError:
        return "0"


def openapi_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """A function that gives the document, made at the first call."""
    made: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        if not made:
            made.append(_document(app))
        return made[0]

    return document


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    paths = document["paths"]
    paths[_PATH] = _BLOB_PATH | paths.get(_PATH, {})
    paths[_LOOKUP]["post"]["requestBody"] = _LOOKUP_BODY
    paths[_PATH]["delete"]["responses"] |= _DELETE_ERRORS
    paths["/readyz"]["get"]["responses"]["503"] = _problem("it cannot; the answer says why")
    paths["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    for path, schema in _ANSWERS.items():
        for operation in paths[path].values():
            operation["responses"]["200"]["content"] = {"application/json": {"schema": schema}}
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = _PROBLEM_SCHEMA
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for operations in paths.values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _NAME_SCHEMAS.get(parameter["name"], parameter["schema"])
            # FastAPI's own form of this error is never sent.
            if "HTTPValidationError" in str(operation["responses"].get("422", "")):
                operation["responses"]["422"] = _problem("a parameter makes no sense")
            operation["responses"].setdefault("default", _problem("any other error"))
    return document
