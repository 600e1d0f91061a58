"""The two protocols: what a body asks of the engine, and how answers are written."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

from fast_llm_ssm.data.tokenizer import Tokenizer
from fast_llm_ssm.generate.request import Request, Token
from fast_llm_ssm.generate.server.bodies import CompletionBody, GenerateBody, Refused
from fast_llm_ssm.generate.server.settings import ServerSettings
from fast_llm_ssm.generate.worker import Answer

_DEFAULT_NEW_TOKENS = 100
_TGI_REASONS = {"length": "length", "stop_token": "eos_token", "stop_string": "stop_sequence"}
_OPENAI_REASONS = {"length": "length", "stop_token": "stop", "stop_string": "stop"}


class Protocol(ABC):
    """One body's side of a protocol."""

    stream: bool

    @abstractmethod
    def requests(self, tokenizer: Tokenizer, settings: ServerSettings) -> list[Request]:
        """What to ask the engine; tokenizes, so not in the event loop.

        Raises:
            Refused: too long, empty, or ids out of range.
        """

    @abstractmethod
    def reply(self, answers: list[Answer]) -> dict[str, Any]:
        """The body of a whole answer."""

    @abstractmethod
    def event(self, index: int, answer: Answer, token: Token) -> dict[str, Any] | None:
        """The event of one token of answer number `index`; None if there is nothing to say yet."""

    def closing(self, answers: list[Answer]) -> list[dict[str, Any] | str]:
        """Events after the last token."""
        return []


class TextGeneration(Protocol):
    """text-generation-inference."""

    def __init__(self, body: GenerateBody, stream: bool, tokenizer: Tokenizer):
        self._body = body
        self._parameters = body.parameters
        self._tokenizer = tokenizer
        self._special = {tokenizer.bos_id, tokenizer.eos_id}
        self.stream = stream

    def requests(self, tokenizer: Tokenizer, settings: ServerSettings) -> list[Request]:
        p = self._parameters
        ids = tokenizer.encode_prompt(self._body.inputs)
        if p.truncate is not None:
            ids = ids[-p.truncate :]
        limit = _check_length("inputs", ids, settings)
        if p.max_new_tokens is not None and p.max_new_tokens > limit:
            raise _too_many("parameters.max_new_tokens", p.max_new_tokens, ids, settings)
        request = Request(
            ids,
            p.max_new_tokens or min(_DEFAULT_NEW_TOKENS, limit),
            p.sampling(),
            _stop_ids(tokenizer),
            p.stop,
            log_probs=p.details or self.stream,
            top_log_probs=p.top_n_tokens or 0,
        )
        return [request]

    def reply(self, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        reply: dict[str, Any] = {"generated_text": self._text(answer)}
        if self._parameters.details:
            reply["details"] = {
                **self._details(answer),
                "prefill": [],
                "tokens": [self._token(token) for token in answer.tokens],
            }
            if self._parameters.top_n_tokens:
                reply["details"]["top_tokens"] = [self._top(token) for token in answer.tokens]
        return reply

    def event(self, index: int, answer: Answer, token: Token) -> dict[str, Any]:
        last = token.finish is not None
        event = {
            "index": len(answer.tokens),
            "token": self._token(token),
            "generated_text": self._text(answer) if last else None,
            "details": self._details(answer) if last and self._parameters.details else None,
        }
        return event | ({"top_tokens": self._top(token)} if self._parameters.top_n_tokens else {})

    def _text(self, answer: Answer) -> str:
        return (self._body.inputs if self._parameters.return_full_text else "") + answer.text

    def _details(self, answer: Answer) -> dict[str, Any]:
        options = answer.request.options
        return {
            "finish_reason": _TGI_REASONS[answer.tokens[-1].finish or "length"],
            "generated_tokens": len(answer.tokens),
            "input_length": len(answer.request.prompt),
            "seed": options.seed if options.temperature else None,
        }

    def _token(self, token: Token) -> dict[str, Any]:
        return {"id": token.id, "text": token.text, "logprob": token.log_prob, "special": token.id in self._special}

    def _top(self, token: Token) -> list[dict[str, Any]]:
        return [
            {"id": id, "text": self._tokenizer.decode([id]), "logprob": log_prob, "special": id in self._special}
            for id, log_prob in token.top
        ]


class Completions(Protocol):
    """OpenAI's completions."""

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer, model_id: str):
        self._body = body
        self._tokenizer = tokenizer
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_id,
        }
        self.stream = body.stream

    def requests(self, tokenizer: Tokenizer, settings: ServerSettings) -> list[Request]:
        body = self._body
        if not body.prompts:
            raise Refused(422, "prompt: got an empty list, expected text, token ids, or several of them")
        requests = []
        for prompt in body.prompts:
            if not prompt:
                raise Refused(422, "prompt: got an empty one, expected at least one character or token")
            ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
            limit = _check_length("prompt", ids, settings)
            if body.max_tokens is not None and body.max_tokens > limit:
                raise _too_many("max_tokens", body.max_tokens, ids, settings)
            request = Request(
                ids,
                body.max_tokens or limit,
                body.sampling(),
                _stop_ids(tokenizer),
                body.stops,
                log_probs=body.logprobs is not None,
                top_log_probs=body.logprobs or 0,
            )
            requests.append(request)
        return requests

    def reply(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": self._log_probs(answer.tokens, 0),
                "finish_reason": _OPENAI_REASONS[answer.tokens[-1].finish or "length"],
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": _usage(answers)}

    def event(self, index: int, answer: Answer, token: Token) -> dict[str, Any] | None:
        log_probs = self._log_probs([token], len(answer.text) - len(token.text))
        if not token.text and token.finish is None and log_probs is None:
            return None
        reason = None if token.finish is None else _OPENAI_REASONS[token.finish]
        choice = {"index": index, "text": token.text, "logprobs": log_probs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}

    def closing(self, answers: list[Answer]) -> list[dict[str, Any] | str]:
        wants_usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        usage: list[dict[str, Any] | str] = [{**self._head, "choices": [], "usage": _usage(answers)}]
        return [*(usage if wants_usage else []), "[DONE]"]

    def _log_probs(self, tokens: list[Token], offset: int) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self._tokenizer.decode([token.id]) for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [{self._tokenizer.decode([id]): p for id, p in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _check_length(name: str, ids: list[int], settings: ServerSettings) -> int:
    """How many new tokens fit after a prompt."""
    if not ids:
        raise Refused(422, f"{name}: got a text without tokens, expected at least one")
    if len(ids) > settings.max_input_length:
        raise Refused(
            422, f"{name}: got {len(ids)} tokens, expected at most {settings.max_input_length} (--max-input-length)"
        )
    return settings.max_total_tokens - len(ids)


def _too_many(name: str, value: int, ids: list[int], settings: ServerSettings) -> Refused:
    total = settings.max_total_tokens
    return Refused(
        422,
        f"{name}: got {value} after a prompt of {len(ids)} tokens, expected at most {total} together"
        " (--max-total-tokens)",
    )


def _stop_ids(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


def _usage(answers: list[Answer]) -> dict[str, int]:
    prompt = sum(len(answer.request.prompt) for answer in answers)
    new = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
