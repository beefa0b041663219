"""Random generators of Python, numpy and torch: their states as plain values and arrays, and back without a pickle."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

PYTHON, NUMPY, LEGACY, TORCH = "random", "numpy", "numpy legacy", "torch"
_BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a generator goes on with."""

    kind: str
    """Which generator: one of the words above."""
    engine: str | None
    """Name of numpy's bit generator, or the device of torch's."""
    state: Any
    """Plain values and arrays."""
    seeds: dict[str, Any] | None
    """What numpy's bit generator was seeded with, which it spawns others from."""


def state_of(generator: Any) -> State | None:
    """Return the state of a generator, None if it is none or one that cannot be made anew from its state."""
    kind = type(generator)
    if kind is random.Random:
        return State(kind=PYTHON, engine=None, state=generator.getstate(), seeds=None)
    if kind is np.random.Generator or kind is np.random.RandomState:
        bits = generator.bit_generator if kind is np.random.Generator else generator._bit_generator
        seeds = bits.seed_seq
        if type(bits) not in _engines().values() or type(seeds) not in (np.random.SeedSequence, type(None)):
            return None
        state = bits.state if kind is np.random.Generator else generator.get_state(legacy=False)
        return State(
            kind=NUMPY if kind is np.random.Generator else LEGACY,
            engine=type(bits).__name__,
            state=state,
            seeds=None if seeds is None else seeds.state,
        )
    torch = sys.modules.get("torch")
    if torch is not None and kind is torch.Generator:
        return State(kind=TORCH, engine=str(generator.device), state=generator.get_state().numpy(), seeds=None)
    return None


def made(state: State) -> Any:
    """Make a generator.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: Nothing has such a state, or the device is not here.
    """
    if state.kind == PYTHON:
        generator: Any = random.Random()
    elif state.kind == TORCH:
        import torch

        generator = torch.Generator(state.engine)
    else:
        bits: Any = _engines()[state.engine]()
        generator = {NUMPY: np.random.Generator, LEGACY: np.random.RandomState}[state.kind](bits)
    set_state(generator, state)
    return generator


def is_like(generator: Any, state: State) -> bool:
    """Tell whether a generator can be given a state."""
    own = state_of(generator)
    return own is not None and (own.kind, own.engine) == (state.kind, state.engine)


def set_state(generator: Any, state: State) -> None:
    """Give a generator a state."""
    if state.kind == PYTHON:
        generator.setstate(state.state)
    elif state.kind == TORCH:
        import torch

        generator.set_state(torch.from_numpy(np.array(state.state)))
    else:
        bits = generator.bit_generator if state.kind == NUMPY else generator._bit_generator
        own = state.state if state.kind == NUMPY else {name: state.state[name] for name in ("bit_generator", "state")}
        bits.__setstate__((own, None if state.seeds is None else np.random.SeedSequence(**state.seeds)))
        if state.kind == LEGACY:
            generator.set_state(state.state)


def _engines() -> dict[str | None, Any]:
    return {name: getattr(np.random, name) for name in _BITS}
