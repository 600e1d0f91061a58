"""The language model: embedding, layers, shared blocks, head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fast_llm_ssm.layers.base import Mixer
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import KVSlot, Layout, document_layout, plain_layout, prefill_layout
from fast_llm_ssm.layers.parts import Linear, Modules, scaled
from fast_llm_ssm.model import meta_tokens
from fast_llm_ssm.model.block import Block, Inject, SublayerState
from fast_llm_ssm.model.config import ModelConfig
from fast_llm_ssm.model.state import DecodingState
from fast_llm_ssm.ops import linear_cross_entropy


class Embedding(nn.Module):
    """Rows of a table."""

    def __init__(self, num_rows: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size))

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.weight).to(dtype)


class HybridModel(nn.Module):
    """A hybrid stack, as its config says. Single-device code: sharding and compilation are put on from outside.

    Attributes:
        compute_dtype: of activations; None takes the embedding's dtype. Parameters are cast at use.
        activation_checkpointing: "none", or "full": keep only each layer's input and compute the rest again.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.activation_checkpointing = "none"
        d = config.hidden_size
        self.embedding = Embedding(config.num_rows, d)
        self.meta_tokens = nn.Parameter(torch.empty(config.meta_tokens, d)) if config.meta_tokens else None
        self.shared = nn.ModuleDict({name: Block(block, d) for name, block in config.shared.items()})
        self.layers = Modules(Block(config.blocks[name], d) for name in config.layer_names)
        self._reuses_kv = any(layer.reuses_kv for layer in self.layers)
        self._connect_shared()
        self.final_norm = config.final_norm.build(d)
        self.head = None if config.tie_embeddings else Linear(d, config.num_rows)

    def _connect_shared(self) -> None:
        uses = 0
        for name, layer in zip(self.config.layer_names, self.layers, strict=True):
            for sublayer, config in zip(layer, self.config.blocks[name], strict=True):
                if config.inject is not None:
                    shared = config.inject.shared[uses % len(config.inject.shared)]
                    block = cast("Block", self.shared[shared])
                    sublayer.inject = Inject(config.inject, block, self.config.shared[shared], self.config.hidden_size)
                    uses += 1

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Logits of every position.

        Args:
            input_ids: [B, T] integers.
            cu_seqlens: [documents + 1], boundaries of documents packed into the rows: over the flattened B * T
                tokens, row ends included. Documents don't see each other.
            attention_mask: [B, T], nonzero at real tokens; padding may stand on either side. Not with `cu_seqlens`.

        Returns:
            [B, T, rows of the vocabulary] in the compute dtype; zero at padding.

        Raises:
            ValueError: both `cu_seqlens` and `attention_mask`; wrong shapes; documents in a mixer without support.
        """
        if attention_mask is None:
            return self._logits(self._hidden(input_ids, cu_seqlens))
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens and attention_mask together: padding and packing exclude each other")
        real, counts = _real_tokens(input_ids, attention_mask)
        logits = self(input_ids[real][None], F.pad(counts.cumsum(0), (1, 0)))  # each row is a document
        out = logits.new_zeros(*input_ids.shape, logits.shape[-1])
        out[real] = logits[0]
        return out

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Cross-entropy of the next tokens, in nats, without ever holding all logits.

        Args:
            input_ids: [B, T] integers.
            targets: [B, T] integers, the token after each; -100 where there is none.
            cu_seqlens: as in `forward`.
            reduction: "mean" over the targets, or "sum".

        Returns:
            fp32 scalar.
        """
        hidden = self._hidden(input_ids, cu_seqlens)
        return linear_cross_entropy(
            hidden,
            self._head_weight.to(hidden.dtype),
            targets,
            logits_scale=self.config.logits_multiplier,
            reduction=reduction,
        )

    def new_state(self, batch_size: int, max_length: int, device: torch.device | str | None = None) -> DecodingState:
        """The decoding state of rows that have seen nothing but meta tokens; each can take `max_length` tokens."""
        device = torch.device(device) if device is not None else self.embedding.weight.device
        room = self.config.meta_tokens + max_length
        layers = [layer.new_state(batch_size, room, device, self.dtype) for layer in self.layers]
        state = DecodingState(torch.zeros(batch_size, dtype=torch.int64, device=device), layers, max_length)
        if self.meta_tokens is not None:
            counts = torch.full_like(state.lengths, self.config.meta_tokens)
            meta = self.meta_tokens.to(self.dtype).repeat(batch_size, 1)[None]  # [1, B * M, d]
            with torch.no_grad():
                self._run(meta, prefill_layout(counts, state.lengths, self.dtype), "prefill", state)
        return state

    def prefill(self, input_ids: Tensor, state: DecodingState, attention_mask: Tensor | None = None) -> Tensor:
        """Continue each row of the state by its real tokens, none included.

        Args:
            input_ids: [B, T] integers.
            attention_mask: [B, T], nonzero at real tokens; None if all are.

        Returns:
            [B, rows of the vocabulary]: logits after the last real token of each row; zero for a row without any.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        real, counts = _real_tokens(input_ids, attention_mask)
        _check_room(state, counts)
        if not real.any():
            return self._logits(self.embedding.weight.new_zeros(len(counts), self.config.hidden_size, dtype=self.dtype))
        layout = prefill_layout(counts, state.lengths + self.config.meta_tokens, self.dtype)
        hidden = self._run(self._embed(input_ids[real][None]), layout, "prefill", state)[0]
        state.lengths += counts
        last = hidden.new_zeros(len(counts), hidden.shape[-1])
        some = counts > 0
        last[some] = hidden[counts.cumsum(0)[some] - 1]
        return self._logits(last) * some[:, None]

    def step(self, input_ids: Tensor, state: DecodingState) -> Tensor:
        """Continue each row by one token: input_ids [B] -> logits [B, rows of the vocabulary].

        The caller sees to it that rows have room: checking here would synchronise a GPU at every token.
        """
        layout = Layout(self.dtype, state.lengths[:, None] + self.config.meta_tokens)
        hidden = self._run(self._embed(input_ids[:, None]), layout, "step", state)
        state.lengths += 1
        return self._logits(hidden[:, 0])

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return self.compute_dtype or self.embedding.weight.dtype

    def _hidden(self, input_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Final hidden states of whole documents, normed: [B, T, hidden_size]."""
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [batch, length]")
        batch_size, length = input_ids.shape
        embedding = self._embed(input_ids)
        if cu_seqlens is None:
            count = self.config.meta_tokens
            if self.meta_tokens is not None:
                meta = self.meta_tokens.to(self.dtype).expand(batch_size, -1, -1)
                embedding = torch.cat([meta, embedding], dim=1)
            layout = plain_layout(batch_size, count + length, self.dtype, input_ids.device)
            return self._run(embedding, layout)[:, count:]
        for name, mixer in self.named_mixers():
            if not mixer.supports_documents:
                raise ValueError(f"{name} ({type(mixer).__name__}) cannot keep packed documents apart")
        layout = document_layout(cu_seqlens.to(input_ids.device), batch_size, length, self.dtype)
        if self.meta_tokens is None:
            return self._run(embedding, layout)
        assert layout.cu_seqlens is not None
        row, bounds, places = meta_tokens.insert(self.meta_tokens.to(self.dtype), embedding, layout.cu_seqlens)
        return self._run(row, document_layout(bounds, 1, row.shape[1], self.dtype))[0, places]

    def _embed(self, input_ids: Tensor) -> Tensor:
        return scaled(self.embedding(input_ids, self.dtype), self.config.embedding_multiplier)

    def _run(
        self, embedding: Tensor, layout: Layout, mode: str = "forward", state: DecodingState | None = None
    ) -> Tensor:
        """Through all layers: embedding [B, T, hidden_size] -> normed hidden states in the layout's dtype."""
        x = embedding.float() if self.config.residual_fp32 and embedding.dtype != torch.float64 else embedding
        recompute = self.activation_checkpointing == "full" and torch.is_grad_enabled() and state is None
        kv: tuple[Tensor, Tensor] | None = None
        for i, layer in enumerate(self.layers):
            inputs = (layer, x, embedding, layout, mode, state.layers[i] if state is not None else None, kv)
            if recompute:
                x, kv = checkpoint(self._layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, kv = self._layer(*inputs)
        return self.final_norm(x).to(layout.dtype)

    def _layer(
        self,
        layer: Block,
        x: Tensor,
        embedding: Tensor,
        layout: Layout,
        mode: str,
        state: list[SublayerState] | None,
        kv: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """One layer as a function: the keys and values that later layers may reuse go in and come out."""
        if not self._reuses_kv:
            return layer(x, embedding, layout, mode, state), None
        slot = KVSlot(kv)
        return layer(x, embedding, replace(layout, kv=slot), mode, state), slot.kv

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _logits(self, hidden: Tensor) -> Tensor:
        return scaled(F.linear(hidden, self._head_weight.to(hidden.dtype)), self.config.logits_multiplier)

    def named_mixers(self) -> Iterator[tuple[str, Mixer]]:
        """(name, mixer), inner ones of parallel mixers too; a shared block's mixers once."""
        for name, module in self.named_modules():
            if isinstance(module, Mixer):
                yield name, module

    def fp32_names(self) -> set[str]:
        """Parameters that stay fp32 whatever the model's dtype."""
        return {f"{name}.{own}" for name, mixer in self.named_mixers() for own in mixer.fp32_parameters}

    def no_decay_names(self) -> set[str]:
        """Parameters without weight decay: what mixers name, all norms, all biases."""
        names = {f"{name}.{own}" for name, mixer in self.named_mixers() for own in mixer.no_decay_parameters}
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or name.endswith("bias"):
                names.add(name)
        return names

    def num_parameters(self) -> int:
        """Shared and tied parameters count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of a training step for one token: forward, and twice that backward."""
        head = 2 * self._head_weight.numel()
        length = sequence_length + self.config.meta_tokens
        layers = sum(layer.flops_per_token(length) for layer in self.layers) * length / sequence_length
        return 3 * (head + layers)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Draw initial weights; each depends on the seed and its own name alone."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.named_parameters()}
        blocks = [*self.layers, *(cast("Block", block) for block in self.shared.values())]
        num_residuals = sum(sublayer.residual for block in blocks for sublayer in block)
        init = Init(names, seed, self.config.init.std, num_residuals)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith(".weight") and parameter.dim() == 1:  # of a norm
                parameter.fill_(1.0)
        init.normal(self.embedding.weight)
        if self.meta_tokens is not None:
            init.normal(self.meta_tokens, std=1.0)
        if self.head is not None:
            init.normal(self.head.weight)
        for block in blocks:
            for sublayer in block:
                sublayer.mixer.init_weights(init)
                if sublayer.inject is not None:
                    sublayer.inject.init_weights(init)


def _real_tokens(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """([B, T] bool, [B] int64 counts)."""
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, "
            f"expected that of input_ids, {list(input_ids.shape)}"
        )
    real = attention_mask.to(input_ids.device) != 0
    return real, real.sum(1)


def _check_room(state: DecodingState, counts: Tensor) -> None:
    longest = int((state.lengths + counts).max())
    if longest > state.max_length:
        raise ValueError(f"a row of {longest} tokens does not fit the state's max_length {state.max_length}")
