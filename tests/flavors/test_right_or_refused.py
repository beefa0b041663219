"""Everything saved comes back into a live object that was trained otherwise, or the object is unchanged."""

from __future__ import annotations

import datetime
import decimal
import enum
import random
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import statsmodels.api as sm
import torch
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tensorcas_flavors.generic import GenericAdapter
from tensorcas_mlflow.adapter import Adapter, Array, adapter_for
from tensorcas_mlflow.errors import AdapterError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 4))
NOISE = RNG.normal(size=(3, 200))


def y(n: int) -> Array:
    target: Array = X @ np.arange(1, 5) * n + NOISE[n]
    return target


class Own:
    def __init__(self, n: int) -> None:
        self.weights = np.full(3, n)
        self.n = n
        self.name = f"n{n}"
        self.inner = types.SimpleNamespace(a=n, b=np.full(40, n))


class Slots:
    __slots__ = ("n", "unset", "weights")

    def __init__(self, n: int) -> None:
        self.weights, self.n = np.full(3, n), n


class OwnState:
    """Keeps something that it does not pickle and that follows from what it does."""

    def __init__(self, n: int) -> None:
        self.weights, self.n, self.cache = np.full(3, n), 5, n * 10

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": self.weights, "n": self.n}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, cache=int(state["weights"][0]) * 10)


@dataclass
class Plain:
    weights: Array
    n: int


@dataclass(frozen=True)
class Frozen:
    weights: Array
    n: int


@dataclass(slots=True)
class Slotted:
    weights: Array
    n: int


class Hashed:
    def __init__(self, n: int) -> None:
        self.n = n

    def __hash__(self) -> int:
        return hash(self.n)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and self.n == other.n


class Words(list[Any]):
    pass


class Table(dict[str, Any]):
    pass


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


Pair = namedtuple("Pair", "weights n")


def objects(n: int) -> Array:
    array = np.empty(3, dtype=object)
    array[0], array[1], array[2] = np.full(3, n), n, f"n{n}"
    return array


def recursive(n: int) -> Any:
    ring: list[Any] = [n, np.full(3, n)]
    ring.append(ring)
    return ring


def shared(part: Any) -> Any:
    return {"one": part, "other": [part]}


def module(n: int) -> Any:
    torch.manual_seed(n)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


class Attributes(torch.nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.linear = module(n)
        self.scale, self.parts = torch.full((3,), float(n)), [torch.full((2,), float(n))]
        self.register_buffer("buffer", torch.full((2,), float(n)), persistent=False)


def training(n: int) -> Any:
    net = module(n)
    optimizer = torch.optim.Adam(net.parameters(), lr=n / 10)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"net": net, "optimizer": optimizer, "epoch": n, "best": None if n == 1 else 0.5, "note": f"n{n}"}


class Net(torch.nn.Module):
    """Has all that a module may hold besides its parameters; what ``n`` decides differs."""

    def __init__(self, n: int, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(n)
        self.layer = torch.nn.Linear(3, 2)
        self.layer.weight.note = f"n{n}"
        self.drop = torch.nn.Dropout(n / 10)
        self.register_buffer("seen", torch.full((2,), float(n)), persistent=False)
        self.table, self.array, self.k, self.history = torch.full((3,), float(n)), np.full(3, n), n, [n] * n
        self.nest = {"a": [torch.full((2,), n)], "b": (n, "x" * n)}
        self.act, self.scaled, self.kind = torch.relu, partial(torch.clamp, min=0), torch.nn.Linear
        self.config = types.SimpleNamespace(width=n, kept=torch.full((2,), n), dtype=torch.float32)
        self.when, self.folder, self.rng = datetime.date(2020, 1, n), Path(f"/n{n}"), np.random.default_rng(n)
        self.double = lambda x: x * 2
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.act(self.layer(self.drop(x)))


class Loop:
    """Object of a user that holds a training, without a state dict."""

    def __init__(self, n: int) -> None:
        self.net = module(n)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=n)
        self.epoch, self.queue = n, deque([torch.full((2,), n)])


@dataclass
class Config:
    lr: float
    sizes: list[int]


def with_net(make: Callable[[int], Any], **more: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda n: {"net": module(n), "it": make(n)} | {name: of(n) for name, of in more.items()}


def grown(n: int) -> Any:
    """Model 1 has trained, model 2 is new, and has attributes that only training makes."""
    net = Net(3)
    if n == 1:
        net.last, net.cache = torch.full((4,), 1.0), {"k": torch.ones(2)}  # type: ignore[assignment]
        net.table = torch.full((9,), 1.0)
        net.nest = {"a": [torch.full((2,), 1)] * 3, "c": (1,)}
    return net


def whole(n: int) -> Any:
    net = Net(n)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**n)
    if n == 1:  # the other is as a loop makes it before it goes on
        for _ in range(3):
            scaler.scale(net(torch.ones(2, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            net.zero_grad()
    return {
        "net": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "epoch": n,
        "history": [{"loss": 1 / n, "lr": 0.1}] * n,
        "best": None if n == 2 else 0.5,
        "config": Config(0.1 * n, [n]),
        "args": types.SimpleNamespace(lr=n, name=f"n{n}"),
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.default_rng(n), "python": random.Random(n)},
        "generator": torch.Generator().manual_seed(n),
    }


TORCH_FILLED: dict[str, Callable[[int], Any]] = {
    "module with attributes": Net,
    "module in another mode": lambda n: Net(n).train(n == 1),
    "module whose attributes grew": grown,
    "a whole training": whole,
    "its state dicts": lambda n: {
        name: part.state_dict() if hasattr(part, "state_dict") else part
        for name, part in whole(n).items()
        if name not in ("config", "args")
    },
    "trainer without a state dict": with_net(Loop),
    "module in a list in an attribute": lambda n: Net(n, inner=[module(n)]),
    "module that knows its optimizer": lambda n: Net(n, optimizer=torch.optim.SGD([torch.ones(n)], lr=n / 8)),
    "named tuple beside a module": with_net(lambda n: Pair(torch.full((2,), n), n)),
    "numbers beside a named tuple": with_net(lambda n: [n, Pair(n, "x" * n), {"a": n}]),
    "deques beside a module": with_net(lambda n: [deque([n] * n, 9), deque([torch.full((2,), n)])]),
    "deque of named tuples": with_net(lambda n: deque([Pair(torch.full((2,), n), n)] * 2)),
    "dates and paths": with_net(
        lambda n: [datetime.datetime(2020, 1, n), Path(f"/n{n}"), decimal.Decimal(n), datetime.timedelta(n)]
    ),
    "random generators": with_net(
        lambda n: [
            np.random.default_rng(n),
            np.random.RandomState(n),
            random.Random(n),
            torch.Generator().manual_seed(n),
            np.random.Generator(np.random.Philox(n)),
        ]
    ),
    "generator in an object": with_net(lambda n: types.SimpleNamespace(rng=np.random.default_rng(n), n=n)),
    "dataclass beside a module": with_net(lambda n: Config(n / 8, [n])),
    "own object beside a module": with_net(Own),
    "array of objects beside a module": with_net(objects),
    "dict of one's own": with_net(lambda n: Table(a=n, w=torch.full((2,), n))),
    "tensor with attributes": lambda n: {"t": noted(torch.full((2,), n), n), "u": [noted(torch.ones(2), n)]},
    "partial with a module": with_net(lambda n: types.SimpleNamespace(call=module(n).forward, n=n)),
    "state dict with attributes": lambda n: {"s": module(n).state_dict(), "t": OrderedDict(a=n)},
}
TORCH_REFUSED: dict[str, Callable[[int], Any]] = {
    "enum": with_net(Phase),
    "uuid": with_net(lambda n: uuid.UUID(int=n)),
    "frozen dataclass": with_net(lambda n: Frozen(np.ones(3), n)),
    "object of another class": with_net(lambda n: Words([n]) if n == 1 else Table(a=n)),
    "own state": with_net(OwnState),
    "class": with_net(lambda n: torch.nn.Linear if n == 1 else torch.nn.Conv1d),
    "nothing for a named tuple": with_net(lambda n: Pair(1, 1) if n == 1 else None),
    "another named tuple": with_net(lambda n: Pair(1, 1) if n == 1 else namedtuple("Other", "a b")(1, 1)),
    "nothing for a dataclass": with_net(lambda n: [Config(1, [])] if n == 1 else []),
    "nothing for a module": with_net(lambda n: module(n) if n == 1 else 3),
    "function in a module": lambda n: Net(1, f=torch.relu if n == 1 else torch.sigmoid),
    "lambda in a module": lambda n: Net(1, f=(lambda x: x + 1) if n == 1 else (lambda x: x + 2)),
    "closure in a module": lambda n: Net(1, f=lambda x: x + n),
    "partial in a module": lambda n: Net(1, f=partial(torch.clamp, min=n)),
    "another layer without tensors": lambda n: torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.ReLU() if n == 1 else torch.nn.LeakyReLU()
    ),
    "a layer more": lambda n: torch.nn.Sequential(torch.nn.Linear(2, 2), *[torch.nn.ReLU()] * n),
    "a layer less": lambda n: torch.nn.Sequential(torch.nn.Linear(2, 2), *[torch.nn.ReLU()] * (3 - n)),
    "another optimizer": lambda n: {"o": (torch.optim.SGD if n == 1 else torch.optim.Adam)([torch.ones(2)])},
    "another scheduler": lambda n: {
        "s": (torch.optim.lr_scheduler.StepLR if n == 1 else torch.optim.lr_scheduler.CosineAnnealingLR)(
            torch.optim.SGD([torch.ones(2)]), 5
        )
    },
    "state of another optimizer": lambda n: {
        "o": torch.optim.SGD([torch.ones(2)]).state_dict() if n == 1 else torch.optim.Adam([torch.ones(2)])
    },
    "one tensor for two": lambda n: {"a": (t := torch.full((3,), n)), "b": t if n == 2 else torch.zeros(3)},
    "one array for two": lambda n: {
        "a": (t := np.full(3, n)),
        "b": t if n == 2 else np.zeros(3, t.dtype),
        "t": torch.ones(1),
    },
    "tensor and array of one memory": lambda n: {
        "a": (t := torch.full((3,), n)),
        "b": t.numpy() if n == 2 else np.zeros(3, "i8"),
    },
    "tensors that overlap": lambda n: {"a": (t := torch.full((6,), n))[:4], "b": t[2:] if n == 2 else torch.zeros(4)},
    "tied weights for untied ones": lambda n: tied(n == 2),
    "one module for two": lambda n: {"a": (m := module(n)), "b": m if n == 2 else module(3)},
    "one list for two": lambda n: {"net": module(n), "a": (m := [n]), "b": m if n == 2 else [3]},
    "one generator for two": with_net(lambda n: [(m := random.Random(n)), m if n == 2 else random.Random(7)]),
    "one module for two states": lambda n: (
        {"a": (m := module(n)), "b": m} if n == 2 else {"a": module(3).state_dict(), "b": module(4).state_dict()}
    ),
}


def noted(tensor: torch.Tensor, n: int) -> torch.Tensor:
    tensor.note, tensor.more = f"n{n}", {"a": n}
    return tensor


def tied(is_tied: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    if is_tied:
        net[1].weight = net[0].weight
    return net


FILLED: dict[str, Callable[[int], Any]] = {
    "what a training keeps": lambda n: {"w": np.full((16, 16), n), "b": np.full(8, n), "epoch": n, "lr": n / 7},
    "values": lambda n: {
        "none": None if n == 1 else n,
        "bool": n == 1,
        "text": "x" * n,
        "bytes": b"\0" * n,
        "complex": complex(n, -0.0),
        "large": 10**30 * n,
        "special": [float("nan"), float("-inf"), -0.0][n],
        "odd": "\ud800" * n,
        "time": datetime.datetime(2020, 1, n),
        "day": datetime.date(2020, 1, n),
        "span": datetime.timedelta(n),
        "decimal": decimal.Decimal(n) / 3,
        "array": bytearray([n, n]),
    },
    "scalars": lambda n: {
        "a": np.float32(n),
        "b": np.int64(n),
        "c": np.datetime64(n, "s"),
        "d": np.str_(n),
        "w": np.ones(3),
    },
    "a history that grows": lambda n: {
        "w": np.full(3, n),
        "losses": [0.5] * n,
        "best": {f"epoch {i}": i for i in range(n)},
    },
    "nested": lambda n: {"a": [{"b": [n, (n, "x" * n)], "w": np.full(2, n)}, {"c": {n}}]},
    "own class": Own,
    "dataclass": lambda n: Plain(np.full(3, n), n),
    "dataclass with slots": lambda n: Slotted(np.full(3, n), n),
    "slots": Slots,
    "array of a frozen dataclass": lambda n: Frozen(np.full(3, n), 5),
    "named tuple": lambda n: {"p": Pair(np.full(3, n), n), "q": [Pair(Pair(n, (n, np.full(2, n))), n)]},
    "array of a shared named tuple": lambda n: shared(Pair(np.full(3, n), 5)),
    "random state of numpy": lambda n: {"w": np.full(3, n), "r": np.random.RandomState(n).get_state()},
    "random state of Python": lambda n: {"w": np.full(3, n), "r": random.Random(n).getstate()},
    "deque": lambda n: {"d": deque([n] * n, maxlen=9), "e": deque([n, np.full(3, n)])},
    "collections": lambda n: {
        "a": OrderedDict(a=n),
        "b": defaultdict(list, {str(n): [n]}),
        "c": OrderedDict(a=np.full(2, n), b=n),
    },
    "list and dict of one's own": lambda n: [Words([n, np.full(3, n)]), Table(a=n, w=np.full(3, n))],
    "sets": lambda n: {"s": {n, f"n{n}"}, "f": frozenset([n])},
    "tuples": lambda n: {"t": (n, (n, "a")), "u": (np.full(3, n), [n], 5)},
    "array of objects": lambda n: {"o": objects(n)},
    "an object key": lambda n: {Hashed(3): n},
    "shared list": lambda n: shared([n, n]),
    "shared dict": lambda n: shared({"n": n, "w": np.full(2, n)}),
    "recursive": recursive,
    "many small arrays": lambda n: {f"b{i}": np.full(2, n + i) for i in range(300)},
    "no array": lambda n: {"epoch": n},
    "masked array": lambda n: {"k": np.ma.masked_array([n, 2, 3], [0, 1, 0])},
    "matrix": lambda n: {"k": np.asmatrix(np.eye(3) * n)},
    "sparse matrix": lambda n: {"k": scipy.sparse.csr_matrix(np.eye(3) * n)},
    "module": module,
    "training state": training,
    "object beside a tensor": lambda n: {
        "t": torch.full((2,), float(n)),
        "o": types.SimpleNamespace(n=n, t=torch.ones(2)),
    },
    "state dict": lambda n: {"model": module(n).state_dict(), "epoch": n},
    "ridge": lambda n: Ridge().fit(X, y(n)),
    "pipeline": lambda n: make_pipeline(StandardScaler(), Ridge()).fit(X * n, y(n)),
    "forest": lambda n: RandomForestRegressor(5, random_state=0).fit(X, y(n)),
    "xgboost": lambda n: xgboost.XGBRegressor(n_estimators=3, max_depth=2, n_jobs=1).fit(X, y(n)),
}


def make_catboost(n: int) -> Any:
    import catboost  # `make venv-all` installs it, for long tests

    model = catboost.CatBoostRegressor(iterations=3, verbose=0, thread_count=1, allow_writing_files=False)
    return model.fit(X, y(n))


REFUSED: dict[str, Callable[[int], Any]] = {
    "own state": OwnState,
    "frozen dataclass": lambda n: {"p": Frozen(np.ones(3), n)},
    "shared named tuple": lambda n: shared(Pair(np.ones(3), n)),
    "shared tuple": lambda n: shared((np.ones(3), n)),
    "tuple": lambda n: (np.ones(3), n),
    "time zone": lambda n: {"t": datetime.datetime(2020, 1, n, tzinfo=datetime.UTC)},
    "enum": lambda n: {"e": Phase(n)},
    "uuid": lambda n: {"u": uuid.UUID(int=n)},
    "path": lambda n: {"p": Path(f"/n{n}")},
    "counter": lambda n: {"c": Counter("a" * n)},
    "hashed": lambda n: {"h": Hashed(n)},
    "key": lambda n: {"w": np.ones(3), f"n{n}": 3},
    "order of keys": lambda n: {key: np.full(2, n) for key in ("ab" if n == 1 else "ba")},
    "function": lambda n: {"f": (lambda x: x + 1) if n == 1 else (lambda x: x + 2), "w": np.ones(3)},
    "closure": lambda n: {"f": lambda x: x + n, "w": np.ones(3)},
    "partial": lambda n: {"f": partial(print, n)},
    "one list or two": lambda n: {"a": (same := [np.ones(3)]), "b": same if n == 1 else [same[0]]},
    "series": lambda n: {"s": pd.Series([n, 2, 3])},
    "table": lambda n: {"s": pd.DataFrame({"a": [1, 2], "b": ["x", f"y{n}"]})},
    "time stamp": lambda n: {"s": pd.Timestamp(2020, 1, n)},
    "generator": lambda n: {"g": np.random.default_rng(n)},
    "random state": lambda n: {"g": np.random.RandomState(n)},
    "random": lambda n: {"g": random.Random(n)},
    "tensor": lambda n: types.SimpleNamespace(t=torch.full((3,), float(n))),
    "long text": lambda n: {"t": f"n{n}" * 3000},
    "estimator in a dict": lambda n: {"m": Ridge().fit(X, y(n))},
    "lightgbm": lambda n: lightgbm.train({"verbose": -1, "num_threads": 1}, lightgbm.Dataset(X, y(n)), 3),
    "catboost": make_catboost,
    "statsmodels": lambda n: sm.OLS(y(n), X).fit(),
}


ALL = FILLED | REFUSED | {f"torch: {name}": make for name, make in (TORCH_FILLED | TORCH_REFUSED).items()}


def stored(adapter: Adapter, model: Any) -> dict[str, Array]:
    """The rows of a model as a store gives them back."""
    return {name: np.array(row, order="C") for name, row in adapter.extract(model).items()}


def described(part: Any, met: dict[int, tuple[int, Any]] | None = None) -> Any:  # noqa: C901, PLR0912  # by kind
    """Say all of an object without pickling it, numbering what can be told from its copies."""
    met = {} if met is None else met
    kind = type(part)
    if hasattr(part, "predict"):
        return kind, np.asarray(part.predict(X)).tobytes()
    if isinstance(part, list | dict | set | bytearray | deque | np.ndarray):
        if id(part) in met:
            return met[id(part)][0]
        met[id(part)] = len(met), part  # so that no identity is met twice
    if isinstance(part, torch.nn.Module):
        own = torch.nn.Module().__dict__.keys()
        attributes = {
            path: {name: described(value, met) for name, value in sorted(vars(each).items()) if name not in own}
            for path, each in part.named_modules()
        }
        tensors = {name: described(each, met) for name, each in [*part.named_parameters(), *part.named_buffers()]}
        return kind, tensors, attributes
    if callable(getattr(kind, "state_dict", None)):
        return kind, described(part.state_dict(), met)
    if isinstance(part, torch.Tensor):
        return kind, part.dtype, part.tolist(), described(dict(vars(part)), met)
    if isinstance(part, torch.Generator):
        return part.get_state().tolist()
    if isinstance(part, torch.dtype | torch.device | type | types.BuiltinFunctionType):
        return repr(part)
    if isinstance(part, types.MethodType):
        return part.__name__, described(part.__self__, met)
    if isinstance(part, np.ma.MaskedArray | pd.Series | pd.DataFrame):
        return kind, str(part)
    if isinstance(part, np.ndarray):
        elements = [described(each, met) for each in part.flat] if part.dtype == object else part.tobytes()
        return kind, part.dtype, part.shape, elements
    if isinstance(part, np.random.Generator | np.random.RandomState):
        state = part.bit_generator.state if isinstance(part, np.random.Generator) else part.get_state(legacy=False)
        return kind, described(state, met)
    if isinstance(part, random.Random):
        return part.getstate()
    if isinstance(part, torch.Generator):
        return part.get_state().tolist()
    if isinstance(part, types.FunctionType):
        return part.__code__.co_consts, [cell.cell_contents for cell in part.__closure__ or ()]
    if isinstance(part, dict):
        items: Any = [(described(key, met), described(value, met)) for key, value in part.items()]
    elif isinstance(part, list | tuple | deque):
        items = [described(each, met) for each in part], getattr(part, "maxlen", None)
    elif isinstance(part, set | frozenset):
        items = sorted(map(repr, part))
    elif isinstance(part, enum.Enum | uuid.UUID | Path | datetime.datetime | partial):
        items = repr(part)
    else:
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if hasattr(part, name)]
        items = [described(getattr(part, name), met) for name in slots] or (
            "" if hasattr(part, "__dict__") else repr(part)
        )
    return kind, items, described(vars(part), met) if hasattr(part, "__dict__") and items != repr(part) else None


@pytest.mark.parametrize("kind", [*FILLED, *(f"torch: {name}" for name in TORCH_FILLED)])
def test_everything_saved_comes_back_into_an_object_trained_otherwise(kind: str) -> None:
    make = ALL[kind]
    model, live = make(1), make(2)
    adapter = adapter_for(model)

    filled = adapter.reconstruct(stored(adapter, model), live)

    assert filled is live
    assert described(live) == described(model)
    assert adapter.extract(live).keys() == adapter.extract(model).keys()


@pytest.mark.parametrize(
    "kind",
    [
        *(name for name in REFUSED if name != "catboost"),
        *(f"torch: {name}" for name in TORCH_REFUSED),
        pytest.param("catboost", marks=pytest.mark.long),
    ],
)
def test_a_fill_that_cannot_restore_everything_is_refused_and_changes_nothing(kind: str) -> None:
    make = ALL[kind]
    model, live = make(1), make(2)
    adapter = adapter_for(model)
    before = described(live)

    with pytest.raises(AdapterError, match="without into="):
        adapter.reconstruct(stored(adapter, model), live)
    assert described(live) == before


# Two equal models of these two pickle differently: addresses and times are in it.
@pytest.mark.parametrize("kind", sorted(ALL.keys() - {"tensor", "catboost"}))
def test_an_equal_object_is_filled_whatever_its_content(kind: str) -> None:
    make = ALL[kind]
    model, live = make(1), make(1)
    adapter = adapter_for(model)

    assert adapter.reconstruct(stored(adapter, model), live) is live
    assert described(live) == described(model)


ADAPTER = GenericAdapter()
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.complex_numbers()
    | st.datetimes()
    | st.builds(np.float32, st.floats(width=32))
)
ARRAYS = st.builds(np.full, st.sampled_from([(), 2, (40, 2)]), st.integers(0, 3), st.sampled_from(["f4", "i8"]))
KEYS = st.sampled_from(["a", "b", 1, 1.5, (1, "a"), None, True])


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda parts: (
            st.lists(parts, max_size=3)
            | st.dictionaries(KEYS, parts, max_size=3)
            | st.tuples(parts, parts)
            | st.builds(deque, st.lists(parts, max_size=3))
            | st.builds(OrderedDict, st.dictionaries(KEYS, parts, max_size=2))
            | st.builds(types.SimpleNamespace, a=parts, b=parts)
            | st.builds(Frozen, parts, parts)
            | st.builds(Pair, parts, parts)
            | st.builds(shared, parts)
        ),
        max_leaves=12,
    )


def other_leaves(part: Any, draw: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    """Make an object like another, with some of its arrays and values otherwise and what is shared shared."""
    if id(part) in made and isinstance(part, list | dict | deque | np.ndarray | types.SimpleNamespace | Frozen):
        return made[id(part)]
    if isinstance(part, np.ndarray):
        again: Any = draw(st.sampled_from([part.copy(), part + 1]))
    elif isinstance(part, types.SimpleNamespace | Frozen):
        again = type(part)(**{name: other_leaves(held, draw, made) for name, held in vars(part).items()})
    elif isinstance(part, Pair):
        again = Pair(*(other_leaves(held, draw, made) for held in part))
    elif isinstance(part, dict):
        again = type(part)((key, other_leaves(held, draw, made)) for key, held in part.items())
    elif isinstance(part, list | tuple | deque):
        again = type(part)(other_leaves(held, draw, made) for held in part)
    else:
        again = draw(st.just(part) | VALUES)
    made[id(part)] = again
    return again


def check_nests(data: st.DataObject) -> None:
    model = data.draw(nested(VALUES | ARRAYS).filter(GenericAdapter.accepts))
    is_alike = data.draw(st.booleans())
    live = (
        other_leaves(model, data.draw, {})
        if is_alike
        else data.draw(nested(VALUES | ARRAYS).filter(GenericAdapter.accepts))
    )
    before = described(live)

    filled = None
    with suppress(AdapterError):
        filled = ADAPTER.reconstruct(stored(ADAPTER, model), live)

    assert filled is live or filled is None
    assert described(live) == (before if filled is None else described(model))


@pytest.mark.long
@settings(max_examples=60)
@given(st.data())
def test_nests_of_arrays_and_values_come_back_or_are_unchanged(data: st.DataObject) -> None:
    check_nests(data)


@pytest.mark.long
@settings(max_examples=1000)
@given(st.data())
def test_many_nests_of_arrays_and_values_come_back_or_are_unchanged(data: st.DataObject) -> None:
    check_nests(data)
