"""The networks to train: small ones of common kinds."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

N_SYMBOLS = 256
"""Text is read by the byte."""


class DigitsNet(nn.Module):
    """A convolutional net with batch statistics for pictures of 8 by 8; 2.2 million parameters at width 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(32 * width, 14 * width), nn.ReLU(), nn.Linear(14 * width, 10))

    def forward(self, pictures: Tensor) -> Tensor:
        """Give a score for each digit."""
        return self.head(self.backbone(pictures))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a layer of neurons, each behind a norm."""

    def __init__(self, width: int, n_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.is_causal = is_causal
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, place, width) to the same."""
        n_texts, n_places, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(n_texts, n_places, 3, self.n_heads, width // self.n_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(seen.transpose(1, 2).reshape(n_texts, n_places, width))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder that predicts the next byte.

    It has 4.9 million parameters at width 256 and 6 layers, initialised as GPT-2 is.
    """

    def __init__(
        self,
        width: int,
        n_layers: int,
        n_places: int,
        *,
        is_causal: bool = True,
        n_symbols: int = N_SYMBOLS,
        n_scores: int = N_SYMBOLS,
    ) -> None:
        super().__init__()
        self.symbols = nn.Embedding(n_symbols, width)
        self.places = nn.Embedding(n_places, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64), is_causal=is_causal) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_scores, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)

    def features(self, text: Tensor) -> Tensor:
        """Map symbols (batch, place) to vectors (batch, place, width)."""
        x = self.symbols(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward(self, text: Tensor) -> Tensor:
        """Give a score for each symbol at each place."""
        return self.head(self.features(text))  # type: ignore[no-any-return]


class Encoder(Transformer):
    """An encoder of words with a head for two kinds of text; half of its parameters are the vectors of words.

    22 million parameters at width 384, 6 layers and 30,522 words, as all-MiniLM-L6-v2 has.
    """

    def __init__(self, width: int, n_layers: int, n_places: int, n_words: int) -> None:
        super().__init__(width, n_layers, n_places, is_causal=False, n_symbols=n_words, n_scores=2)

    def words(self, text: Tensor) -> Tensor:
        """Give a score for each word at each place."""
        return self.features(text) @ self.symbols.weight.T

    def forward(self, text: Tensor) -> Tensor:
        """Give a score for each kind of text."""
        return self.head(self.features(text).mean(1))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank correction."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Add the correction to the layer's answer."""
        return self.linear(x) + x @ self.a.T @ self.b.T  # type: ignore[no-any-return]


def adapt(model: Transformer, rank: int) -> None:
    """Freeze a transformer, and give the attention of each block a trained low-rank correction."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.qkv = Adapted(block.qkv, rank)  # type: ignore[assignment]
