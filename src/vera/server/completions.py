"""/v1/completions, with `echo`, token-list prompts and log-probabilities of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.requests import Request

from vera.engine.request import FinishReason, Update
from vera.engine.sampler import TokenLogprob
from vera.server.errors import bad_request
from vera.server.generation import Answer, Form, Generator, finish_name, finite
from vera.server.protocol import CompletionRequest
from vera.server.service import Job, Service
from vera.server.streaming import compact
from vera.server.tokens import TokenTexts


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is shown before its answers."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]
    """Where each token begins in the text; empty if nobody asked for log-probabilities."""


class CompletionGenerator(Generator):
    def __init__(self, request: Request, body: CompletionRequest, service: Service) -> None:
        super().__init__(request, body, service)
        self._completion = body
        if len(body.prompts()) > service.settings.max_prompts:
            raise bad_request(
                f"{len(body.prompts())} prompts are above the {service.settings.max_prompts} that this server takes at once; "
                "send them in several requests",
                "prompt",
            )

    @property
    def num_answers(self) -> int:
        return len(self._completion.prompts()) * (self._completion.n or 1)

    async def prepare(self) -> Form:
        body, encoder = self._completion, self.service.encoder
        params = body.sampling()
        given = body.prompts()
        adds_special = body.add_special_tokens is not False
        prompts = [await encoder.prompt(prompt, add_special_tokens=adds_special) for prompt in given]
        job = self.service.job(
            self.record.id,
            prompts,
            params,
            body.vera,
            started=self.record.started,
            priority=body.priority or 0,
            hidden_tokens=1 if body.max_tokens == 0 else 0,
            key=body.user,
        )
        echoes = [await self._echo(*pair) for pair in zip(given, prompts, strict=True)] if body.echo else None
        return CompletionForm(
            job,
            self.service.served.name,
            encoder.texts,
            echoes=echoes,
            with_logprobs=body.logprobs is not None,
            with_usage=body.wants_usage_chunk,
        )

    async def _echo(self, given: str | list[int], token_ids: list[int]) -> Echo:
        encoder, skip = self.service.encoder, self._completion.skip_special_tokens is not False
        text = given if isinstance(given, str) else await encoder.text(token_ids, skip_special_tokens=skip)
        wanted = self._completion.logprobs is not None
        return Echo(text, token_ids, await encoder.offsets(token_ids, skip_special_tokens=skip) if wanted else [])


class CompletionForm(Form):
    kind = chunk_kind = "text_completion"

    def __init__(
        self, job: Job, model: str, texts: TokenTexts, *, echoes: list[Echo] | None, with_logprobs: bool, with_usage: bool
    ) -> None:
        super().__init__(job, model, prefix="cmpl", with_usage=with_usage)
        self._texts = texts
        self._echoes = echoes
        self._with_logprobs = with_logprobs
        self._hides_answer = job.usage.hidden_tokens > 0
        self._lengths = [0 if (echo := self._echo_of(index)) is None else len(echo.text) for index in range(job.num_answers)]
        """Characters of each answer that were sent, its prompt included."""

    def opening(self, index: int) -> bytes:
        """The prompt, if it is echoed without log-probabilities; these come with the first update."""
        if (echo := self._echo_of(index)) is None or self._with_logprobs:
            return b""
        return self._plain(index, echo.text)

    def piece(self, index: int, update: Update) -> bytes:
        shown = self._shown(update)
        if shown.finished or self._with_logprobs:
            return self.chunk(compact(self._full(index, shown)))
        return self._plain(index, shown.delta) if shown.delta else b""

    def choice(self, answer: Answer) -> dict[str, Any]:
        if self._hides_answer:
            answer = Answer(answer.index, prompt_logprobs=answer.prompt_logprobs, finish_reason=FinishReason.LENGTH)
        echo = self._echo_of(answer.index)
        return {
            "index": answer.index,
            "text": ("" if echo is None else echo.text) + answer.text,
            "logprobs": self._logprobs(answer.index, answer.prompt_logprobs, answer.logprobs, answer.texts),
            "finish_reason": finish_name(answer),
            "stop_reason": answer.stop_reason,
        }

    def _plain(self, index: int, text: str) -> bytes:
        written = encode_basestring_ascii(text).encode()
        return self.chunk(b'{"index":%d,"text":%s,"logprobs":null,"finish_reason":null}' % (index, written))

    def _shown(self, update: Update) -> Update:
        if not self._hides_answer:
            return update
        return replace(update, delta="", logprobs=[], finish_reason=FinishReason.LENGTH, stop_reason=None)

    def _full(self, index: int, update: Update) -> dict[str, Any]:
        echo = self._echo_of(index)
        opens = update.prompt_logprobs is not None and echo is not None and self._with_logprobs
        return {
            "index": index,
            "text": (echo.text if opens and echo is not None else "") + update.delta,
            "logprobs": self._logprobs(index, update.prompt_logprobs, update.logprobs, [update.delta]),
            "finish_reason": finish_name(update),
            **({"stop_reason": update.stop_reason} if update.finished else {}),
        }

    def _logprobs(
        self, index: int, of_prompt: list[TokenLogprob | None] | None, of_answer: list[TokenLogprob], texts: list[str]
    ) -> dict[str, Any] | None:
        """`texts` are the pieces of text that came with the answer's tokens."""
        if not self._with_logprobs:
            return None
        tokens: list[tuple[int, TokenLogprob | None]] = []
        offsets: list[int] = []
        echo = self._echo_of(index)
        if echo is not None and of_prompt is not None:
            tokens += zip(echo.token_ids, of_prompt, strict=True)
            offsets += echo.offsets
        for token, text in zip(of_answer, texts, strict=False):
            tokens.append((token.token_id, token))
            offsets.append(self._lengths[index])
            self._lengths[index] += len(text)
        return {
            "tokens": [self._texts.text(token_id) for token_id, _ in tokens],
            "token_logprobs": [None if token is None else finite(token.logprob) for _, token in tokens],
            "top_logprobs": [None if token is None else self._top(token) for _, token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Best first; where two tokens read the same, the better one stays. The token itself is always among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            top.setdefault(self._texts.text(token_id), finite(logprob))
        return top

    def _echo_of(self, index: int) -> Echo | None:
        return None if self._echoes is None else self._echoes[index // self.job.params.n]
