"""Objects that could not be loaded again are refused at the save, with an error of ours."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import FunctionTransformer
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorcas_flavors.generic import GenericAdapter
from tensorcas_mlflow.adapter import adapter_for, take_apart
from tensorcas_mlflow.errors import AdapterError
from tensorcas_mlflow.tensorcas_store import TensorCasStore


class NeedsMore:
    """Pickles, and asks for an argument that its pickle does not have."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        return NeedsMore, ()


class Liar:
    """Comes back as something else."""

    def __reduce__(self) -> Any:
        return dict, ()


class Proxy:
    """Says that it is a dict, as TensorFlow's containers and wrapt's proxies do."""

    def __init__(self) -> None:
        self.weights = np.ones(3)

    @property
    def __class__(self) -> Any:
        return dict

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Proxy, ()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def holding(part: Any) -> Net:
    net = Net()
    net.part = part
    return net


def exported() -> Any:
    return torch.export.export(Net(), (torch.ones(2, 3),))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def under_way() -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def total(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.sum()

    torch.func.grad(total)(torch.ones(3))
    return seen[0]


REFUSED: dict[str, Callable[[], Any]] = {
    "exported program": exported,
    "exported program in a dict": lambda: {"program": exported(), "w": np.ones(3)},
    "exported program beside a tensor": lambda: {"program": exported(), "w": torch.ones(3)},
    "script": lambda: torch.jit.script(Net()),
    "needs more": lambda: NeedsMore(3),
    "needs more, in a module": lambda: holding(NeedsMore(3)),
    "needs more, in an estimator": lambda: FunctionTransformer(kw_args={"a": NeedsMore(3)}).fit(np.ones((2, 2))),
    "liar": Liar,
    "liar in a list": lambda: [np.ones(3), Liar()],
    "storage": lambda: {"s": torch.ones(3).untyped_storage()},
    "lock": lambda: {"l": threading.Lock()},
    "generator": lambda: {"g": (i for i in range(3))},
    "open file": lambda: {"f": Path(__file__).open(encoding="utf-8")},  # noqa: SIM115
    "weak reference": lambda: {"r": weakref.ref(Net())},
    "memory": lambda: {"m": memoryview(b"abc")},
    "zero tensor": lambda: {"t": torch._efficientzerotensor(3)},  # type: ignore[attr-defined]
    "zero tensor of a module": lambda: holding(torch._efficientzerotensor(3)),  # type: ignore[attr-defined]
    "functional tensor": lambda: {"t": torch._to_functional_tensor(torch.ones(3))},
    "tensor of a transformation": lambda: {"t": under_way()},
    "fake tensor": lambda: {"t": fake()},
    "meta tensor": lambda: {"t": torch.ones(3, device="meta")},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_an_object_that_cannot_be_loaded_is_refused_at_the_save(kind: str, tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, "run")
    made = REFUSED[kind]()

    for _ in range(2):
        with pytest.raises(AdapterError):
            store.save(made, step=1)
    assert store.list_checkpoints() == []


def test_a_refused_save_names_the_object_the_reason_and_a_remedy() -> None:
    with pytest.raises(AdapterError) as refused:
        GenericAdapter().extract({"a": NeedsMore(3)})

    message = str(refused.value)
    assert "a dict can be pickled but not loaded again" in message
    assert "missing 1 required positional argument: 'n'" in message
    assert "store what it is made from" in message


def test_a_class_that_came_back_once_is_not_loaded_again() -> None:
    model = Counted()

    GenericAdapter().extract(model)
    assert len(Counted.loads) == 1
    GenericAdapter().extract([model, Counted()])

    assert len(Counted.loads) == 1


class Counted:
    loads: list[int] = []  # noqa: RUF012

    def __setstate__(self, state: Any) -> None:
        self.loads.append(1)

    def __getstate__(self) -> Any:
        return {"n": 1}


def test_an_object_with_a_forged_class_is_stored_as_its_real_class() -> None:
    model = {"config": Proxy(), "w": np.ones(3)}

    adapter = adapter_for(model)
    rows = adapter.extract(model)

    assert adapter.name == "generic"
    assert "config.weights" not in rows  # its own pickle does not have them
    assert type(adapter.reconstruct({name: np.array(row) for name, row in rows.items()})["config"]) is Proxy


def test_any_exception_of_an_adapter_becomes_an_adapter_error() -> None:
    class Broken(GenericAdapter):
        def extract(self, model: Any) -> Any:
            raise TypeError("descriptor 'items' for 'dict' objects doesn't apply")

    with pytest.raises(AdapterError, match="generic: a Ridge cannot be taken apart: TypeError: descriptor 'items'"):
        take_apart(Broken(), Ridge())
