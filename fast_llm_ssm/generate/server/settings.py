"""What the server takes, and what it refuses."""

from __future__ import annotations

import ipaddress

from pydantic import Field, model_validator

from fast_llm_ssm.config import Config


class ServerSettings(Config):
    """Limits of a server. Lengths are in tokens, times in seconds.

    Attributes:
        model_id: the name that answers carry.
        host: address to listen on; others than loopback need an API key.
        port: 0 takes a free one.
        api_key: clients send it as `Authorization: Bearer KEY`.
        max_input_length: of a prompt.
        max_total_tokens: of a prompt and its continuation.
        max_batch_prefill_tokens: prompt tokens read between two steps of the requests that are being answered.
        max_concurrent_requests: requests at once, waiting ones included; more are refused with status 429.
        max_batch_size: requests that are continued at once; the state of each takes memory.
        max_request_bytes: of a request's body.
        request_timeout: for all of a request.
        body_timeout: for receiving its body.
    """

    model_id: str = "model"
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    api_key: str | None = Field(default=None, min_length=1)
    max_input_length: int = Field(default=1024, ge=1)
    max_total_tokens: int = Field(default=2048, ge=2)
    max_batch_prefill_tokens: int = Field(default=4096, ge=1)
    max_concurrent_requests: int = Field(default=128, ge=1)
    max_batch_size: int = Field(default=16, ge=1)
    max_request_bytes: int = Field(default=1 << 20, ge=1)
    request_timeout: float = Field(default=600.0, gt=0)
    body_timeout: float = Field(default=20.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> ServerSettings:
        if self.max_input_length >= self.max_total_tokens:
            raise ValueError(
                f"max_input_length: got {self.max_input_length}, "
                f"expected less than max_total_tokens ({self.max_total_tokens})"
            )
        if self.api_key is None and not self.is_loopback:
            raise ValueError(f"host: got {self.host}, expected an API key beside it, or a loopback address (127.0.0.1)")
        return self

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
