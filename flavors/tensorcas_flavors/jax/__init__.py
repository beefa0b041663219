"""Adapter for JAX: pytrees with arrays of JAX, states of Optax, and modules and states of Flax (linen and nnx).

In: a tree (`_tree`). Out: rows under the paths of the leaves, and a skeleton (`_layout`) with JSON that describes the
leaves. If the tree has nodes of classes, such as states of Optax, their pickle without arrays comes first. Filling a
live state (`_fill`) reads the JSON alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tensorcas_flavors._facts import Encoder, NotPlainError
from tensorcas_flavors._jax_arrays import (
    ADAPTER,
    Kind,
    is_jax_array,
    is_of_jax,
    is_row,
    is_spread,
    jax_error,
    make_array,
    on_cpu,
    take_array,
    take_shards,
)
from tensorcas_flavors._pickle_tree import named_modules
from tensorcas_flavors._pickling import (
    dump_skeleton,
    is_pickle,
    load_skeleton,
    pinned_packages,
    try_back,
)
from tensorcas_flavors.jax._fill import RowFacts, fill
from tensorcas_flavors.jax._layout import Layout, rebuilt
from tensorcas_flavors.jax._tree import ATOMS, Tree
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array, CheckTensors, ReadTensors, StoredTensor
from tensorcas_mlflow.base.content_cuts import MIN_BYTES, content_cuts
from tensorcas_mlflow.errors import AdapterError

_INSIDE = "__array__/"
_MAX_CONTAINERS = 100_000
_COME_BACK: set[type] = set()
"""Classes that came back from a pickle in this process; a save of an object with others loads it once."""
Take = Callable[[str, Any], tuple[Array, Kind]]


class PartOfState(NamedTuple):
    """Part of one process in a state of several processes."""

    rows: dict[str, Array]
    """Result of `JaxAdapter.extract`. An array over several processes is one without memory."""
    shards: dict[str, list[tuple[tuple[int, ...], Any]]]
    """This process's shards of such arrays: the first element along each axis, and an array on one device."""
    facts: dict[str, Any]
    """All leaves by name: the row of an array of this process alone, the JSON of a plain value, None for any other."""


class JaxAdapter(Adapter):
    """Adapter for trees with arrays of JAX: parameters, states of Optax, train states of Flax, modules of nnx.

    * Each leaf that is an array of JAX or numpy is a row: its dtype (bfloat16 and the float8 kinds too), its shape, its
      elements. Weak dtypes and random keys come back as such. An array over several devices of this process is
      assembled. One with elements on devices of other processes is for `extract_part`; `extract` refuses it.
    * Leaves that are plain values (numbers, texts, None, …) are restored too. Functions and classes are the program's.
    * A tree of dicts, lists and tuples needs no pickle. One with other nodes, such as states of Optax, is pickled
      without its arrays; filling a live state does not read the pickle.
    * New arrays are where JAX puts new arrays. Elements of 64 bits stay such, whatever ``jax_enable_x64`` says.

    Options:
        strict: With ``original`` only; True by default. A static field of a dataclass, and an attribute of an nnx
            module that is no array, is the program's; where it is a plain value it must be equal to the stored one.
            The modes that ``train()`` and ``eval()`` set are not compared. All leaves must be stored, and all stored
            leaves must be there but those under keys of a dict that ``original`` does not name. With False, the leaves
            that both have are filled; all others, a None in the place of an array, static fields, and leaves that only
            a pickle holds stay as they are.
    """

    name: ClassVar[str] = ADAPTER
    options: ClassVar[frozenset[str]] = frozenset({"strict"})
    fills_others: ClassVar[bool] = True

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Take pytrees with an array of JAX, or the shape of one, but none with tensors or modules of PyTorch."""
        jax = sys.modules.get("jax")
        if jax is None or not hasattr(jax, "tree_util"):
            return False
        torch = sys.modules.get("torch")
        of_torch = (torch.Tensor, torch.nn.Module) if torch is not None and hasattr(torch, "nn") else ()
        stack: list[Any] = [model]
        seen = {id(model)}
        is_found = False
        while stack and len(seen) < _MAX_CONTAINERS:
            part = stack.pop()
            kind = type(part)
            if kind in ATOMS:
                continue
            if kind is dict or kind is list or kind is tuple:
                values: Any = part.values() if kind is dict else part
            else:
                try:
                    values = jax.tree_util.tree_leaves(part)
                except Exception:  # noqa: BLE001 -- code of a class; `extract` would name the error
                    continue
                if len(values) == 1 and values[0] is part:
                    if isinstance(part, of_torch):
                        return False
                    is_found |= is_of_jax(part)
                    continue
            fresh = [value for value in values if type(value) not in ATOMS and id(value) not in seen]
            seen.update(map(id, fresh))
            stack += fresh
        return is_found

    def extract(self, model: Any) -> dict[str, Array]:
        """Take a tree apart, as views of its arrays where they are on one CPU device.

        Returns:
            The arrays by the path of keys, attributes and positions that leads to them (``params.Dense_0.kernel``); a
            variable of nnx has the name of its value. Arrays inside of leaves that are other objects follow, under a
            number; then the skeleton.

        Raises:
            AdapterError: An array is deleted, is a tracer or is spread over processes, or a part cannot be pickled.
        """
        return self._extract(model, take_array)[0]

    def extract_part(self, model: Any) -> PartOfState:
        """Take apart a state with arrays over the devices of several processes: this process's part of it.

        Raises:
            AdapterError: As for `extract`, but for such arrays.
        """
        shards: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        facts: dict[str, Any] = {}

        def take(name: str, part: Any) -> tuple[Array, Kind]:
            if is_spread(part):
                row, kind, shards[name] = take_shards(name, part)
                return row, kind
            row, kind = take_array(name, part)
            if isinstance(part, np.ndarray) or part.is_fully_addressable:
                facts[name] = row
            return row, kind

        rows, layout = self._extract(model, take)
        for name in layout.names():
            facts.setdefault(name, layout.values.get(name))
        return PartOfState(rows, shards, facts)

    def module_for_ranks(self, model: Any) -> str | None:
        """Name the module for states with arrays over the devices of several processes; None for any other."""
        jax = sys.modules.get("jax")
        if jax is None or jax.process_count() == 1:
            return None
        return "tensorcas_mlflow.jax_processes" if any(is_spread(leaf.value) for leaf in Tree(model).leaves) else None

    def _extract(self, model: Any, take: Take) -> tuple[dict[str, Array], Layout]:
        tree = Tree(model)
        layout = Layout(static=tree.static_values(), tree=tree.plain())
        rows: dict[str, Array] = {}
        encoder = Encoder()
        for leaf in tree.leaves:
            if is_row(leaf.value):
                rows[leaf.name], layout.rows[leaf.name] = take(leaf.name, leaf.value)
                continue
            try:
                layout.values[leaf.name] = encoder.encode(leaf.value)
            except NotPlainError:
                layout.tree = None
                (layout.code if callable(leaf.value) else layout.opaque).append(leaf.name)
        pickled = np.empty(0, dtype=np.uint8)
        kinds: set[type] = set()
        if layout.tree is None:
            pickled, kinds = self._pickle(model, tree, rows, layout, take)
        rows[SKELETON] = layout.encode(pickled)
        if not kinds <= _COME_BACK:
            with on_cpu():
                try_back(self.name, model, rows, self.reconstruct)
            _COME_BACK.update(kinds)
        return rows, layout

    def _pickle(
        self, model: Any, tree: Tree, rows: dict[str, Array], layout: Layout, take: Take
    ) -> tuple[Array, set[type]]:
        known = {id(leaf.value): leaf.name for leaf in reversed(tree.leaves) if leaf.name in layout.rows}
        kept: list[object] = []
        is_array: dict[type, bool] = {}

        def take_out(part: Any) -> str | None:
            kind = type(part)
            if kind not in is_array:
                is_array[kind] = kind is np.ndarray or kind is np.memmap or is_jax_array(part)
            if not is_array[kind] or not is_row(part):
                return None
            name = known.get(id(part))
            if name is None:
                name = known[id(part)] = f"{_INSIDE}{len(kept)}"
                if name in rows:
                    raise jax_error(f"a leaf has the name {name!r}, which is one of the adapter's own: rename it")
                rows[name], layout.inside[name] = take(name, part)
                kept.append(part)
            return name

        try:
            pickled = dump_skeleton(self.name, model, take_out)
        except AdapterError as error:
            reason = (
                f"{error.reason}; log the parts of the state that are trained, such as {{'params': state.params, "
                "'opt_state': state.opt_state} or nnx.to_pure_dict(nnx.state(model))"
            )
            raise AdapterError(self.name, reason) from error
        return pickled, set(is_array)

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Rebuild a tree, or fill a live one.

        Args:
            tensors: Result of `extract`.
            original: A state of the same tree, with arrays or `jax.ShapeDtypeStruct`. Each new array has the sharding
                of the one in its place; dtypes and shapes must be equal. Arrays cannot change: the filled state is the
                returned one. A dict or list that is ``original`` itself, and objects of nnx, are also changed in place;
                all other containers are new. Nothing changes before all is checked and read. A Python number and an
                array of one number of its kind may take each other's place: the stored one comes.
            options: See the class.

        Raises:
            AdapterError: Names, dtypes or shapes do not fit, two parts of ``original`` are one object of nnx with
                different values stored, the skeleton is damaged, or the code of the state is not importable.
        """
        strict = options.get("strict")
        layout = Layout.read(tensors.get(SKELETON), tensors)
        missing = [name for name in (*layout.rows, *layout.inside) if name not in tensors]
        if missing:
            raise jax_error(f"the state's row {missing[0]!r} is missing")
        if original is not None:
            stored = {name: RowFacts.of(name, tensors[name]) for name in layout.rows}
            return fill(original, layout, stored, _reader_of(tensors), strict=strict is not False)
        if strict is not None:
            raise jax_error("strict says how to fill a state: give one, or leave it out")
        if SKELETON not in tensors:
            raise jax_error("there is no skeleton among the arrays: give a state to fill, or load the weights only")
        made: dict[str, Any] = {}

        def put_back(name: Any) -> object:
            if name not in made:
                if name not in layout.rows and name not in layout.inside:
                    raise jax_error(f"the state has no row {name!r:.60}")
                made[name] = make_array(name, tensors[name], layout.kind(name))
            return made[name]

        if is_pickle(tensors[SKELETON]):
            return load_skeleton(self.name, tensors[SKELETON], put_back)
        leaves = {name: put_back(name) for name in layout.rows}
        return rebuilt(layout.tree, leaves | {name: layout.value(name) for name in layout.values})

    def fill(
        self,
        original: Any,
        stored: Mapping[str, StoredTensor],
        read: ReadTensors,
        *,
        check: CheckTensors | None,
        **options: Any,
    ) -> Any:
        """Fill a live state like `reconstruct`, some rows at a time: they go to their devices before the next ones.

        The module for states of several processes also passes ``read_slice``; see `tensorcas_flavors.jax._fill.fill`.
        """
        skeleton = read([SKELETON])[SKELETON] if SKELETON in stored else None
        layout = Layout.read(skeleton, stored)
        missing = [name for name in layout.rows if name not in stored]
        if missing:
            raise jax_error(f"the state's row {missing[0]!r} is missing")
        read_slice = options.get("read_slice")
        return fill(original, layout, stored, read, strict=options.get("strict") is not False, read_slice=read_slice)

    def weights(self, tensors: Mapping[str, Array], **options: Any) -> dict[str, Any]:
        """Return the rows as arrays of JAX, or of numpy where they were such. No pickle is read.

        Args:
            tensors: Result of `extract`, or some of it; without the skeleton, arrays of any checkpoint. JAX may use
                their memory.
            options: None: ``strict`` says how to fill a state.

        Raises:
            AdapterError: The skeleton is damaged, or JAX has no arrays of a dtype (texts, records).
        """
        if options:
            raise jax_error("strict says how to fill a state: leave it out")
        layout = Layout.read(tensors.get(SKELETON), tensors)
        names = [name for name in tensors if name != SKELETON]
        strange = [name for name in names if layout.kind(name) == Kind() and tensors[name].dtype.kind in "SUMm"]
        if strange:
            raise jax_error(f"JAX has no arrays of {tensors[strange[0]].dtype}: leave {strange[0]!r} out")
        return {name: make_array(name, tensors[name], layout.kind(name)) for name in names}

    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """Return True for a tree with nodes of classes, False for dicts, lists and tuples."""
        return SKELETON in tensors and is_pickle(tensors[SKELETON])

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        """Cut a long skeleton by content."""
        skeleton = tensors.get(SKELETON)
        return {} if skeleton is None or len(skeleton) <= MIN_BYTES else {SKELETON: content_cuts(skeleton)}

    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Call a module of nnx, or any other state that can be called, with the data as an array.

        Args:
            model: The state.
            data: A DataFrame of numbers, or an array.
            params: Keyword arguments of the call.

        Returns:
            The prediction as an array of numpy; as a DataFrame with the index of ``data`` for a DataFrame.

        Raises:
            AdapterError: The state cannot be called: it does not say how to compute.
        """
        import pandas as pd

        if not callable(model):
            raise jax_error(
                f"a {type(model).__name__} does not say how to predict: load it, and call a function of the program"
            )
        if isinstance(data, pd.DataFrame):
            values = np.asarray(model(data.to_numpy(dtype=np.float32), **(params or {})))
            return pd.DataFrame(values, index=data.index)
        return np.asarray(model(np.asarray(data), **(params or {})))

    def requirements(self, tensors: Mapping[str, Array]) -> list[str]:
        """List JAX, numpy, and the packages whose classes and functions the tree's nodes name."""
        named = named_modules(tensors[SKELETON])
        return pinned_packages({"jax", "numpy"} | named | ({"cloudpickle"} if named else set()))


def _reader_of(tensors: Mapping[str, Array]) -> Any:
    return lambda names: {name: tensors[name] for name in names}
