"""Skeletons: references replace the parts that are taken out, and the rest is the pickle of cloudpickle."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from importlib.metadata import version
from typing import Any

import cloudpickle
import numpy as np
import pytest

from tensorcas_flavors import _pickle_tree, _pickling
from tensorcas_flavors._pickle_tree import named_modules
from tensorcas_flavors._pickling import MAGIC, dump_skeleton, is_pickle, load_skeleton, pinned_packages
from tensorcas_mlflow.errors import AdapterError


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def take_nothing(part: object) -> None:
    return None


def round_trip(obj: object) -> Any:
    return load_skeleton("test", dump_skeleton("test", obj, take_nothing), lambda ref: None)


def test_a_skeleton_without_references_is_the_magic_and_cloudpickles_own_pickle() -> None:
    described = OrderedDict(a=1)
    described.note = "an attribute"  # type: ignore[attr-defined]
    objects: list[Any] = [Holder(n=1), OrderedDict(b=2), described, OrderedDict(), [type(None), Holder, len, lambda: 0]]

    for obj in objects:
        assert dump_skeleton("test", obj, take_nothing).tobytes() == MAGIC + cloudpickle.dumps(obj, protocol=5)


def test_an_ordered_dict_comes_back_with_order_and_attributes() -> None:
    model = OrderedDict(b=1, a=2)
    model.note = [3]  # type: ignore[attr-defined]

    again = round_trip(model)

    assert type(again) is OrderedDict
    assert list(again.items()) == [("b", 1), ("a", 2)]
    assert vars(again) == {"note": [3]}


def test_everything_is_offered_before_it_is_pickled_and_put_back_by_its_reference() -> None:
    seen: list[object] = []

    def take_out(part: object) -> object | None:
        seen.append(part)
        return ("ref", 7) if part == "secret" else None

    skeleton = dump_skeleton("test", Holder(a="secret", b=["secret", 5]), take_out)
    again = load_skeleton("test", skeleton, lambda ref: ref)

    assert b"secret" not in skeleton.tobytes()
    assert seen.count("secret") == 2
    assert 5 in seen
    assert (again.a, again.b) == (("ref", 7), [("ref", 7), 5])


def test_taken_buffers_come_back_in_order_and_others_stay_in_the_pickle() -> None:
    taken: list[bytes] = []

    def take_buffer(buffer: pickle.PickleBuffer) -> bool:
        if len(buffer.raw()) < 10:
            return False
        taken.append(bytes(buffer.raw()))
        return True

    parts = [np.arange(9), np.zeros(1), np.arange(5.0)]
    skeleton = dump_skeleton("test", parts, take_nothing, take_buffer=take_buffer)
    again = load_skeleton("test", skeleton, lambda ref: None, buffers=iter(map(bytearray, taken)))

    assert taken == [parts[0].tobytes(), parts[2].tobytes()]
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_without_a_taker_buffers_stay_in_the_pickle() -> None:
    assert np.array_equal(round_trip(np.arange(99)), np.arange(99))


def test_the_second_skeleton_of_an_unchanged_object_is_the_first() -> None:
    class Local:
        __slots__ = ("x",)

    model = Local()
    model.x = 3

    first = dump_skeleton("test", model, take_nothing)

    assert np.array_equal(dump_skeleton("test", model, take_nothing), first)


def test_a_reducer_registered_later_with_copyreg_is_used() -> None:
    import copyreg

    class Odd:
        pass

    copyreg.pickle(Odd, lambda odd: (str, ("reduced",)))  # type: ignore[arg-type, return-value]
    try:
        assert round_trip([Odd()]) == ["reduced"]
    finally:
        del copyreg.dispatch_table[Odd]


@pytest.mark.long
def test_classes_and_functions_of_main_travel_by_value() -> None:
    program = """
import sys
from tensorcas_flavors._pickling import dump_skeleton
class Mine:
    def double(self): return 2 * self.n
mine = Mine(); mine.n = 21
sys.stdout.buffer.write(dump_skeleton("test", [mine, lambda: mine.n], lambda part: None).tobytes())
"""
    written = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    mine, function = load_skeleton("test", np.frombuffer(written, dtype=np.uint8), lambda ref: None)

    assert (mine.double(), function()) == (42, 21)


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(AdapterError, match="test: a Holder cannot be pickled"):
        dump_skeleton("test", Holder(generator=(i for i in range(3))), take_nothing)


def test_bytes_without_the_magic_are_never_unpickled() -> None:
    data = np.frombuffer(pickle.dumps([1]), dtype=np.uint8)

    assert not is_pickle(data)
    with pytest.raises(AdapterError, match="holds no pickle"):
        load_skeleton("test", data, lambda ref: None)


def test_a_skeleton_with_missing_buffers_or_bytes_is_refused() -> None:
    skeleton = dump_skeleton("test", np.arange(99), take_nothing, take_buffer=lambda buffer: True)

    with pytest.raises(AdapterError, match="cannot be read"):
        load_skeleton("test", skeleton, lambda ref: None)
    with pytest.raises(AdapterError, match="cannot be read"):
        load_skeleton("test", skeleton[:-9], lambda ref: None, buffers=[bytearray(99 * 8)])


def test_code_that_is_not_importable_is_named() -> None:
    skeleton = np.frombuffer(MAGIC + b"cno_such_module\nThing\n.", dtype=np.uint8)

    with pytest.raises(AdapterError, match="no_such_module"):
        load_skeleton("test", skeleton, lambda ref: None)


def test_a_distribution_named_like_its_module_is_pinned_without_reading_all_distributions() -> None:
    _pickling._distributions.cache_clear()
    _pickling._distributions_of.cache_clear()
    pins = pinned_packages({"numpy", "cloudpickle"})

    assert pins == [f"{name}=={version(name)}" for name in ("cloudpickle", "numpy")]
    assert _pickling._distributions.cache_info().misses == 0


@pytest.mark.long
def test_a_module_of_another_distributions_name_is_pinned() -> None:
    assert pinned_packages({"sklearn", "yaml"}) == [f"{name}=={version(name)}" for name in ("PyYAML", "scikit-learn")]


def test_a_module_without_a_distribution_is_left_out_of_the_requirements() -> None:
    assert pinned_packages({"my_own_training_script"}) == []


def test_modules_of_a_pickle_are_named_up_to_its_damage() -> None:
    skeleton = dump_skeleton("test", [Fraction(1), Decimal(2)], take_nothing)

    assert named_modules(skeleton) == {"fractions", "decimal"}
    assert named_modules(skeleton[: bytes(skeleton).index(b"decimal")]) == {"fractions"}


def test_modules_of_a_pickle_are_refused_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_memory(self: object) -> None:
        raise MemoryError

    skeleton = dump_skeleton("test", Fraction(1), take_nothing)
    monkeypatch.setattr(_pickle_tree._PickleReader, "load", has_no_memory)

    with pytest.raises(MemoryError):
        named_modules(skeleton)
