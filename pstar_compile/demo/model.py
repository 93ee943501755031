"""A plain GPT over bytes, as a PyTorch user would write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of the model. The default has some 25 million parameters."""

    vocabulary: int = 256
    """Distinct tokens: one for each byte."""
    context: int = 128
    """The longest sequence, in tokens."""
    hidden: int = 512
    """Width of the residual stream."""
    layers: int = 8
    """Transformer blocks."""
    heads: int = 8
    """Attention heads of each block."""


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder that returns the mean cross entropy of the next token, in nats."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.apply(_initialize)
        for module in self.modules():
            if isinstance(module, Block):
                for last in (module.projection, module.down):
                    nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of predicting ``y`` from ``x``, both int64 (batch, sequence)."""
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
