"""Adapter for XGBoost: boosters, and their scikit-learn wrappers, as columns of tree nodes.

In: a booster or wrapper. Out: the model document of ``Booster.save_raw("ubj")``, with the trees as columns (`_trees`).
`XGBoostAdapter.extract` rebuilds the document and compares; a document that does not come back to the byte (of a later
XGBoost, say) is stored whole, as one tensor ``booster``. So XGBoost's own reader always gets the very bytes of
``save_raw``. `_checks` first checks the parts that this reader follows unchecked, at a save and at a load.

The skeleton is UBJSON too, an object of

* ``format``: 1;
* ``document`` and ``layout``: the document without its trees, and how to put them back (absent if stored whole);
* ``config`` and ``version``: ``Booster.save_config()``, the parameters of training, which ``save_raw`` lacks and a
  pickle has, without its copies of the document's content. Only the same version of XGBoost loads it: upstream promises
  stability for models, not for this. ``Booster.update`` needs it, predictions do not;
* ``class``: the name of a class of XGBoost, or "" for a class that is derived from a wrapper elsewhere, whose module
  and name are ``derived`` then;
* ``state``: the attributes of the Python object that are plain values; ``others``: the names of the other attributes
  (callbacks, a callable objective), and ``facts``, if there are others: their `tensorcas_flavors._facts`, from which a
  live model takes plain values;
* ``pickle``, only if it is needed: the others, or, for a derived class, the whole object without its booster.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tensorcas_flavors._facts import REMEDY, Facts, facts_json, facts_of, plan_values, read_tail, with_tail
from tensorcas_flavors._pickling import dump_skeleton, installed_version, load_skeleton
from tensorcas_flavors.xgboost._trees import check_whole, put_trees, take_trees, tree_cuts
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array
from tensorcas_mlflow.base.ubjson import Value, narrowest, parse, write
from tensorcas_mlflow.errors import AdapterError

if TYPE_CHECKING:
    from xgboost import Booster

_logger = logging.getLogger(__name__)
_FORMAT = 1
_RAW = "booster"
_BOOSTER = "xgboost.core.Booster"
_WRAPPER = "xgboost.sklearn.XGBModel"
_CLASSES = {_BOOSTER: "Booster"} | {
    f"xgboost.sklearn.{name}": name
    for name in ("XGBModel", "XGBClassifier", "XGBRegressor", "XGBRanker", "XGBRFClassifier", "XGBRFRegressor")
}
_REPEATED = ("learner_model_param", "gbtree_model_param")


class XGBoostAdapter(Adapter):
    """Adapter for `xgboost.Booster`, `xgboost.XGBModel` and classes derived from the latter."""

    name: ClassVar[str] = "xgboost"

    @classmethod
    def accepts(cls, model: object) -> bool:
        return not {_BOOSTER, _WRAPPER}.isdisjoint(_class_names(model))

    def extract(self, model: Any) -> dict[str, Array]:
        booster, attributes = self._split(model)
        skeleton: dict[str, Value] = {"format": _FORMAT}
        tensors: dict[str, Array] = {}
        if booster is not None:
            tensors = self._take_apart(booster, skeleton)
        state: dict[str, Value] = {}
        others: dict[str, Any] = {}
        for key, value in attributes.items():
            try:
                state[key] = _encode_value(value)
            except ValueError:
                others[key] = value
        known = _CLASSES.get(_class_names(model)[0], "")
        skeleton |= {"class": known, "state": state, "others": list(others)}
        if not known:
            skeleton["derived"] = _class_names(model)[0]
        if others:
            skeleton["facts"] = with_tail(np.empty(0, dtype=np.uint8), facts_json(self._facts(others, booster)))
        if others or not known:
            skeleton["pickle"] = dump_skeleton(
                self.name, others if known else model, lambda part: _RAW if part is booster is not None else None
            )
        try:
            tensors[SKELETON] = np.frombuffer(write(skeleton), dtype=np.uint8)
        except ValueError as error:
            raise AdapterError(self.name, f"an attribute of the model cannot be stored: {error}") from error
        return tensors

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Put a model together again; see `Adapter.reconstruct`.

        Args:
            tensors: Result of `extract`, read back.
            original: A model of the same class to fill, fitted or not. Once XGBoost has read the stored booster, the
                booster and the attributes are replaced, hyperparameters included. Attributes that could only be
                pickled, such as callbacks and callable objectives, must be equal but for their plain values, which
                are filled.
            options: There are none.

        Raises:
            AdapterError: The arrays are not those of a model, or XGBoost cannot read them, or they do not fit
                ``original``, which then stays as it was.
            ValueError: There are options.
        """
        if options:
            raise ValueError(f"the xgboost adapter has no option {', '.join(options)}")
        skeleton = self._skeleton(tensors)
        raw = self._raw(skeleton, tensors)
        try:
            state = {key: _decode_value(value) for key, value in skeleton["state"].items()}
        except ValueError as error:
            raise AdapterError(self.name, f"an attribute cannot be read: {error}") from error
        if original is not None:
            return self._fill(original, skeleton, state, raw)
        return self._make(skeleton, state, raw)

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        skeleton = self._skeleton(tensors)
        try:
            return {**tree_cuts(skeleton.get("layout"), tensors)}
        except ValueError as error:
            raise AdapterError(self.name, f"the trees do not fit together: {error}") from error

    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        return "pickle" in self._skeleton(tensors)

    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Predict as MLflow's xgboost flavor does; parameters unknown to ``predict`` are left out."""
        import xgboost

        known = {"validate_features": True, **_known_params(model.predict, params or {})}
        if isinstance(model, xgboost.Booster):
            return model.predict(xgboost.DMatrix(data), **known)
        return model.predict(data, **known)

    def requirements(self, tensors: Mapping[str, Array]) -> list[str]:
        """List XGBoost, and scikit-learn if it is installed, which wrappers need."""
        return list(_requirements())

    def _split(self, model: Any) -> tuple[Booster | None, dict[str, Any]]:
        """Return the booster of a model, None for one that is not fitted, and the other attributes."""
        attributes = dict(vars(model))
        if _WRAPPER in _class_names(model):
            booster = attributes.pop("_Booster", None)
        else:
            booster = model
            attributes.pop("handle", None)
        if booster is not None and _class_names(booster)[0] != _BOOSTER:
            # Its class would be lost: only its own code can make such an object.
            raise AdapterError(self.name, f"a {type(booster).__qualname__} is not exactly an xgboost.Booster")
        return booster, attributes

    def _take_apart(self, booster: Booster, skeleton: dict[str, Value]) -> dict[str, Array]:
        """Return the tensors of a booster, and add its document and parameters to the skeleton."""
        import xgboost

        try:
            raw = bytes(booster.save_raw("ubj"))
            config = booster.save_config()
        except xgboost.core.XGBoostError as error:
            raise AdapterError(self.name, f"is the booster trained? {_first_line(error)}") from error
        skeleton |= {"config": _without_repeats(config), "version": xgboost.__version__}
        try:
            document = parse(raw)
            columns, layout = take_trees(document)
            part = {"document": document, "layout": layout}
            if _rebuild(parse(write(part)), columns) == raw:
                skeleton |= part
                return columns
        except ValueError as error:
            _logger.debug("a booster is stored whole: %s", error)
        self._check_whole(raw)
        return {_RAW: np.frombuffer(raw, dtype=np.uint8)}

    def _check_whole(self, raw: bytes) -> None:
        try:
            check_whole(raw)
        except ValueError as error:
            raise AdapterError(self.name, f"the booster is damaged, or too new for this release: {error}") from error

    def _skeleton(self, tensors: Mapping[str, Array]) -> dict[str, Value]:
        """Read a skeleton and check the types of its members; see the head of this module."""
        data = tensors.get(SKELETON)
        if data is None:
            raise AdapterError(self.name, "the skeleton is missing")
        try:
            skeleton = parse(data.tobytes())
        except ValueError as error:
            raise AdapterError(self.name, f"the skeleton cannot be read: {error}") from error
        if not isinstance(skeleton, dict) or skeleton.get("format") != _FORMAT:
            raise AdapterError(self.name, "the skeleton is of another kind, or of a later release")
        kinds = {"config": str, "version": str, "class": str, "state": dict, "others": list, "pickle": np.ndarray}
        kinds |= {"derived": str, "facts": np.ndarray}
        absent_ok = {"config", "version", "pickle", "derived", "facts"}
        for key, kind in kinds.items():
            if not isinstance(skeleton.get(key), kind) and not (key in absent_ok and key not in skeleton):
                raise AdapterError(self.name, f"the skeleton has no sound {key!r}")
        if not all(isinstance(name, str) for name in skeleton["others"]):
            raise AdapterError(self.name, "the skeleton has no sound 'others'")
        if not {"handle", "_Booster"}.isdisjoint(skeleton["state"]):  # XGBoost follows a handle as a pointer
            raise AdapterError(self.name, "the skeleton has no sound 'state'")
        return skeleton

    def _raw(self, skeleton: dict[str, Value], tensors: Mapping[str, Array]) -> bytes | None:
        """Return the bytes of ``save_raw``, or None for a wrapper that was not fitted."""
        if _RAW in tensors:
            raw = tensors[_RAW].tobytes()
            self._check_whole(raw)
            return raw
        if "document" not in skeleton:
            return None
        try:
            return _rebuild(skeleton, tensors)
        except ValueError as error:
            raise AdapterError(self.name, f"the trees do not fit together: {error}") from error

    def _load(self, skeleton: dict[str, Value], raw: bytes) -> Booster:
        import xgboost

        booster = xgboost.Booster()
        try:
            booster.load_model(bytearray(raw))
            if skeleton.get("version") == xgboost.__version__:
                booster.load_config(_without_repeats(skeleton.get("config", "")))
            else:
                _logger.warning(
                    "The model was saved with xgboost %s; xgboost %s does not restore its training parameters.",
                    skeleton.get("version"),
                    xgboost.__version__,
                )
        except (xgboost.core.XGBoostError, ValueError, RecursionError) as error:
            raise AdapterError(self.name, f"xgboost cannot read the model: {_first_line(error)}") from error
        return booster

    def _make(self, skeleton: dict[str, Value], state: dict[str, Any], raw: bytes | None) -> Any:
        booster = None if raw is None else self._load(skeleton, raw)
        pickled = {}
        if "pickle" in skeleton:
            pickled = load_skeleton(self.name, skeleton["pickle"], lambda reference: booster)
            if skeleton["class"] and not isinstance(pickled, dict):
                raise AdapterError(self.name, "the pickle holds no attributes")
        known = skeleton["class"]
        if not known and "pickle" in skeleton:
            return pickled
        if known not in _CLASSES.values() or (known == "Booster" and booster is None):
            raise AdapterError(self.name, f"no {known!r} can be made of this")
        model = _bare(known, booster)
        vars(model).update(state, **pickled)
        return model

    def _fill(self, original: Any, skeleton: dict[str, Value], state: dict[str, Any], raw: bytes | None) -> Any:
        import xgboost

        known = skeleton["class"]
        live_class = _class_names(original)[0]
        wanted = known or skeleton.get("derived", "wrapper")
        if wanted != _CLASSES.get(live_class, live_class):
            raise AdapterError(self.name, f"a {wanted} cannot be put into a {type(original).__name__}: {REMEDY}")
        others = self._others(original, skeleton)
        fill_others = None
        if others:
            live, _ = self._split(original)
            stored = read_tail(self.name, skeleton.get("facts"))
            fill_others = plan_values(self.name, self._facts(others, live), stored)
        booster = None if raw is None else self._load(skeleton, raw)
        if isinstance(original, xgboost.Booster):
            if booster is None:
                raise AdapterError(self.name, "there is no booster")
            _swap(original, booster)
            kept = {"handle"}
        elif booster is None:
            kept = set()
        else:
            live = vars(original).get("_Booster")
            if live is None:
                original._Booster = booster
            else:
                _swap(live, booster)
            kept = {"_Booster"}
        attributes: dict[str, Any] = original.__dict__
        if fill_others is not None:
            fill_others()
        for key in attributes.keys() - state.keys() - kept - others.keys():
            del attributes[key]
        attributes.update(state, **others)
        return original

    def _facts(self, others: dict[str, Any], booster: Booster | None) -> Facts:
        return facts_of(self.name, others, lambda part: _RAW if part is booster is not None else None)

    def _others(self, original: Any, skeleton: dict[str, Value]) -> dict[str, Any]:
        """Return the live values of the attributes that were pickled."""
        held = vars(original)
        missing = [name for name in skeleton["others"] if name not in held]
        if missing:
            raise AdapterError(
                self.name, f"{missing[0]!r} can only be unpickled, and the original has none to compare: {REMEDY}"
            )
        return {name: held[name] for name in skeleton["others"]}


def _class_names(model: object) -> list[str]:
    """Return the qualified names of a model's classes, its own first."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(model).__mro__]


def _bare(known: str, booster: Booster | None) -> Any:
    """Return an object of a class of XGBoost that holds a booster and no other attributes."""
    import xgboost

    if known == "Booster":
        return booster
    cls = getattr(xgboost, known)
    wrapper = cls.__new__(cls)
    if booster is not None:
        wrapper._Booster = booster
    return wrapper


def _swap(live: Booster, loaded: Booster) -> None:
    """Swap the content of two boosters. Unlike loading into a live one, this cannot fail half-way."""
    live.handle, loaded.handle = loaded.handle, live.handle


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _rebuild(skeleton: Value, columns: Mapping[str, Array]) -> bytes:
    """Put the trees back into the document of a skeleton, which this changes, and encode it."""
    put_trees(skeleton["document"], skeleton.get("layout"), columns)
    return write(skeleton["document"])


def _without_repeats(config: str) -> str:
    """Drop from a configuration the parts that repeat the model: they change with every tree, and nobody reads them."""

    def prune(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: prune(member) for key, member in value.items() if key not in _REPEATED}
        return value

    return json.dumps(prune(json.loads(config)), separators=(",", ":"))


def _known_params(predict: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a function takes by name; warn of others."""
    taken = inspect.signature(predict).parameters
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in taken.values()):
        return dict(params)
    unknown = sorted(params.keys() - taken.keys())
    if unknown:
        _logger.warning("Params %s are not accepted by the xgboost model and are ignored.", unknown)
    return {key: value for key, value in params.items() if key in taken}


def _encode_value(value: Any, depth: int = 10) -> Value:
    """Return a plain Python value in the types of UBJSON; `_decode_value` inverts it exactly.

    Text, whole numbers, booleans, None and lists stand for themselves, and a float is a float64. All else is an object
    with one or two members, the first of which names the type.

    Raises:
        ValueError: The value is not plain, or nests deeper than ``depth``, in particular if it contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        narrowest(value)  # raises if it does not fit
        return value
    if kind is float:
        return np.float64(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        items = np.asarray(value).reshape(-1)
        if items.dtype.isnative and write(items):  # raises if UBJSON has no such type
            return {"array": items, "shape": list(value.shape)} if kind is np.ndarray else {"number": items}
    if depth > 0 and kind is list:
        return [_encode_value(item, depth - 1) for item in value]
    if depth > 0 and kind is tuple:
        return {"tuple": [_encode_value(item, depth - 1) for item in value]}
    if depth > 0 and kind in (dict, OrderedDict) and all(type(key) is str for key in value):
        return {kind.__name__: {key: _encode_value(member, depth - 1) for key, member in value.items()}}
    raise ValueError(f"a {kind.__name__} is not plain")


def _decode_value(value: Value) -> Any:
    """Return the value that `_encode_value` encoded.

    Raises:
        ValueError: `_encode_value` returns no such value.
    """
    match value:
        case np.float64():
            return float(value)
        case np.generic():
            raise ValueError(f"a {type(value).__name__} stands for no value")
        case list():
            return [_decode_value(item) for item in value]
        case {"tuple": list(items)}:
            return tuple(_decode_value(item) for item in items)
        case {"dict": dict(members)}:
            return {key: _decode_value(member) for key, member in members.items()}
        case {"OrderedDict": dict(members)}:
            return OrderedDict((key, _decode_value(member)) for key, member in members.items())
        case {"number": np.ndarray() as items} if len(items) == 1:
            return items.astype(items.dtype.newbyteorder("="))[0]
        case {"array": np.ndarray() as items, "shape": [*shape]} if all(type(n) is int for n in shape):
            return items.astype(items.dtype.newbyteorder("=")).reshape(shape)
        case dict() | np.ndarray():
            raise ValueError("an object stands for no value")
        case _:
            return value


@cache
def _requirements() -> tuple[str, ...]:
    found = []
    for name in ("xgboost", "xgboost-cpu", "scikit-learn"):
        try:
            found.append(f"{name}=={installed_version(name)}")
        except PackageNotFoundError:
            continue
    return tuple(found)
