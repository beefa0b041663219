"""Histories: states of one training after the other, trained once and kept in a folder.

Each resembles a team's own: a pretraining with Adam's moments and its fine-tunes, the weights alone in bf16, a small
net in fp32, fine-tunes at a small learning rate, frozen backbones, low-rank adapters.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.data import _text as text
from benchmarks.data._case import Case
from benchmarks.data._nets import DigitsNet, Encoder, Transformer, adapt
from benchmarks.data._training import (
    State,
    as_bfloat16,
    hidden_words,
    kind_after,
    train_digits,
    train_text,
    weights_of,
)

RECIPE = 3
"""Version of the trainings; a change of it discards the trained states of earlier versions."""


N_THREADS = 2
"""Threads of torch during a training: sums over another number of threads round differently, and lead to another net.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of the nets and length of their training."""

    name: str
    width: int
    n_layers: int
    encoder_width: int
    encoder_layers: int
    encoder_words: int
    digits_width: int
    n_epochs: int
    n_digits_epochs: int
    n_frozen_epochs: int
    n_tuning_epochs: int
    n_steps: int
    n_tuning_steps: int
    n_encoder_steps: int
    n_texts: int


FULL = Scale(
    name="full",
    width=256,
    n_layers=6,
    encoder_width=384,
    encoder_layers=6,
    encoder_words=30_522,
    digits_width=64,
    n_epochs=8,
    n_digits_epochs=10,
    n_frozen_epochs=6,
    n_tuning_epochs=5,
    n_steps=60,
    n_tuning_steps=20,
    n_encoder_steps=240,
    n_texts=16,
)
SMOKE = Scale(
    name="smoke",
    width=64,
    n_layers=2,
    encoder_width=64,
    encoder_layers=2,
    encoder_words=1_000,
    digits_width=8,
    n_epochs=1,
    n_digits_epochs=1,
    n_frozen_epochs=2,
    n_tuning_epochs=3,
    n_steps=2,
    n_tuning_steps=1,
    n_encoder_steps=1,
    n_texts=4,
)


@dataclass(frozen=True, slots=True)
class History:
    """States in the order of their saves."""

    name: str
    steps: tuple[tuple[str, int, Path], ...]
    """Run and step of each state, and its file."""
    convert: Callable[[State], State] = weights_of

    def cases(self) -> Iterator[tuple[str, int, Case]]:
        """Yield run, step and model, one after the other."""
        for run, step, path in self.steps:
            yield run, step, Case(f"{self.name}, {run} {step}", self.convert(_load(path)))


def _pretraining(scale: Scale) -> Iterator[State]:
    model = Transformer(scale.width, scale.n_layers, 128)
    yield from train_text(
        model,
        text.documentation(),
        n_epochs=scale.n_epochs,
        n_steps=scale.n_steps,
        n_texts=scale.n_texts,
        learning_rate=1e-3,
        is_pretraining=True,
    )


def _restored(state: State, scale: Scale) -> Transformer:
    model = Transformer(scale.width, scale.n_layers, 128)
    model.load_state_dict({name[2:]: torch.from_numpy(array) for name, array in weights_of(state).items()})
    return model


def _tuning(model: Transformer, scale: Scale, learning_rate: float) -> Iterator[State]:
    """Fine-tune the trainable part of a model on other text."""
    yield from train_text(
        model,
        text.sources(),
        n_epochs=scale.n_tuning_epochs,
        n_steps=scale.n_tuning_steps,
        n_texts=scale.n_texts,
        learning_rate=learning_rate,
    )


def _frozen_tuning(base: State, scale: Scale) -> Iterator[State]:
    """The last block and the head alone; three states."""
    model = _restored(base, scale)
    trained = (f"blocks.{scale.n_layers - 1}", "norm.", "head")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(trained)
    yield from itertools.islice(_tuning(model, scale, 1e-4), 3)


def _adapters(base: State, scale: Scale) -> Iterator[State]:
    """Low-rank corrections of each attention; the whole model is saved each time."""
    model = _restored(base, scale)
    adapt(model, 8)
    yield from itertools.islice(_tuning(model, scale, 1e-3), 4)


def _digits(scale: Scale) -> Iterator[State]:
    yield from train_digits(DigitsNet(scale.digits_width), scale.n_digits_epochs)


def _frozen_digits(scale: Scale) -> Iterator[State]:
    """A backbone frozen except for its batch statistics, and a trained head."""
    model = DigitsNet(scale.digits_width)
    for _ in train_digits(model, scale.n_frozen_epochs // 2):
        pass
    model.backbone.requires_grad_(False)
    yield from train_digits(model, scale.n_frozen_epochs)


def _encoder(scale: Scale) -> Iterator[State]:
    """A pretrained encoder, and five states of its fine-tune as a classifier at a learning rate of 2e-5."""
    model = Encoder(scale.encoder_width, scale.encoder_layers, 128, scale.encoder_words)
    documented, programmed = text.words(scale.encoder_words)
    pretraining = train_text(
        model,
        documented,
        n_epochs=1,
        n_steps=scale.n_encoder_steps,
        n_texts=scale.n_texts,
        n_places=64,
        learning_rate=5e-4,
        loss_of=hidden_words,
        is_pretraining=True,
    )
    yield next(pretraining)
    yield from train_text(
        model,
        torch.cat((documented, programmed)),
        n_epochs=scale.n_tuning_epochs,
        n_steps=scale.n_tuning_steps,
        n_texts=scale.n_texts,
        n_places=64,
        learning_rate=2e-5,
        loss_of=kind_after(len(documented)),
        weight_decay=0.01,
    )


def _trained(folder: Path, scale: Scale) -> None:
    """Train all histories missing in a folder."""
    _keep(folder / "pretraining", lambda: _pretraining(scale))
    base = _files(folder / "pretraining")[-1]
    _keep(folder / "tuning", lambda: _tuning(_restored(_load(base), scale), scale, 1e-5))
    _keep(folder / "frozen", lambda: _frozen_tuning(_load(base), scale))
    _keep(folder / "adapters", lambda: _adapters(_load(base), scale))
    _keep(folder / "digits", lambda: _digits(scale))
    _keep(folder / "frozen-digits", lambda: _frozen_digits(scale))
    _keep(folder / "encoder", lambda: _encoder(scale))


HISTORIES = (
    "Adam states",
    "bf16 fine-tune",
    "bf16 pretraining",
    "fp32 CNN",
    "fp32 encoder",
    "bf16 encoder",
    "frozen backbone",
    "adapters",
)


def histories(data: Path, *, is_smoke: bool = False) -> list[History]:
    """Return all histories, in the order of `HISTORIES`.

    Histories missing in the folder are trained first, in a few minutes.
    """
    scale = SMOKE if is_smoke else FULL
    folder = data / f"{scale.name}-{RECIPE}"
    _trained(folder, scale)

    def runs(*names: str) -> tuple[tuple[str, int, Path], ...]:
        return tuple((name, step, path) for name in names for step, path in enumerate(_files(folder / name)))

    pretraining, tuning = runs("pretraining"), runs("tuning")
    whole: Callable[[State], State] = lambda state: state  # noqa: E731
    rounded: Callable[[State], State] = lambda state: as_bfloat16(weights_of(state))  # noqa: E731
    of_name: dict[str, tuple[Sequence[tuple[str, int, Path]], Callable[[State], State]]] = {
        "Adam states": ((*pretraining, *tuning, *runs("frozen")), whole),
        "bf16 fine-tune": ((pretraining[-1], *tuning), rounded),
        "bf16 pretraining": (pretraining, rounded),
        "fp32 CNN": (runs("digits"), weights_of),
        "fp32 encoder": (runs("encoder"), weights_of),
        "bf16 encoder": (runs("encoder"), rounded),
        "frozen backbone": (runs("frozen-digits"), weights_of),
        "adapters": ((pretraining[-1], *runs("adapters")), weights_of),
    }
    return [History(name, tuple(of_name[name][0]), of_name[name][1]) for name in HISTORIES]


def _keep(folder: Path, train: Callable[[], Iterator[State]]) -> None:
    """Train and keep the states as files, unless already done; the folder appears once all are there."""
    if folder.exists():
        return
    n_threads = torch.get_num_threads()
    torch.set_num_threads(N_THREADS)
    torch.manual_seed(0)
    staging = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for number, state in enumerate(train()):
        save_file(
            {name: torch.from_numpy(array) for name, array in state.items()}, staging / f"{number:03}.safetensors"
        )
    staging.rename(folder)
    torch.set_num_threads(n_threads)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _load(path: Path) -> State:
    # A clone: mapped tensors would be read from disk during others' timings.
    return {name: tensor.clone().numpy() for name, tensor in load_file(path).items()}


def trained_weights(data: Path, *, is_smoke: bool) -> State:
    """Return the weights of the pretrained transformer in fp32; train it if missing."""
    scale = SMOKE if is_smoke else FULL
    folder = data / f"{scale.name}-{RECIPE}" / "pretraining"
    _keep(folder, lambda: _pretraining(scale))
    return weights_of(_load(_files(folder)[-1]))
