"""Training loops, and the states kept along the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from benchmarks.data._case import Array
from benchmarks.data._nets import N_SYMBOLS, DigitsNet, Encoder, Transformer
from benchmarks.data._text import HIDDEN

State = dict[str, Array]
"""Arrays by name: ``w/…`` weights and buffers, ``m/…`` and ``v/…`` Adam's moments of the trained ones."""

Loss = Callable[[Any, Tensor, int, int], Tensor]
"""Returns the loss of a model on randomly drawn places of a text, from the number of texts and of places in each."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copy weights, buffers and moments."""
    state = {f"w/{name}": tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter)
        if moments:
            state[f"m/{name}"] = moments["exp_avg"].numpy().copy()
            state[f"v/{name}"] = moments["exp_avg_sq"].numpy().copy()
    return state


N_DIGITS = 1500
"""Number of pictures for training; the other 297 remain for testing."""


def train_digits(model: DigitsNet, n_epochs: int, *, learning_rate: float = 1e-3) -> Iterator[State]:
    """Train on scikit-learn's handwritten digits; the state after each epoch."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pictures = torch.tensor(pixels[:N_DIGITS] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    digits = torch.tensor(labels[:N_DIGITS])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], learning_rate)
    model.train()
    for _ in range(n_epochs):
        for batch in torch.randperm(len(pictures)).split(64):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            functional.cross_entropy(model(pictures[batch]), digits[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield state_of(model, optimizer)


def next_bytes(model: Transformer, text: Tensor, n_texts: int, n_places: int) -> Tensor:
    """Return the loss of a decoder on randomly drawn places of a text."""
    starts = torch.randint(len(text) - n_places - 1, (n_texts,))
    seen = torch.stack([text[start : start + n_places] for start in starts])
    wanted = torch.stack([text[start + 1 : start + n_places + 1] for start in starts])
    return functional.cross_entropy(model(seen).view(-1, N_SYMBOLS), wanted.view(-1))


def hidden_words(model: Encoder, text: Tensor, n_texts: int, n_places: int) -> Tensor:
    """Return an encoder's loss on hidden words, 15 of 100."""
    starts = torch.randint(len(text) - n_places, (n_texts,))
    wanted = torch.stack([text[start : start + n_places] for start in starts])
    is_hidden = torch.rand(wanted.shape) < 0.15
    scores = model.words(wanted.masked_fill(is_hidden, HIDDEN))
    return functional.cross_entropy(scores[is_hidden], wanted[is_hidden])


def kind_after(n_words: int) -> Loss:
    """Return the loss of an encoder that tells the first words of a text from the others."""

    def loss_of(model: Encoder, text: Tensor, n_texts: int, n_places: int) -> Tensor:
        starts = torch.randint(len(text) - n_places, (n_texts,))
        seen = torch.stack([text[start : start + n_places] for start in starts])
        return functional.cross_entropy(model(seen), (starts >= n_words).long())

    return loss_of


def train_text(
    model: Transformer,
    text: Tensor,
    *,
    n_epochs: int,
    n_steps: int,
    n_texts: int,
    learning_rate: float,
    n_places: int = 128,
    loss_of: Loss = next_bytes,
    is_pretraining: bool = False,
    weight_decay: float = 0.0,
) -> Iterator[State]:
    """Train on text with AdamW and clipped gradients; the state after each epoch.

    Args:
        n_steps: Steps per epoch.
        n_texts: Texts per step.
        learning_rate: The highest one, in a pretraining.
        is_pretraining: Whether the learning rate rises over 40 steps and then falls to a tenth along a cosine, with
            a weight decay of 0.1; otherwise it stays.
        weight_decay: Weight decay of other trainings.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.1} if is_pretraining else {"weight_decay": weight_decay}
    optimizer = torch.optim.AdamW(trained, learning_rate, **settings)
    for epoch in range(n_epochs):
        for step in range(epoch * n_steps, (epoch + 1) * n_steps):
            if is_pretraining:
                falling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / (n_epochs * n_steps)))
                optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, (step + 1) / 40) * falling
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, text, n_texts, n_places).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        yield state_of(model, optimizer)


def weights_of(state: State) -> State:
    """The weights and buffers alone, without Adam's moments."""
    return {name: array for name, array in state.items() if name.startswith("w/")}


def as_bfloat16(state: State) -> State:
    """Round fp32 to bf16; leave other dtypes alone."""
    import ml_dtypes

    return {
        name: array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array for name, array in state.items()
    }
