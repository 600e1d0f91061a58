"""What `/metrics` tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fast_llm_ssm.generate.engine import Engine
from fast_llm_ssm.generate.worker import Answer

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters of one server."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "fast_llm_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=self._registry
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts that were answered.")
        self._generated_tokens = self._counter("generated_tokens", "Tokens generated.")
        self._first_token = self._histogram("time_to_first_token_seconds", "From the request to its first token.")
        self.duration = self._histogram("request_duration_seconds", "From the request to the end of its answer.")
        self._gauge("requests_running", "Requests that hold a slot.").set_function(lambda: engine.num_running)
        self._gauge("requests_waiting", "Requests that wait for a slot.").set_function(lambda: engine.num_waiting)

    def count(self, answer: Answer) -> None:
        """Count an answer that has ended, or that nobody waits for any more."""
        if answer.first_after is not None:
            self._first_token.observe(answer.first_after)
            self._prompt_tokens.inc(len(answer.request.prompt))
        self._generated_tokens.inc(len(answer.tokens))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"fast_llm_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"fast_llm_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"fast_llm_{name}", text, buckets=_SECONDS, registry=self._registry)
