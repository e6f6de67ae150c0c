"""The admin routes: what the service does now, and everything that operators change while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field

from vera.errors import ConfigError, ParamsError, UnknownVersion
from vera.rollout import Limits, Override, Plan, Rollouts
from vera.server.errors import ApiError, bad_request
from vera.server.protocol import error_responses
from vera.server.service import Service

T = TypeVar("T")

_OBJECT: dict[str, Any] = {"content": {"application/json": {"schema": {"type": "object"}}}}
_LOOKING = (401, 409, 500, 503)
_CHANGING = (400, 401, 404, 408, 409, 413, 500, 503)
_MOST_EVENTS = 1000

_Text = Annotated[str, Field(min_length=1, max_length=2000)]
_Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Signed(BaseModel):
    """Who changes something, and why: both are kept for ever."""

    model_config = ConfigDict(extra="forbid", strict=True)

    author: _Name
    reason: _Text


class Activation(_Signed):
    version: _Name
    """PROFILE@NUMBER."""


class RolloutStart(_Signed):
    candidate: _Name
    """PROFILE@NUMBER."""
    plan: Annotated[str, Field(max_length=2000)] | None = None
    """Steps as WEIGHT[:PAUSE[:SAMPLES]],... in percent, seconds, requests. null: 5, 25, 50, 100%, each 60 s, 50 requests."""
    patience_seconds: float | None = Field(default=None, gt=0, le=604800)
    """How long a step may wait for samples beyond its pause."""
    limits: dict[str, float | int | None] | None = Field(default=None, max_length=32)
    """What the candidate may be, by name; null as a limit: not compared. What is not named has its default."""
    native: bool = False
    """The stable arm is a native cache, although a version is active."""


class RolloutChange(_Signed):
    full: bool | None = None
    """With promote alone. true, null: the candidate becomes active now. false: the next step begins."""


class Degrade(_Signed):
    override: Literal["degraded", "adaptive", "auto"]
    """`degraded`: native until further notice. `adaptive`: whatever the signals say. `auto`: the breaker decides."""


_OVERRIDES = {"degraded": Override.OPEN, "adaptive": Override.CLOSED, "auto": Override.NONE}


def add_admin(app: FastAPI, service: Service) -> None:
    looking = {200: _OBJECT, **error_responses(*_LOOKING)}
    changing = {200: _OBJECT, **error_responses(*_CHANGING)}

    @app.get("/admin/stats", response_model=None, responses={200: _OBJECT, **error_responses(401, 500)})
    async def stats() -> dict[str, Any]:
        """What engine, cache, requests in flight and a rollout are doing, recent percentiles, and the effective settings."""
        return await _stats(service)

    @app.get(
        "/admin/requests/{request_id}/pages", response_model=None, responses={200: _OBJECT, **error_responses(401, 404, 500, 503)}
    )
    async def pages(request_id: str) -> dict[str, Any]:
        """Where the pages of a running answer are, and how hot: by layer and block."""
        return await service.page_map(request_id)

    @app.get("/admin/params", response_model=None, responses=looking)
    async def versions() -> dict[str, Any]:
        """The versions of the profile that is served."""
        operations = service.operations
        return await _changed(operations.on_store(operations.versions))

    @app.get("/admin/params/history", response_model=None, responses={200: _OBJECT, **error_responses(400, *_LOOKING)})
    async def history(limit: Annotated[int, Query(ge=1, le=_MOST_EVENTS)] = 50) -> dict[str, Any]:
        """The latest entries of the audit trail, the newest first."""
        operations = service.operations
        return {"events": await _changed(operations.on_store(lambda: operations.history(limit)))}

    @app.post("/admin/params/activate", response_model=None, responses=changing)
    async def activate(body: Activation) -> dict[str, Any]:
        """Serves new requests with another version; those that run keep theirs."""
        before, after = await _changed(service.operations.activate(body.version, author=body.author, reason=body.reason))
        return {"before": before, "active": after}

    @app.post("/admin/params/rollback", response_model=None, responses=changing)
    async def roll_back(body: _Signed) -> dict[str, Any]:
        """Goes back to the version before the active one."""
        before, after = await _changed(service.operations.roll_back(author=body.author, reason=body.reason))
        return {"before": before, "active": after}

    @app.get("/admin/rollout", response_model=None, responses=looking)
    async def rollout() -> dict[str, Any]:
        """The latest rollout, what its arms have shown in this step, and what the guard says."""
        return await _told(lambda: _rollouts(service).status())

    @app.post("/admin/rollout/start", response_model=None, responses=changing)
    async def start(body: RolloutStart) -> dict[str, Any]:
        """Begins to serve a share of the requests with a candidate, by steps."""
        operations = service.operations
        started = operations.start_rollout(
            body.candidate,
            author=body.author,
            reason=body.reason,
            plan=_plan(body),
            limits=None if body.limits is None else _checked("limits", lambda: Limits.from_dict(body.limits or {})),
            native=body.native,
        )
        await _changed(started)
        return await _told(lambda: _rollouts(service).status())

    @app.post("/admin/rollout/{action}", response_model=None, responses=changing)
    async def change(action: Literal["promote", "abort", "hold", "resume"], body: RolloutChange) -> dict[str, Any]:
        """Ends a rollout either way, or keeps its weight as it is for a while."""
        operations = service.operations
        if body.full is not None and action != "promote":
            raise bad_request(f"full is taken with promote alone, and not with {action}; leave it out", "full")
        changed = operations.change_rollout(action, author=body.author, reason=body.reason, full=body.full is not False)
        await _changed(changed)
        return await _told(lambda: _rollouts(service).status())

    @app.get("/admin/degrade", response_model=None, responses=looking)
    async def switch() -> dict[str, Any]:
        """The degrade switch."""
        return service.operations.switch.status()

    @app.post("/admin/degrade", response_model=None, responses=changing)
    async def degrade(body: Degrade) -> dict[str, Any]:
        """Serves natively at once, running requests too, which lose no token; or goes back to adaptive serving."""
        operations = service.operations
        moved = await _changed(operations.degrade(_OVERRIDES[body.override], author=body.author, reason=body.reason))
        return operations.switch.status() | {"moved": moved}


async def _stats(service: Service) -> dict[str, Any]:
    taken = await service.snapshot()
    operations = service.operations_or_none
    return {
        "state": service.state.value,
        **service.about(),
        "engine": {
            "running": taken.num_running,
            "waiting": taken.num_waiting,
            **await asyncio.to_thread(taken.stats.snapshot),
            **service.end_to_end_percentiles(),
        }
        if taken
        else None,
        "cache": taken.cache() if taken else None,
        "requests": service.jobs(),
        "errors": operations.errors() if operations else None,
        "operations": await asyncio.to_thread(operations.status) if operations else None,
    }


def _rollouts(service: Service) -> Rollouts:
    return service.operations.require_rollouts()


def _plan(body: RolloutStart) -> Plan | None:
    if body.plan is None and body.patience_seconds is None:
        return None
    default = Plan()
    patience = default.patience_seconds if body.patience_seconds is None else body.patience_seconds
    if (steps := body.plan) is None:
        return replace(default, patience_seconds=patience)
    return _checked("plan", lambda: Plan.parse(steps, patience_seconds=patience))


def _checked(name: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except (ConfigError, TypeError, OverflowError) as error:
        raise bad_request(f"{name}: {error}", name) from None


async def _told(read: Callable[[], T]) -> T:
    """On a thread; the store's refusals as a client is told them."""
    return await _changed(asyncio.to_thread(read))


async def _changed(change: Awaitable[T]) -> T:
    try:
        return await change
    except UnknownVersion as error:
        raise ApiError(404, str(error), code="unknown_version") from None
    except ParamsError as error:
        raise ApiError(409, str(error), code="conflict") from None
    except ConfigError as error:
        raise bad_request(str(error), None) from None
