"""CheckpointReader: a summary, a tensor, some rows, a layer, an expert."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np

from tensorcas_mlflow.adapter import Array, NotFilled, adapter_for
from tensorcas_mlflow.backends import ReadCounter
from tensorcas_mlflow.base.digest import digest, digest_of
from tensorcas_mlflow.base.tensors import Offsets, Spec
from tensorcas_mlflow.base.text import count_text
from tensorcas_mlflow.base.threads import Lazy, Lock
from tensorcas_mlflow.errors import PartNotFoundError, TensorNotFoundError
from tensorcas_mlflow.layout.manifests import Numbers, Specs
from tensorcas_mlflow.reader._contents import BATCH_BYTES, Contents, PartContents

if TYPE_CHECKING:
    import pyarrow as pa

    from tensorcas_mlflow.file_formats import FileHeader
    from tensorcas_mlflow.reader._outline import Naming, Outline, Part
    from tensorcas_mlflow.reader._summary import Summary


class ReadStats(NamedTuple):
    """Figures of all reads of a reader, counted at the storage."""

    read_bytes: int
    """Bytes read: tensors, manifests, the index and headers."""
    n_requests: int
    """Reads, listings and look-ups at the storage; in a local file, each read of a stretch."""
    mapped_bytes: int
    """Bytes memory-mapped. The system reads the touched pages of them, without a count."""
    n_cache_hits: int
    """Chunks read from the chunk cache on local disk."""
    read_s: float
    """Seconds with at least one call reading."""


class ReadClock:
    """Clock of the reading calls; nested calls count once."""

    def __init__(self, tally: ReadCounter) -> None:
        self._tally = tally
        self._lock = Lock()
        self._seconds = 0.0
        self._depth = 0
        self._began = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of a block; concurrent threads count once."""
        with self._lock:
            if self._depth == 0:
                self._began = time.perf_counter()
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._seconds += time.perf_counter() - self._began

    def stats(self) -> ReadStats:
        """Return the figures so far."""
        tally = self._tally
        return ReadStats(
            read_bytes=tally.n_bytes,
            n_requests=tally.n_requests,
            mapped_bytes=tally.n_mapped_bytes,
            n_cache_hits=tally.n_cached,
            read_s=self._seconds,
        )


class TensorSlice:
    """One tensor of a checkpoint; an index reads its part."""

    def __init__(self, spec: Spec, read: Callable[[Any], Any]) -> None:
        """Stand for a tensor.

        Args:
            spec: Describes it.
            read: Reads the elements of an index.
        """
        self.spec = spec
        self._read = read

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.spec.shape

    @property
    def dtype(self) -> str | None:
        """The name of its dtype."""
        return self.spec.dtype

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Read the elements of an index: whole numbers, slices, ``...``, ``None``, and one list of numbers or bools.

        Raises:
            IndexError: It is out of bounds, or of another kind.
            TensorCasError: See `CheckpointReader.tensor`.
        """
        return self._read(index)


_NUMPY = ("np", "numpy")


class Framework(Protocol):
    """Makes a framework's tensors of arrays."""

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Make tensors, by name; they share memory with the arrays if possible."""
        ...


def framework_named(name: str, device: Any = None) -> Framework:
    """Find a framework.

    Args:
        name: ``np``, ``pt`` or ``flax``, or another name for it in `safetensors.safe_open`: ``numpy``, ``torch``,
            ``pytorch``, ``jax``.
        device: The device of the tensors; by default the CPU, and for JAX its default device.

    Raises:
        ValueError: There is no such framework, it is not installed or not supported, or arrays are to go to a device.
        AdapterError: There is no such device.
    """
    is_elsewhere = device is not None and str(device) != "cpu"
    if name in _NUMPY:
        if is_elsewhere:
            raise ValueError(f"numpy's arrays are in memory and not on {str(device)!r}: ask for framework='pt'")
        return lambda arrays: dict(arrays)
    from tensorcas_mlflow.reader._frameworks import adapted

    made = adapted(name, device, is_elsewhere=is_elsewhere)
    return lambda arrays: made(arrays)


class CheckpointReader(Mapping[str, Any]):
    """One open checkpoint, model or file: a mapping of tensor names to arrays, each read on access.

    ```python
    with tensorcas.open_checkpoint("runs:/8f3c…", step=10, framework="pt") as reader:
        print(reader.summary())
        weight = reader["model.embed_tokens.weight"]
        rows = reader.get_slice("model.embed_tokens.weight")[1000:1010]
        expert = reader.expert(layer=3, expert=5)
    ```

    The reader reads only the requested content, checks every chunk against its digest, and unpickles nothing. Names are
    in the checkpoint's order. `items` and `values` read ahead, some 16 MiB at a time; ``dict(reader)`` reads one tensor
    after another, and `full` reads all of them at once. A reader compares by identity.

    An array stored raw and in one piece on this machine is a view of the memory-mapped store. It is writable; the
    changes stay in this process. If another program truncates a pack, the system kills a process that touches such a
    view (SIGBUS); `tensor` with ``copy=True`` returns an array of its own.

    The content beside the tensors (the skeleton of a model) is no tensor; only `digest` covers it. Several threads may
    use one reader.
    """

    def __init__(
        self, contents: Contents, *, framework: str = "np", device: Any = None, naming: Naming | None = None
    ) -> None:
        """Read from contents; users call `open_checkpoint` or `TensorCasStore.open`."""
        self._framework = framework_named(framework, device)
        self._watch = ReadClock(contents.tally)
        self._naming = naming
        self._take(contents)

    def _take(self, contents: Contents) -> None:
        self._contents = contents
        self.__dict__.pop("_specs", None)
        self.__dict__.pop("_outline", None)
        self.__dict__.pop("_whole_outline", None)
        self._numbers = Numbers(contents.specs)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CheckpointReader of {self.label}: {count_text(len(self), 'tensor')}>"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reader has files open and cannot be pickled: send its source, and open that there")

    def close(self) -> None:
        """Close the reader's open files; returned arrays stay valid. A second call does nothing."""
        self._contents.close()

    def below(self, prefix: str) -> CheckpointReader:
        """Return a reader of the tensors below a prefix, under the rest of their names: ``model`` of a training state.

        Args:
            prefix: Whole parts of names, with or without the dot at the end.

        Returns:
            A reader that shares the statistics of this one; closing it closes nothing.

        Raises:
            PartNotFoundError: No name begins with the prefix.
            TensorNotFoundError: All tensors below the prefix are in `left_out`.
        """
        prefix = prefix.removesuffix(".") + "."
        found = {row: name.removeprefix(prefix) for row, name in enumerate(self) if name.startswith(prefix)}
        if not found:
            self._refuse_left_out(name for name in self._unread if name.startswith(prefix))
            raise PartNotFoundError(f"tensor below {prefix!r}", self._some_names())
        rows = np.array(list(found), dtype=np.int64)
        made = object.__new__(CheckpointReader)
        made.__dict__.update(self.__dict__)
        part = PartContents(self._contents, rows, list(found.values()), label=f"{prefix}* of {self.label}")
        part.left_out = {
            name.removeprefix(prefix): kind for name, kind in self.left_out.items() if name.startswith(prefix)
        }
        made._take(part)
        return made

    # --- what there is

    @property
    def label(self) -> str:
        """The source of the tensors, in words."""
        return self._contents.label

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Plain values saved beside the tensors."""
        return self._contents.metadata

    @property
    def left_out(self) -> Mapping[str, str]:
        """Unsupported tensors of the checkpoint or file, by name, with their type (``Q4_K``, ``complex32``).

        Numpy has no dtype for them. A load returns the ones stored by an adapter; an import leaves the others out of
        the checkpoint. They are no tensors of this reader: `keys`, `items` and `full` skip them, and `match`, `layer`
        and `expert` refuse a part with one of them.
        """
        return self._contents.left_out

    @property
    def stats(self) -> ReadStats:
        """Figures of all reads since the checkpoint was opened."""
        return self._watch.stats()

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks of layers, such as ``model.layers``."""
        return self._outline.stacks

    # A mapping's comparison of values would read two checkpoints. `diff` compares digests.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._contents.specs)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs.names.to_list())

    def __getitem__(self, name: str) -> Any:
        return self.tensor(name)

    def items(self) -> ItemsView[str, Any]:
        """Return names and tensors, in order. Iterating reads the tensors some 16 MiB ahead; raises as `tensor`."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Return the tensors, in order. Iterating reads them some 16 MiB ahead; raises as `tensor`."""
        return _Values(self)

    def spec(self, name: str) -> Spec:
        """Return the name, dtype and shape of one tensor.

        Raises:
            TensorNotFoundError: There is no tensor of that name. All methods with a name raise it.
        """
        return self._contents.specs.spec(self._row(name))

    def specs(self) -> list[Spec]:
        """Return the names, dtypes and shapes of all tensors, in order."""
        return [self._specs.spec(row) for row in range(len(self))]

    def layers(self, stack: str | None = None) -> list[int]:
        """List the numbers of the layers, ascending, including those of `left_out`; see `layer`."""
        return self._whole_outline.layers(stack)

    def experts(self, layer: int, stack: str | None = None) -> list[int]:
        """List the numbers of the experts of a layer, ascending; empty if it has none; see `expert`."""
        return self._whole_outline.experts(layer, stack)

    def summary(self) -> Summary:
        """Return the tree of the checkpoint's parts with their sizes, without reading a tensor."""
        from tensorcas_mlflow.reader._summary import summarize

        return summarize(self.label, self._specs, self._outline, self.left_out)

    def table(self) -> pa.Table:
        """Return an Arrow table with a row for each tensor; DuckDB, Polars and pandas read it as it is.

        Returns:
            Columns ``name``, ``dtype``, ``shape``, ``n_bytes``, ``stack``, ``layer``, ``expert`` (these three null for
            a tensor without one) and ``digest`` (null if it takes reading the tensor).
        """
        from tensorcas_mlflow.reader._summary import table_of

        return table_of(self._contents, self._outline)

    def digest(self, name: str | None = None) -> str:
        """Return the identity of the whole checkpoint, or of one tensor: 64 hex digits.

        The digest of a checkpoint covers everything returned by a load: the tensors, their order, the skeleton, the
        metadata and the adapter; of a foreign file, all other bytes of the file. Equal digests mean equal checkpoints.
        Different digests do not mean different models: two pickles of equal objects may differ. Use `tensors_digest` to
        compare tensors alone, and files of different formats.

        The digest of a tensor covers its dtype, shape and bytes.

        Tensors and skeletons are read only if a foreign file or a store of another chunk size holds them, or if an
        adapter has cut them (trees of an ensemble).

        A reader of a part (`below`) counts all of the checkpoint's content beside the tensors as the part's.
        """
        if name is not None:
            with self._watch.running():
                return self._contents.identities(np.array([self._row(name)]))[0].hex()
        with self._watch.running():
            others = self._other_content() | {"order": digest("".join(f"{name}\0" for name in self).encode())}
            kinds = (part for kind, found in sorted(others.items()) for part in (kind.encode(), b"\0", found))
            return digest_of((bytes.fromhex(self.tensors_digest()), *kinds)).hex()

    def tensors_digest(self) -> str:
        """Return the identity of the tensors alone: 64 hex digits, equal wherever the same tensors are stored.

        It covers names, dtypes, shapes and bytes, and no order: a state in a store, in a self-contained file and in a
        safetensors file has one `tensors_digest`. It covers neither the rest (`digest`) nor `left_out`. It reads the
        same tensors as `digest`.
        """
        with self._watch.running():
            found = dict(enumerate(self._contents.known_identities()))
            left = [row for row, known in found.items() if known is None]
            found |= zip(left, self._contents.identities(np.array(left, dtype=np.int64)), strict=True)
            numbered = sorted((name, row) for row, name in enumerate(self))
            return digest_of(part for name, row in numbered for part in (name.encode(), b"\0", found[row])).hex()

    # --- reading

    def tensor(self, name: str, *, copy: bool = False) -> Any:
        """Read one tensor.

        Args:
            name: The name of the tensor.
            copy: Return an array of its own, never a view of the memory-mapped store.

        Returns:
            An array, or a tensor of the reader's framework.

        Raises:
            TensorNotFoundError: There is no tensor of that name; a `KeyError`, too.
            CorruptChunkError: A chunk of the tensor is damaged.
            ChunkNotFoundError: The store no longer holds a chunk of the tensor.
            BackendError: The storage failed.
        """
        return self._read(np.array([self._row(name)]), copy=copy)[name]

    def tensors(self, names: Iterable[str]) -> dict[str, Any]:
        """Read some tensors at once, by name, in the order of ``names``; raises as `tensor`."""
        if isinstance(names, str):
            raise TypeError(f"names are a list of texts, and {names!r:.200} is one text: pass [name], or use tensor()")
        return self._read(np.array([self._row(name) for name in names], dtype=np.int64))

    def read_into(self, outs: Mapping[str, Array]) -> None:
        """Read some tensors at once into arrays; raises as `tensor`, with the arrays filled in part.

        Args:
            outs: Arrays by name: of the tensor's dtype and shape, writable, in C order, and apart in memory.
        """
        rows = np.array([self._row(name) for name in outs], dtype=np.int64)
        with self._watch.running():
            self._contents.arrays(rows, dict(enumerate(outs.values())))

    def full(self) -> dict[str, Any]:
        """Read all tensors at once, by name, in order; raises as `tensor`."""
        return self._read(np.arange(len(self._specs)))

    def _read_ahead(self) -> Iterator[tuple[str, Any]]:
        """Read all tensors one after another, some 16 MiB ahead."""
        ends = self._specs.n_bytes.cumsum()
        first = 0
        while first < len(self):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
            yield from self._read(np.arange(first, last)).items()
            first = last

    def match(self, pattern: str) -> dict[str, Any]:
        """Read the tensors with names that match a pattern.

        Args:
            pattern: A pattern as for files; dots are plain characters: ``model.layers.*.self_attn.*``.

        Returns:
            Tensors by name, in order; at least one.

        Raises:
            PartNotFoundError: No name matches.
            TensorNotFoundError: One of the names is in `left_out`.
            TensorCasError: See `tensor`.
        """
        matches = _matcher(pattern)
        self._refuse_left_out(filter(matches, self._unread))
        rows = np.array([row for row, name in enumerate(self) if matches(name)], dtype=np.int64)
        if not len(rows):
            raise PartNotFoundError(f"tensor with a name like {pattern!r}", self._some_names())
        return self._read(rows)

    def layer(self, number: int, *, stack: str | None = None) -> dict[str, Any]:
        """Read one layer.

        Args:
            number: The number in the names. The blocks of a ResNet count from 0 through all its stages.
            stack: The stack of the layer, if `stacks` has several: ``encoder.layers``.

        Returns:
            The layer's tensors by their whole names, in order.

        Raises:
            PartNotFoundError: There is no such layer.
            TensorNotFoundError: One of its tensors is in `left_out`.
            TypeError: ``number`` is not a number.
            ValueError: There are several stacks, and ``stack`` names none.
            TensorCasError: See `tensor`.
        """
        rows = self._whole_outline.rows_of_layer(number, stack)
        self._refuse_left_out_rows(rows)
        return self._read(rows)

    def expert(self, layer: int, expert: int, *, stack: str | None = None) -> dict[str, Any]:
        """Read one expert of a layer: its tensors, or its rows of a tensor of all experts. Raises as `layer`.

        Args:
            layer: See `layer`.
            expert: The number of the expert.
            stack: See `layer`.
        """
        outline = self._whole_outline
        self._refuse_left_out_rows(outline.rows_for_expert(layer, expert, stack))
        parts = outline.parts_of_expert(layer, expert, stack)
        whole = self._read(np.array([part.row for part in parts if part.rows is None], dtype=np.int64))
        with self._watch.running():
            found = {self._specs.name(part.row): part for part in parts}
            sliced = {name: self._rows(part) for name, part in found.items() if part.rows is not None}
        made = self._framework(sliced)
        return {name: whole[name] if name in whole else made[name] for name in found}

    def rows(self, name: str, rows: slice | int) -> Any:
        """Read some rows of axis 0 of one tensor. As in numpy, a slice may end behind the last row.

        Raises:
            IndexError: There is no such row.
            TypeError: It is an index of several axes; see `get_slice`.
            TensorCasError: See `tensor`.
        """
        if isinstance(rows, tuple):
            raise TypeError(f"rows are a slice, a number or a list of numbers, and not {rows!r:.200}: use get_slice()")
        return self.get_slice(name)[rows]

    def get_slice(self, name: str) -> TensorSlice:
        """Return a view of one tensor for numpy's indices; an index reads only the chunks it touches."""
        row = self._row(name)
        return TensorSlice(self._contents.specs.spec(row), partial(self._select, row))

    def slices(self, wanted: Iterable[tuple[str, Any]]) -> list[Any]:
        """Read parts of several tensors in one call. Small parts are read together, which is faster than one by one.

        Args:
            wanted: Names, and indices as `get_slice` takes them. A tensor may come several times.

        Returns:
            One part for each item of ``wanted``, in its order.

        Raises:
            IndexError: An index is out of bounds, or of a type that is not supported.
            TensorCasError: See `tensor`.
        """
        from tensorcas_mlflow.reader._slices import select

        rows = [(self._row(name), index) for name, index in wanted]
        parts = [(row, select(self._contents.specs.shape(row), index)) for row, index in rows]
        with self._watch.running():
            arrays = self._contents.select_each(parts)
        names = self._names(np.array([row for row, _ in parts], dtype=np.int64))
        return [self._framework({name: array})[name] for name, array in zip(names, arrays, strict=True)]

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        """Read tensors one after another as pieces of bytes, holding some 16 MiB; raises as `tensor`."""
        rows = np.array([self._row(name) for name in names], dtype=np.int64)
        batches = self._contents.batches(rows)
        while True:
            with self._watch.running():
                batch = next(batches, None)
            if batch is None:
                return
            for name, (_, data) in zip(self._names(np.array([row for row, _ in batch])), batch, strict=True):
                if len(data):
                    yield name, data

    def load_into(
        self,
        model: Any,
        *,
        match: str | None = None,
        prefix: str = "",
        strict: bool = True,
        device: Any = None,
        precheck: bool = True,
    ) -> NotFilled:
        """Fill a live model, or a part of it, in place, without unpickling.

        A load of at most 32 MiB reads the tensors into new memory first. A larger one reads some at a time, most of
        them straight into the model's memory. Tensors without memory (PyTorch's meta device) are allocated as they are
        filled. Everything is checked before the model changes: names, dtypes, shapes and, if they have digests and are
        on this machine, the stored bytes of all tensors to fill. A reader opened with ``verify=False`` omits the check
        of stored bytes.

        Args:
            model: A PyTorch module.
            match: Fill only tensors with names in the model that match this pattern; see `match`.
            prefix: The prefix of the names here, before the names of the model: ``model`` in a training state saved as
                ``{"model": module}``.
            strict: Refuse any tensor of the model missing in the checkpoint, and any stored tensor missing in the
                model.
            device: The device of tensors without memory so far; by default the CPU.
            precheck: Check the stored bytes of all tensors before the model changes. False reads them once, and checks
                each chunk as it is read: damage then leaves a model of more than 32 MiB filled in part, and a note of
                the error says so.

        Returns:
            The unfilled names.

        Raises:
            AdapterError: The tensors do not fit, or ``match`` matches no name; the message lists all misfits, and
                nothing is changed.
            PartNotFoundError: No name begins with ``prefix``.
            TensorCasError: See `tensor`. If the storage fails after the check, or a store on another machine has a
                damaged tensor, the model may be filled in part; then a note of the error says so.
        """
        if prefix:
            part = self.below(prefix)
            return part.load_into(model, match=match, strict=strict, device=device, precheck=precheck)
        stored = dict(zip(self._numbers.numbers, self._specs.facts(), strict=True))
        wanted = None if match is None else _matcher(match)
        check = self._check if precheck and self._contents.can_check else None
        return adapter_for(model).fill_weights(
            model, stored, self._read_into, check=check, wanted=wanted, strict=strict, device=device
        )

    # --- for the other modules of this package

    def _row_of(self) -> Mapping[str, int]:
        """Return the row of each tensor by its name, in order."""
        return self._numbers.numbers

    def _identity_bytes(self, rows: Offsets) -> list[bytes]:
        """Return the bytes that identify tensors; see `Contents.identity_bytes`."""
        with self._watch.running():
            return self._contents.identity_bytes(rows)

    def _file_header(self) -> FileHeader | None:
        """Return the header of the file that the tensors come from; see `Contents.file_header`."""
        return self._contents.file_header()

    def _other_content(self) -> dict[str, bytes]:
        """Return the content beside the tensors; see `Contents.other_content`."""
        with self._watch.running():
            return self._contents.other_content()

    def _tensor_bytes(self) -> dict[str, int]:
        """Return the sizes of all tensors, by name."""
        return dict(zip(self, self._contents.specs.n_bytes.tolist(), strict=True))

    def _n_bytes_of(self, names: Iterable[str]) -> int:
        """Add up the sizes of some tensors."""
        rows = np.array([self._row(name) for name in names], dtype=np.int64)
        return int(self._contents.specs.n_bytes[rows].sum())

    # --- inside

    def _row(self, name: str) -> int:
        if not isinstance(name, str):
            raise TypeError(f"tensors are named by texts, and {name!r:.200} is none")
        try:
            return self._numbers.number(name)
        except KeyError:
            raise TensorNotFoundError(name, self.left_out.get(name)) from None

    @property
    def _unread(self) -> dict[str, str]:
        """Unreadable tensors of the model itself."""
        if not self.left_out:
            return {}
        from tensorcas_mlflow.file_formats import left_out_parts

        return left_out_parts(self.left_out)

    @Lazy
    def _specs(self) -> Specs:
        """Names, dtypes and shapes of all tensors, each name once.

        A read of one tensor finds its name in place and does not need this: the check builds a string for each name.
        """
        self._numbers.numbers  # noqa: B018 -- builds the table and so checks it
        return self._contents.specs

    @Lazy
    def _outline(self) -> Outline:
        """Outline of the tensors."""
        from tensorcas_mlflow.reader._outline import Outline

        return Outline(self._specs, self._naming)

    @Lazy
    def _whole_outline(self) -> Outline:
        """Outline of all tensors, with the unsupported ones at the end."""
        if not self._unread:
            return self._outline
        from tensorcas_mlflow.reader._outline import Outline

        unread = [Spec(name=name, dtype=None, shape=(0,)) for name in self._unread]
        return Outline(Specs.of([*self.specs(), *unread]), self._naming)

    def _refuse_left_out_rows(self, rows: Offsets) -> None:
        names = list(self._unread)
        self._refuse_left_out(names[row - len(self)] for row in rows.tolist() if row >= len(self))

    def _refuse_left_out(self, names: Iterable[str]) -> None:
        """Raise if one of the requested tensors is unsupported."""
        for name in names:
            raise TensorNotFoundError(name, self.left_out[name])

    def _some_names(self) -> str:
        names = list(self)[:5]
        more = " …" if len(self) > len(names) else ""
        return f"its tensors are {', '.join(names)}{more}" if names else "it has no readable tensor"

    def _read_into(self, names: Sequence[str], *, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        rows = self._rows_named(names)
        outs = {} if out is None else {at: out[name] for at, name in enumerate(names)}
        with self._watch.running():
            return dict(zip(names, self._contents.arrays(rows, outs, copy=True), strict=True))

    def _rows_named(self, names: Sequence[str]) -> Offsets:
        """Return the numbers of existing tensors."""
        return np.fromiter(map(self._numbers.numbers.__getitem__, names), dtype=np.int64, count=len(names))

    def _check(self, names: Sequence[str]) -> None:
        rows = self._rows_named(names)
        with self._watch.running():
            self._contents.check(rows)

    def _read(self, rows: Offsets, *, copy: bool = False) -> dict[str, Any]:
        with self._watch.running():
            arrays = self._contents.arrays(rows)
        if copy:
            arrays = [np.array(array, order="C") for array in arrays]
        return self._framework(dict(zip(self._names(rows), arrays, strict=True)))

    def _names(self, rows: Offsets) -> list[str]:
        return [self._contents.specs.name(row) for row in rows.tolist()]

    def _rows(self, part: Part) -> Array:
        from tensorcas_mlflow.reader._slices import select

        assert part.rows is not None
        index: Any = part.rows.start if part.is_one else part.rows
        return self._contents.select(part.row, select(self._specs.shape(part.row), index))

    def _select(self, row: int, index: Any) -> Any:
        from tensorcas_mlflow.reader._slices import select

        selection = select(self._contents.specs.shape(row), index)
        with self._watch.running():
            array = self._contents.select(row, selection)
        name = self._contents.specs.name(row)
        return self._framework({name: array})[name]


class _Items(ItemsView[str, Any]):
    _mapping: CheckpointReader

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._mapping._read_ahead()


class _Values(ValuesView[Any]):
    _mapping: CheckpointReader

    def __iter__(self) -> Iterator[Any]:
        return (tensor for _, tensor in self._mapping._read_ahead())


def _matcher(pattern: str) -> Callable[[str], bool]:
    matches = re.compile(fnmatch.translate(pattern)).match
    return lambda name: matches(name) is not None
