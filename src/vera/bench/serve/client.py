"""One request, timed. Needs aiohttp, which is an extra: a chunk costs it under half of what it costs httpx."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vera.bench.serve.answer import Answer
from vera.bench.serve.settings import Target
from vera.bench.serve.workload import Message, completion_prompt
from vera.errors import VeraError

if TYPE_CHECKING:
    import aiohttp

_CONNECT_SECONDS = 30.0
_ERROR_CHARACTERS = 300
"""Of a server's explanation, so many are shown."""
_CLOSING_SECONDS = 1.0
"""After the last event a stream may take so long to end; then its connection is closed, and not used again."""


class BrokenStream(Exception):
    """What the server sent is not a whole answer; the message says why."""


class ApiClient:
    """Sends requests to one server over connections that it keeps; use it as an async context manager.

    It asks no proxy: what lies between it and the server would be measured too.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._model = target.model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers | dict(self._target.headers),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_seconds, sock_connect=_CONNECT_SECONDS),
            read_bufsize=2**18,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()

    async def find_model(self) -> str:
        """The target's model, or else the first that the server lists; a VeraError where there is none."""
        import aiohttp

        if self._model is None:
            url = self._target.models_url
            try:
                async with self._open.get(url) as response:
                    if response.status != 200:
                        raise VeraError(f"{url} answers {await _refusal(response)}; name a --model")
                    self._model = str((await response.json())["data"][0]["id"])
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise VeraError(f"{url} lists no model ({type(error).__name__}: {error}); name a --model") from None
            except (aiohttp.ClientError, OSError) as error:
                raise VeraError(f"{url} cannot be read: {_reason(error, self._target)}; is the server up?") from None
        return self._model

    async def check_up(self) -> None:
        """Raises VeraError if nobody answers, or a server that says it is not ready. Whether it lists models does not matter."""
        import aiohttp

        url = self._target.models_url
        try:
            async with self._open.get(url) as response:
                if response.status >= 500:
                    raise VeraError(f"{url} answers {await _refusal(response)}")
        except (aiohttp.ClientError, OSError) as error:
            raise VeraError(f"{url} cannot be read: {_reason(error, self._target)}; is the server up?") from None

    async def ask(self, messages: Sequence[Message], output_tokens: int) -> Answer:
        """Sends one request and reads its stream to the end.

        Whatever goes wrong with it is the answer's `error`; only cancellation is raised. The model must be known by now.
        """
        import aiohttp

        body = json.dumps(self._body(messages, output_tokens)).encode()
        reading = _Reading(sent_at=time.perf_counter())
        try:
            async with self._open.post(self._target.url, data=body, headers={"Content-Type": "application/json"}) as response:
                if response.status != 200:
                    raise BrokenStream(await _refusal(response))
                await _read(response, reading)
            return reading.answer()
        except (BrokenStream, aiohttp.ClientError, OSError) as error:
            return Answer(sent_at=reading.sent_at, error=_reason(error, self._target))

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is used outside its context"
        return self._session

    def _body(self, messages: Sequence[Message], output_tokens: int) -> dict[str, Any]:
        target = self._target
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        if target.backend == "openai-chat":
            body |= {"messages": list(messages), "max_completion_tokens": output_tokens}
        else:
            body |= {"prompt": completion_prompt(messages), "max_tokens": output_tokens}
        if target.temperature is not None:
            body["temperature"] = target.temperature
        if target.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(target.extra_body)


class _Reading:
    """What is known of an answer while its stream is read."""

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at
        self.done = False
        """The stream said that it is over: [DONE]."""
        self._finished = False
        self._text_times: list[float] = []
        self._last_at = sent_at
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}

    def take(self, data: bytes, arrived: float) -> None:
        """One event of the stream. BrokenStream where it is an error, or nothing that this protocol knows."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                raise BrokenStream(f"the stream broke off: {_message(event)}")
            for choice in event.get("choices") or ():
                self._take_choice(choice, arrived)
            self._usage = event.get("usage") or self._usage
        except (ValueError, TypeError, AttributeError):
            raise BrokenStream(f"an event of the stream cannot be read: {_shown(data)}") from None

    def _take_choice(self, choice: dict[str, Any], arrived: float) -> None:
        text = _text(choice)
        if text:
            self._texts.append(text)
            self._text_times.append(arrived)
        if choice.get("finish_reason"):
            self._finished = True
        if text or self._finished:
            self._last_at = arrived

    def answer(self) -> Answer:
        """What the stream held. BrokenStream if it ended before the answer did."""
        if not (self._finished or (self.done and self._text_times)):
            raise BrokenStream("the stream ended before the answer was finished")
        times = self._text_times or [self._last_at]
        output_tokens, prompt_tokens = self._usage.get("completion_tokens"), self._usage.get("prompt_tokens")
        vera = self._usage.get("vera")
        return Answer(
            sent_at=self.sent_at,
            ttft_seconds=times[0] - self.sent_at,
            gaps_seconds=tuple(later - earlier for earlier, later in pairwise(times)),
            e2e_seconds=self._last_at - self.sent_at,
            text="".join(self._texts),
            prompt_tokens=prompt_tokens or 0,
            output_tokens=len(self._text_times) if output_tokens is None else output_tokens,
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            counted=output_tokens is not None and prompt_tokens is not None,
            vera=vera if isinstance(vera, dict) else {},
        )


async def _read(response: aiohttp.ClientResponse, reading: _Reading) -> None:
    """Reads the stream to its end. What arrived together has the same time."""
    rest = b""
    async for received in response.content.iter_any():
        arrived = time.perf_counter()
        *lines, rest = (rest + received).split(b"\n")
        for data in _events(lines):
            reading.take(data, arrived)
        if reading.done:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await response.content.read()
            return


def _events(lines: Sequence[bytes]) -> Iterator[bytes]:
    """The data of server-sent events; comments, which keep a connection alive, and all other fields are left out."""
    for line in lines:
        if line.startswith(b"data:"):
            yield line[len(b"data:") :].strip()


def _text(choice: dict[str, Any]) -> str:
    """What a chunk brings: a completion's text, a message's content, or a reasoning model's thoughts."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"] or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """The status of a response, and as much of the server's reason as fits a line."""
    body = await response.content.read(2**16)
    try:
        reason = _message(json.loads(body))
    except ValueError:
        reason = _shown(body)
    return f"{response.status} {response.reason or ''}: {reason}".strip(" :")


def _message(event: Any) -> str:
    """The text in an OpenAI error, or the whole if it is none."""
    error = event.get("error") if isinstance(event, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or event)[:_ERROR_CHARACTERS]


def _shown(data: bytes) -> str:
    return data[:_ERROR_CHARACTERS].decode(errors="replace")


def _reason(error: Exception, target: Target) -> str:
    """An exception as a line for people."""
    if isinstance(error, BrokenStream):
        return str(error)
    if isinstance(error, TimeoutError) and not str(error):
        return f"took longer than {target.timeout_seconds:g} s"
    return f"{type(error).__name__}: {error}"
