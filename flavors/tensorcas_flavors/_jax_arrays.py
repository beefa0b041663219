"""Arrays of JAX as host arrays, and host arrays as arrays of JAX, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.dtypes import dtype_name
from tensorcas_mlflow.errors import AdapterError

ADAPTER = "jax"
NUMPY, KEY = "numpy", "key"


def jax_error(reason: str) -> AdapterError:
    """Return an error of this adapter."""
    return AdapterError(ADAPTER, reason)


class Kind(NamedTuple):
    """What an array is, beside its dtype, shape and elements."""

    kind: str | None = None
    """`NUMPY` for an array of numpy, `KEY` for an array of random keys, None for any other array of JAX."""
    impl: str | None = None
    """Name of the random generator of keys."""
    is_weak: bool = False
    """Whether the dtype is weak: JAX then promotes the array like a Python number."""


def is_jax_array(part: object) -> bool:
    """Tell whether an object is an array of JAX, without importing JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(part, jax.Array)


def on_cpu() -> AbstractContextManager[Any]:
    """Make new arrays of JAX on the CPU, in a trial whose result is thrown away: another device may be full."""
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "default_device"):
        return nullcontext()
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return nullcontext()
    return jax.default_device(cpu)  # type: ignore[no-any-return]


def is_spread(part: Any) -> bool:
    """Tell whether an array, or the description of one, has elements that this process cannot reach."""
    sharding = getattr(part, "sharding", None)
    return sharding is not None and not (sharding.is_fully_addressable or sharding.is_fully_replicated)


def is_row(part: Any) -> bool:
    """Tell whether an array becomes a row: every array of JAX, and those of numpy with elements of plain dtypes."""
    if type(part) is not np.ndarray and type(part) is not np.memmap:
        return is_jax_array(part)
    if part.dtype.hasobject:
        return False
    try:
        dtype_name(part.dtype)
    except ValueError:
        return False
    return True


def take_array(name: str, part: Any) -> tuple[Array, Kind]:
    """Return an array's elements in the memory of this machine, and its kind.

    The elements of an array on one CPU device are its own memory. Nothing is kept with the array: JAX itself would keep
    a copy of each array that numpy has seen.

    Args:
        name: The array's name, for errors.
        part: An array for which `is_row` is true.

    Raises:
        AdapterError: The array is deleted, is a tracer, or has elements on devices of other processes.
    """
    if isinstance(part, np.ndarray):
        return np.asarray(part), Kind(NUMPY)
    import jax

    _check_alive(name, part)
    if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
        data, _ = take_array(name, jax.random.key_data(part))
        return data, Kind(KEY, str(jax.random.key_impl(part)))
    return _on_host(name, part), Kind(is_weak=bool(part.weak_type))


def take_shards(name: str, part: Any) -> tuple[Array, Kind, list[tuple[tuple[int, ...], Any]]]:
    """Return this process's shards of an array with elements on devices of several processes.

    Each element of the array is in one shard of one process.

    Args:
        name: The array's name, for errors.
        part: An array for which `is_spread` is true.

    Returns:
        An array without memory of the whole array's dtype and shape, its kind, and the shards: the first element along
        each axis, and an array on one device.

    Raises:
        AdapterError: As for `take_array`.
    """
    import jax

    _check_alive(name, part)
    kind = Kind(is_weak=bool(part.weak_type))
    if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
        kind = Kind(KEY, str(jax.random.key_impl(part)))
        part = jax.random.key_data(part)
    shards = [
        (tuple(side.indices(length)[0] for side, length in zip(shard.index, part.shape, strict=True)), shard.data)
        for shard in part.addressable_shards
        if shard.replica_id == 0
    ]
    return np.broadcast_to(np.zeros((), dtype=part.dtype), part.shape), kind, shards


def _check_alive(name: str, part: Any) -> None:
    import jax

    if isinstance(part, jax.core.Tracer):
        raise jax_error(f"{name!r} is a tracer: log the state outside of jit, grad and the like")
    if part.is_deleted():
        raise jax_error(
            f"the array {name!r} is deleted, probably donated to a jitted function: log the state before that call, or "
            "log the result of the call"
        )
    if getattr(getattr(part.sharding, "spec", None), "unreduced", None):
        raise jax_error(f"{name!r} is unreduced: its shards are still to be added up; reshard it first")
    if jax.dtypes.issubdtype(part.dtype, jax.dtypes.extended) and not jax.dtypes.issubdtype(
        part.dtype, jax.dtypes.prng_key
    ):
        raise jax_error(f"{name!r} has the dtype {part.dtype}, which has no array of numpy")


def _on_host(name: str, part: Any) -> Array:
    if part.is_fully_replicated:
        # The array of a shard is a new object; numpy's view of it goes with it.
        return np.asarray(part.addressable_data(0))
    if not part.is_fully_addressable:
        raise jax_error(
            f"{name!r} has elements on devices of other processes: log it in a pytree, in all processes, or gather the "
            "array with jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
        )
    whole: Array = np.empty(part.shape, dtype=part.dtype)
    for shard in part.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = np.asarray(shard.data)
    return whole


def make_spread(name: str, shape: tuple[int, ...], kind: Kind, read: Callable[[Any], Array], like: Any) -> Any:
    """Return an array over the devices of several processes.

    Args:
        name: The array's name, for errors.
        shape: Its shape.
        kind: Its kind; not `KEY`.
        read: Reads the elements at an index of slices.
        like: The array whose sharding the result gets.

    Raises:
        AdapterError: This JAX cannot make it.
    """
    import jax

    with _with_64_bits():
        array = jax.make_array_from_callback(shape, like.sharding, read)
        return _weakened(name, array) if kind.is_weak else array


def make_array(name: str, row: Array, kind: Kind, *, like: Any = None) -> Any:
    """Return the array that `take_array` took apart.

    Args:
        name: The array's name, for errors.
        row: Its elements, in C order; the result may use their memory.
        kind: Its kind.
        like: An array, or a `jax.ShapeDtypeStruct`, whose place the result takes: its sharding, or this machine's
            memory for one of numpy. By default the result is where JAX puts new arrays. An array of numpy stays one
            unless ``like`` is an array of JAX, or a shape with a sharding.

    Raises:
        AdapterError: These are no elements of such an array, or this JAX cannot make it.
    """
    if kind.kind == NUMPY and (not is_of_jax(like) or (is_shape(like) and like.sharding is None)):
        return row
    if isinstance(like, np.ndarray | np.generic):
        return row
    sharding = _wanted_sharding(like)
    if kind.kind == KEY:
        return _make_keys(name, row, kind.impl, sharding)
    # Outside of this context JAX would make 32 bits of 64, unless told otherwise by jax_enable_x64.
    with _with_64_bits():
        array = _put(row, sharding)
        if kind.is_weak:
            array = _weakened(name, array)
        if array.dtype != row.dtype or array.shape != row.shape:
            raise jax_error(f"{name!r} is {row.dtype}{list(row.shape)}, and JAX makes {array.dtype} of it")
    return array


def is_of_jax(part: Any) -> bool:
    """Tell whether a part of a state to fill is an array of JAX, or the shape and dtype of one."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(part, jax.Array | jax.ShapeDtypeStruct)


def is_shape(part: Any) -> bool:
    """Tell whether a part of a state to fill is the shape and dtype of an array, without elements."""
    return is_of_jax(part) and not is_jax_array(part)


def key_dtype(impl: str | None) -> Any:
    """Return the dtype of the keys of a random generator.

    Raises:
        AdapterError: This JAX does not know the generator.
    """
    import jax

    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    except (ValueError, TypeError, KeyError) as error:
        raise jax_error(f"this JAX has no random generator {impl!r}: {error}") from error


def _with_64_bits() -> Any:
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64(True)


def _wanted_sharding(like: Any) -> Any:
    if like is None or not is_of_jax(like):
        return None
    # An array that is not committed to its device follows others in a computation, so the new one must not be either.
    if not getattr(like, "committed", True):
        return None
    return like.sharding


def _put(row: Array, sharding: Any) -> Any:
    import jax

    if sharding is None:
        return jax.device_put(row)
    if sharding.is_fully_addressable:
        return jax.device_put(row, sharding)
    return jax.make_array_from_callback(row.shape, sharding, lambda index: row[index])


def _weakened(name: str, array: Any) -> Any:
    try:
        from jax._src.lax.lax import _convert_element_type

        weak = _convert_element_type(array, weak_type=True)
    except (ImportError, TypeError) as error:
        raise jax_error(f"{name!r} has a weak dtype, which this adapter cannot make with this JAX: {error}") from error
    if weak.dtype != array.dtype or not weak.weak_type:
        raise jax_error(f"{name!r} has a weak dtype, and this JAX makes {weak.dtype} of {array.dtype}")
    return weak


def _make_keys(name: str, row: Array, impl: str | None, sharding: Any) -> Any:
    import jax

    dtype = key_dtype(impl)
    try:
        keys = jax.random.wrap_key_data(jax.device_put(row), impl=impl)
    except (ValueError, TypeError) as error:
        raise jax_error(f"{name!r} holds no keys of the random generator {impl!r}: {error}") from error
    if keys.dtype != dtype:
        raise jax_error(f"{name!r} holds no keys of the random generator {impl!r}")
    if sharding is None:
        return keys
    if sharding.is_fully_addressable:
        return jax.device_put(keys, sharding)
    return jax.make_array_from_callback(keys.shape, sharding, lambda index: keys[index])
