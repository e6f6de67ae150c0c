"""/v1/chat/completions."""

from __future__ import annotations

from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.requests import Request

from vera.engine.request import Update
from vera.engine.sampler import TokenLogprob
from vera.server.generation import Answer, Form, Generator, finish_name, finite
from vera.server.protocol import ChatRequest
from vera.server.service import Job, Service
from vera.server.streaming import compact
from vera.server.tokens import TokenTexts


class ChatGenerator(Generator):
    def __init__(self, request: Request, body: ChatRequest, service: Service) -> None:
        super().__init__(request, body, service)
        self._chat = body

    @property
    def num_answers(self) -> int:
        return self._chat.n or 1

    async def prepare(self) -> Form:
        params = self._chat.sampling()
        encoder = self.service.encoder
        prompt = await encoder.chat(self._chat.conversation(), self._chat.template_arguments())
        job = self.service.job(
            self.record.id,
            [prompt],
            params,
            self._chat.vera,
            started=self.record.started,
            priority=self._chat.priority or 0,
            key=self._chat.user,
        )
        return ChatForm(
            job,
            self.service.served.name,
            encoder.texts,
            with_logprobs=bool(self._chat.logprobs),
            with_usage=self._chat.wants_usage_chunk,
        )


class ChatForm(Form):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, job: Job, model: str, texts: TokenTexts, *, with_logprobs: bool, with_usage: bool) -> None:
        super().__init__(job, model, prefix="chatcmpl", with_usage=with_usage)
        self._texts = texts
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self.chunk(b'{"index":%d,%s}' % (index, delta))

    def piece(self, index: int, update: Update) -> bytes:
        if update.finished or self._with_logprobs:
            return self.chunk(compact(self._full(index, update)))
        if not update.delta:
            return b""
        # The way of nearly every token.
        content = encode_basestring_ascii(update.delta).encode()
        return self.chunk(b'{"index":%d,"delta":{"content":%s},"logprobs":null,"finish_reason":null}' % (index, content))

    def choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": finish_name(answer),
            "stop_reason": answer.stop_reason,
        }

    def _full(self, index: int, update: Update) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": update.delta} if update.delta else {},
            "logprobs": self._logprobs(update.logprobs) if update.logprobs else None,
            "finish_reason": finish_name(update),
            **({"stop_reason": update.stop_reason} if update.finished else {}),
        }

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {
            "content": [
                {
                    **self._entry(token.token_id, token.logprob),
                    "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.top],
                }
                for token in tokens
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token_id), "logprob": finite(logprob), "bytes": self._texts.bytes(token_id)}
