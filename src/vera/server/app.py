"""The HTTP application: routes, middleware, errors, and an OpenAPI document that says what is true."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import vera
from vera.errors import VeraError
from vera.server import protocol
from vera.server.admin import add_admin
from vera.server.chat import ChatGenerator
from vera.server.completions import CompletionGenerator
from vera.server.errors import ApiError, as_api_error, from_validation
from vera.server.limits import BodyLimit, ClientGone
from vera.server.logs import CLIENT_GONE, AccessLog, record_of
from vera.server.page import add_page
from vera.server.protocol import error_responses
from vera.server.security import PUBLIC, Gate
from vera.server.service import Service
from vera.server.settings import ServerSettings

_JSON = "application/json"
_BODY = (400, 401, 408, 413, 500)
"""Statuses of every route that takes a body."""
_CHUNKS = (protocol.ChatCompletionChunk, protocol.CompletionChunk)
_SCHEMAS = "#/components/schemas/"


def build_app(service: Service, settings: ServerSettings) -> FastAPI:
    """The application; its lifespan starts and closes the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = FastAPI(
        title="StarBridge",
        description="Vera's HTTP API: OpenAI's, with an adaptive KV cache that each request can see and steer.",
        version=vera.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokens(app, service)
    _add_operations(app, service)
    add_admin(app, service)
    add_page(app)
    _add_errors(app)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, max_depth=settings.max_json_depth)
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(Failures)
    app.add_middleware(AccessLog, metrics=service.metrics)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


class Failures:
    """ASGI middleware: what nobody foresaw is an OpenAI-shaped 500, and told in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            told = as_api_error(error)
            if scope["type"] != "http" or started:
                raise
            await told.response()(scope, receive, send)


# -- routes ------------------------------------------------------------------------------------------------------------


def _add_generation(app: FastAPI, service: Service) -> None:
    statuses = (*_BODY, 404, 429, 503, 504)

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=_answers(protocol.ChatCompletion, protocol.ChatCompletionChunk, statuses),
    )
    async def create_chat_completion(request: Request, body: protocol.ChatRequest) -> Response:
        """Answers a conversation."""
        return await ChatGenerator(request, body, service).respond()

    @app.post("/v1/completions", response_model=None, responses=_answers(protocol.Completion, protocol.CompletionChunk, statuses))
    async def create_completion(request: Request, body: protocol.CompletionRequest) -> Response:
        """Continues texts, or lists of token ids."""
        return await CompletionGenerator(request, body, service).respond()


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> protocol.ModelCard:
        served = service.served
        return protocol.ModelCard(
            id=served.name, object="model", created=int(service.started), owned_by="vera", max_model_len=served.max_model_len
        )

    @app.get("/v1/models", responses=error_responses(401, 500, 503))
    async def list_models() -> protocol.ModelList:
        """The model that is served."""
        return protocol.ModelList(object="list", data=[card()])

    @app.get("/v1/models/{model:path}", responses=error_responses(401, 404, 500, 503))
    async def retrieve_model(model: str) -> protocol.ModelCard:
        """The same by its name."""
        service.check_model(model)
        return card()


def _add_tokens(app: FastAPI, service: Service) -> None:
    statuses = error_responses(*_BODY, 404, 429, 503)

    @app.post("/tokenize", responses=statuses)
    async def tokenize(body: protocol.TokenizeRequest) -> protocol.Tokens:
        """The token ids of a prompt, or of messages, as a request with them would have."""
        service.check_model(body.model)
        body.check()
        encoder = service.encoder
        if body.prompt is not None:
            tokens = await encoder.prompt(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            tokens = await encoder.chat(body.conversation(), body.template_arguments())
        return protocol.Tokens(count=len(tokens), max_model_len=service.served.max_model_len, tokens=tokens)

    @app.post("/detokenize", responses=statuses)
    async def detokenize(body: protocol.DetokenizeRequest) -> protocol.Text:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        encoder = service.encoder
        return protocol.Text(prompt=await encoder.text(body.tokens, skip_special_tokens=False) if body.tokens else "")


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=error_responses(500, 503))
    async def health() -> protocol.Health:
        """The engine lives: its loop came by within the longest legal step. Needs no key."""
        service.check_health()
        return protocol.Health(status="ok")

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=error_responses(500, 503))
    async def ready() -> protocol.Health:
        """Requests are taken: the model is loaded, and the server is not ending. Needs no key."""
        service.check_ready()
        return protocol.Health(status="ok")

    @app.get("/version", responses=error_responses(401, 500))
    async def version() -> protocol.Version:
        return protocol.Version(version=vera.__version__)

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus's text format."}

    @app.get("/metrics", response_model=None, responses={200: text, **error_responses(401, 500)})
    async def metrics() -> Response:
        """Counters and latencies for Prometheus."""
        operations = service.operations_or_none
        text = service.metrics.render(await service.snapshot(), operations.overview() if operations else None)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


# -- errors and the OpenAPI document -----------------------------------------------------------------------------------


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(VeraError)
    async def tell(request: Request, error: VeraError) -> Response:
        return _told(request, as_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def tell_invalid(request: Request, error: RequestValidationError) -> Response:
        return _told(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def tell_http(request: Request, error: HTTPException) -> Response:
        """Unknown paths, methods that a path does not have, bodies that cannot be read."""
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods(app, request.scope))
        return _told(request, ApiError(error.status_code, message, headers=headers))

    @app.exception_handler(ClientGone)
    async def tell_nobody(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """Those of a path; Starlette names those of its first route alone."""
    matching = [route for route in app.routes if route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def _told(request: Request, error: ApiError) -> Response:
    record_of(request.scope).details |= {"error": error.code, "param": error.param}
    return error.response()


def _answers(model: type, chunk: type, statuses: tuple[int, ...]) -> dict[int | str, dict[str, Any]]:
    """Whole, or with `stream` as events: chunks, perhaps an error, and an end marker."""
    told = {"anyOf": [{"$ref": f"{_SCHEMAS}{kind.__name__}"} for kind in (chunk, protocol.ErrorBody)]}
    data = {"type": "string", "anyOf": [{"contentMediaType": _JSON, "contentSchema": told}, {"const": "[DONE]"}]}
    # As OpenAPI 3.2 describes each event of a stream, and FastAPI in its own documents.
    events = {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
    content = {"text/event-stream": events}
    return {200: {"model": model, "description": "The answers.", "content": content}, **error_responses(*statuses)}


def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document without the 422 that is never sent, and with the keys that routes need and the chunks of streams."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["security"] = [] if path in PUBLIC else [{"key": []}]
        components = document["components"]
        for unused in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(unused, None)
        _, chunks = models_json_schema([(chunk, "validation") for chunk in _CHUNKS], ref_template=f"{_SCHEMAS}{{model}}")
        components["schemas"] = chunks["$defs"] | components["schemas"]
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = document
    return app.openapi_schema
