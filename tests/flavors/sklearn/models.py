"""Every estimator of scikit-learn, fitted, and a description of a fitted estimator as text to compare.

`run` is for two processes: ``save`` fits and stores estimators, ``load`` restores them; each writes a record.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.frozen import FrozenEstimator
from sklearn.utils import all_estimators, get_tags
from sklearn.utils._test_common.instance_generator import SKIPPED_ESTIMATORS, _construct_instances
from sklearn.utils.estimator_checks import _enforce_estimator_tags_X, _enforce_estimator_tags_y, set_random_state

from tensorcas_flavors.sklearn import SklearnAdapter
from tensorcas_mlflow.errors import AdapterError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

ADAPTER = SklearnAdapter()
METHODS = (
    "predict",
    "predict_proba",
    "predict_log_proba",
    "decision_function",
    "transform",
    "score_samples",
    "apply",
    "decision_path",
    "kneighbors",
    "radius_neighbors",
    "kneighbors_graph",
    "mahalanobis",
    "staged_predict",
    "inverse_transform",
    "get_feature_names_out",
)
_TEXTS = ["the cat sat", "on the mat", "a dog and a cat", "the end of the dog"]
_RECORDS = [{"colour": "red", "size": 2.0}, {"colour": "blue", "size": 3.0}, {"weight": 1.5}]
_OF_LABELS = ("LabelBinarizer", "LabelEncoder", "MultiLabelBinarizer")
_LABELS = ["one", "two", "three", "two"]

Facts = dict[str, str]
Seen = dict[str, dict[str, Facts]]
Fit = Callable[[int], tuple[Any, Any]]


def names() -> list[str]:
    """Name every instance there is to test: the classes of scikit-learn, numbered where it tests several settings."""
    return [f"{cls}-{i}" for cls, kind in all_estimators() for i in range(len(_instances(kind)))]


def fit(name: str, seed: int = 0) -> tuple[Any, Any]:
    """Return an estimator of `names`, fitted, and data to ask it about; another seed gives other data of that kind."""
    cls, _, number = name.rpartition("-")
    model = clone(_instances(dict(all_estimators())[cls])[int(number)])
    set_random_state(model, 0)
    x, y = _data(model, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (model.fit(y), y) if cls in _OF_LABELS else (model.fit(x, y), x)


def _instances(cls: type) -> list[Any]:
    if cls is FrozenEstimator:
        return [FrozenEstimator(fit("LogisticRegression-0")[0])]
    assert cls not in SKIPPED_ESTIMATORS, f"scikit-learn cannot make a {cls.__name__} itself: say here how to"
    return list(_construct_instances(cls))


def _data(model: Any, seed: int) -> tuple[Any, Any]:
    cls = type(model).__name__
    if cls in ("CountVectorizer", "HashingVectorizer", "TfidfVectorizer"):
        return _TEXTS, None
    if cls in ("DictVectorizer", "FeatureHasher"):
        return _RECORDS, None
    if cls == "PatchExtractor":
        return np.random.default_rng(seed).normal(size=(2, 12, 12)), None
    if cls == "MultiLabelBinarizer":
        return None, [(1, 2), (3,), (2, 3)]
    if cls in ("LabelBinarizer", "LabelEncoder"):
        return None, _LABELS
    x, y = make_blobs(n_samples=60, centers=[[0, 0, 0], [3, 3, 3], [-3, 3, 0]], random_state=0)
    random = np.random.default_rng(seed)
    if seed and get_tags(model).input_tags.categorical:
        x = x[random.permutation(len(x))]
    elif seed:
        # Points hardly move: what is fitted differs, and has the same shape wherever it can.
        x = x + 0.05 + 0.001 * random.normal(size=x.shape)
    return _enforce_estimator_tags_X(model, x), _enforce_estimator_tags_y(model, y)


def answers(model: Any, x: Any) -> Facts:
    """Say what a model answers about data, method by method; an error is an answer too."""
    facts = {f"data{path}": text for path, text in describe(x).items()}
    # Some estimators compare with what they were fitted to, and multiply a matrix with itself in another way.
    x = x.copy() if hasattr(x, "copy") else x
    for method in METHODS:
        if not hasattr(model, method):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                argument = model.transform(x) if method == "inverse_transform" else x
                answer = getattr(model, method)(*([] if method == "get_feature_names_out" else [argument]))
                answer = list(answer) if isinstance(answer, types.GeneratorType) else answer
        except Exception as error:  # noqa: BLE001 - whatever it is, it must be the same after loading
            facts[f"{method}: error"] = f"{type(error).__name__}: {error}"
        else:
            facts.update((f"{method}{path}", text) for path, text in describe(answer).items())
    return facts


def differences(one: Any, other: Any) -> list[tuple[str, str | None, str | None]]:
    """Return the paths at which two things differ, and what is there."""
    return differing(describe(one), describe(other))


def differing(one: Facts, other: Facts) -> list[tuple[str, str | None, str | None]]:
    """Return what differs in two descriptions, or two models' answers."""
    return [(key, one.get(key), other.get(key)) for key in sorted(one | other) if one.get(key) != other.get(key)]


def describe(thing: Any) -> Facts:
    """Say all there is to a thing, by path: types, numbers, strings, bits and order of arrays, what is held twice."""
    facts: Facts = {}
    seen: dict[int, tuple[str, Any]] = {}
    pending: list[tuple[str, Any]] = [("", thing)]
    while pending:
        path, part = pending.pop()
        text, children = _look_at(part)
        if children is not None or isinstance(part, np.ndarray):
            if id(part) in seen:
                facts[path] = f"the same as {seen[id(part)][0]}"
                continue
            seen[id(part)] = (path, part)
        facts[path] = text
        pending.extend((f"{path}{step}", child) for step, child in reversed(list(children or ())))
    return facts


def _look_at(part: Any) -> tuple[str, list[tuple[str, Any]] | None]:  # noqa: C901  # one branch a kind
    """Return what one object is, and its parts, or None if it has none."""
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    if part is None or isinstance(part, (bool, int, str, bytes, type, types.BuiltinFunctionType, np.dtype, np.ufunc)):
        return f"{kind} {part!r}", None
    if isinstance(part, np.generic) and not isinstance(part, np.void):
        return f"{kind} {part.tobytes().hex()}", None
    if isinstance(part, float):
        return f"{kind} {part.hex()}", None
    if isinstance(part, types.FunctionType):
        cells = [cell.cell_contents for cell in part.__closure__ or ()]
        return f"{kind} {part.__qualname__} {part.__code__.co_code.hex()}", [(".closure", cells)]
    if isinstance(part, dict):
        keys = [(f"[{key!r}]", value) for key, value in part.items()]
        return f"{kind} of {list(part)!r:.2000}", keys
    if isinstance(part, (list, tuple)):
        return f"{kind} of {len(part)}", [(f"[{i}]", value) for i, value in enumerate(part)]
    if isinstance(part, (set, frozenset)):
        return f"{kind} {sorted(part, key=repr)!r}", None
    if type(part) is np.ndarray and part.dtype != object:
        bits = part
        if part.dtype.names is not None:
            # Padding between fields is whatever was in memory.
            bits = np.array(part.tolist(), dtype=[(name, part.dtype[name]) for name in part.dtype.names])
        order = "F" if part.flags.fnc else "C"
        return f"{part.dtype!r} {part.shape} {order} {blake2b(bits.tobytes()).hexdigest()[:24]}", None
    if type(part) is np.ndarray:
        return f"objects {part.shape}", [(f"[{i}]", value) for i, value in enumerate(part.flat)]
    if isinstance(part, np.ma.MaskedArray):
        # Its fill value is computed when somebody asks for it, and then kept.
        return kind, [(".data", part.data), (".mask", part.mask), (".fill_value", np.asarray(part.fill_value))]
    if isinstance(part, partial):
        # It has a __dict__ once somebody looks for one.
        return kind, [(".func", part.func), (".args", part.args), (".keywords", part.keywords), ("", vars(part))]
    if isinstance(part, np.random.RandomState):
        return kind, [(".state", part.get_state(legacy=False))]
    reduced = part.__reduce_ex__(4)
    if isinstance(reduced, str):
        return f"{kind} {reduced}", None
    return kind, [
        (f".{i}" if i != 2 else "", value) for i, value in enumerate(reduced[:3]) if i or value is not None
    ] + [(f"<{i}>", list(more)) for i, more in enumerate(reduced[3:5]) if more is not None]


def save(folder: Path, models: Mapping[str, Fit]) -> Seen:
    """Fit and store estimators; return what there is to each, and its answers."""
    store = Store.init(folder)
    seen: Seen = {}
    for name, make in models.items():
        try:
            model, x = make(0)
        except Exception as error:  # noqa: BLE001 - the test says which may fail
            seen[name] = {"error": {"": f"{type(error).__name__}: {error}"}}
            continue
        before = describe(model)
        tensors = ADAPTER.extract(model)
        with store.write_checkpoint(tensors, flavor=ADAPTER.name, cuts=ADAPTER.cuts(tensors)) as pending:
            pending.commit(RefTarget(run_id=name, step=0))
        seen[name] = {"facts": before, "saved": describe(model), "answers": answers(model, x)}
    return seen


def load(folder: Path, models: Mapping[str, Fit]) -> Seen:
    """Restore estimators, new and into ones fitted to other data; return what there is to each, and its answers."""
    store = Store.open(folder)
    seen: Seen = {}
    for name, make in models.items():
        ref = store.ref(RefTarget(run_id=name, step=0).key)
        if ref is None:
            continue
        manifest = store.manifest(ref)
        model = ADAPTER.reconstruct(store.read_tensors(manifest))
        seen[name] = {"facts": describe(model)}
        _, x = make(0)
        original, _ = make(1)
        seen[name] |= {"answers": answers(model, x), "other": answers(original, x)}
        try:
            assert ADAPTER.reconstruct(store.read_tensors(manifest), original) is original
        except AdapterError as error:
            seen[name]["refused"] = {"": str(error)}
        seen[name]["filled"] = answers(original, x)
    return seen


def run(action: str, folder: str, models: Mapping[str, Fit] | None = None) -> None:
    """Save or load models, all of scikit-learn's if not given, and write down what was seen."""
    chosen = {name: partial(fit, name) for name in names()} if models is None else models
    seen = {"save": save, "load": load}[action](Path(folder, "store"), chosen)
    Path(folder, f"{action}.pkl").write_bytes(pickle.dumps(seen))


def see(module: str, folder: Path) -> tuple[Seen, Seen]:
    """Call a module's ``run`` in two processes; return what they saw: the one that saved, and the one that loaded."""
    root = Path(__file__).parents[3]
    # The order of sums, and so their last bits, depends on the number of threads.
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    path = os.pathsep.join([str(root), str(root / "flavors"), os.environ.get("PYTHONPATH", "")])
    for action in ("save", "load"):
        program = f"from tests.flavors.sklearn.{module} import run; run({action!r}, {str(folder)!r})"
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(
            command, env={**os.environ, **threads, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    saved, loaded = (pickle.loads((folder / f"{action}.pkl").read_bytes()) for action in ("save", "load"))
    return saved, loaded
