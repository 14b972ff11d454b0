"""Define the demo's transformer in PyTorch; see `holdfast.demo.learner`."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.demo.learner import ModelConfig

INITIAL_DEVIATION = 0.02


class Transformer(nn.Module):  # type: ignore[misc, unused-ignore]
    """A decoder: int64 text of shape (windows, context) to logits (windows, context, 256)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class _Layer(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self._heads = config.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self._attention(self.attention_norm(x)))
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x)))
        summed: torch.Tensor = x + self.dropout(self.down(hidden))
        return summed

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        windows, context, width = x.shape
        pieces = self.qkv(x).view(windows, context, 3, self._heads, width // self._heads)
        query, key, value = pieces.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(windows, context, width))
        return output
