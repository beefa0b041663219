"""Faults of reading parts of a checkpoint: other bytes, bytes that nobody has looked at, more memory than there is."""

from __future__ import annotations

from mutant import Mutant

_DIGEST = "tests/reader/test_digest.py"
_FILES = "tests/reader/test_files.py"
_LEFT_OUT = "tests/reader/test_left_out.py"
_LARGE = "tests/reader/test_large.py"
_OUTLINE = "tests/reader/test_outline.py"
_READER = "tests/reader/test_reader.py"
_SLICES = "tests/reader/test_slices.py"

MUTANTS = (
    Mutant(
        fault="two models that differ in small values only",
        test=f"{_DIGEST}::test_models_that_differ_in_small_values_only_are_told_apart",
        path="tensorcas_mlflow/reader/_stored.py",
        before='            found["skeleton"] = identities.pop(names.index(SKELETON))\n',
        after="            identities.pop(names.index(SKELETON))\n",
    ),
    Mutant(
        fault="files of equal tensors and other bytes beside them",
        test=f"{_DIGEST}::test_files_of_equal_tensors_and_another_epoch_differ[a_file]",
        path="tensorcas_mlflow/reader/_listed.py",
        before='        return digest_of_metadata(self.metadata) | {"bytes": digest_of(files)}\n',
        after="        return digest_of_metadata(self.metadata)\n",
    ),
    Mutant(
        fault="bytes of a file that strides leave out",
        test=f"{_DIGEST}::test_bytes_that_strides_leave_out_are_compared",
        path="tensorcas_mlflow/reader/_stretches.py",
        before="            if stride != n_elements:\n                return False\n",
        after="            if stride != n_elements:\n                return True\n",
    ),
    Mutant(
        fault="an expert of a number that says that a tensor is of none",
        test=f"{_READER}::test_what_names_no_part_is_refused[a_local_store]",
        path="tensorcas_mlflow/reader/_outline.py",
        before="        is_its = (found.expert[rows] == expert) & (found.expert[rows] != _NONE)\n        parts",
        after="        is_its = found.expert[rows] == expert\n        parts",
    ),
    Mutant(
        fault="a layer of which a tensor cannot be read",
        test=f"{_LEFT_OUT}::test_a_part_of_which_a_tensor_cannot_be_read_is_refused",
        path="tensorcas_mlflow/reader/_reader.py",
        before="        self._refuse_left_out_rows(rows)\n        return self._read(rows)\n",
        after="        return self._read(rows[rows < len(self)])\n",
    ),
    Mutant(
        fault="two arrays to read into that share memory",
        test="tests/store/test_ways_of_reading.py::test_arrays_to_read_into_that_share_memory_are_refused[0]",
        path="tensorcas_mlflow/store/_target.py",
        before="    _check_apart(out)\n",
        after="",
    ),
    Mutant(
        fault="damage in a chunk that a slice touches",
        test=f"{_READER}::test_damage_is_found_by_whatever_reads_it[rows]",
        path="tensorcas_mlflow/reader/_stored.py",
        before="list(outs), verify=self._verify, owner=owner)",
        after="list(outs), verify=False, owner=owner)",
    ),
    Mutant(
        fault="damage in a tensor that is mapped",
        test=f"{_READER}::test_damage_is_found_by_whatever_reads_it[layer]",
        path="tensorcas_mlflow/store/_read.py",
        before="            chosen = digests if verify else None\n",
        after="            chosen = None\n",
    ),
    Mutant(
        fault="somebody who writes into what was read",
        test=f"{_READER}::test_what_was_read_can_be_written_to_and_changes_nothing",
        path="tensorcas_mlflow/_mapping.py",
        before="flags=mmap.MAP_PRIVATE | _NORESERVE, prot=_TO_BE_WRITTEN, offset",
        after="flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset",
    ),
    Mutant(
        fault="somebody who writes into a tensor of a file of this machine",
        test=f"{_FILES}::test_what_is_written_into_a_tensor_does_not_reach_the_file",
        path="tensorcas_mlflow/formats/_source.py",
        before="                self._mapped = map_privately(self._descriptor, self.size)\n",
        after="                self._mapped = mmap.mmap(os.open(path, os.O_RDWR), self.size)\n",
    ),
    Mutant(
        fault="experts that are rows of one tensor",
        test=f"{_READER}::test_one_of_many_experts_in_one_tensor_comes_alone",
        path="tensorcas_mlflow/reader/_outline.py",
        before="slice(expert * n_rows, (expert + 1) * n_rows)",
        after="slice((expert + 1) * n_rows, (expert + 2) * n_rows)",
    ),
    Mutant(
        fault="tensors of equal bytes and another dtype",
        test=f"{_READER}::test_a_digest_tells_names_dtypes_shapes_and_bytes_apart_and_no_order",
        path="tensorcas_mlflow/reader/_contents.py",
        before='digest((dtype or "").encode() + b"\\0" + struct',
        after='digest(b"\\0" + struct',
    ),
    Mutant(
        fault="equal tensors in stores of other chunk sizes",
        test=f"{_READER}::test_equal_tensors_have_one_digest_wherever_they_are_kept",
        path="tensorcas_mlflow/reader/_stored.py",
        before="        if self.manifest.chunk_bytes != DEFAULT_CHUNK_BYTES:\n            return None\n"
        "        has_cuts",
        after="        has_cuts",
    ),
    Mutant(
        fault="equal tensors of which one is cut at places of its own",
        test=f"{_READER}::test_cuts_are_nothing_that_a_digest_sees",
        path="tensorcas_mlflow/reader/_stored.py",
        before="                is_known = has_cuts is None or not has_cuts[stored]\n",
        after="                is_known = True\n",
    ),
    Mutant(
        fault="a manifest that calls a tensor the skeleton",
        test=f"{_FILES}::test_a_skeleton_is_no_tensor_whatever_a_manifest_says_of_it[checkpoint]",
        path="tensorcas_mlflow/reader/_stored.py",
        before="    is_tensor[columns.find(SKELETON)] = False\n",
        after="",
    ),
    Mutant(
        fault="a stretch of another size where a tensor of a stored file begins",
        test=f"{_FILES}::test_a_stored_file_gives_what_the_file_gives[views.pt-4096]",
        path="tensorcas_mlflow/reader/_listed.py",
        before="(starts[rows] == begins) & (sizes[rows] == wanted) & (wanted > 0)",
        after="(wanted > 0)",
    ),
    Mutant(
        fault="an array of a stored npz file that does not have its CRC-32",
        test=f"{_FILES}::test_bytes_that_do_not_have_the_checksum_of_their_file_are_never_given_whole",
        path="tensorcas_mlflow/reader/_listed.py",
        before="                self.listing.check(place, bytes_of(array))\n",
        after="",
    ),
    Mutant(
        fault="an npz file that is streamed",
        test=f"{_FILES}::test_bytes_that_do_not_have_the_checksum_of_their_file_are_never_given_whole",
        path="tensorcas_mlflow/reader/_listed.py",
        before="        if place.is_plain and not place.checksum:\n            return super()",
        after="        if place.is_plain:\n            return super()",
    ),
    Mutant(
        fault="a slice that goes backwards down to the first row",
        test=f"{_SLICES}::test_an_index_finds_in_what_was_read_what_numpy_finds_in_all",
        path="tensorcas_mlflow/reader/_slices.py",
        before="None if step < 0 and stop < 0 else stop",
        after="stop",
    ),
    Mutant(
        fault="a large selection that goes backwards",
        test=f"{_SLICES}::test_a_selection_that_is_divided_is_put_together_again",
        path="tensorcas_mlflow/reader/_slices.py",
        before="-1 if part.step is not None and part.step < 0 else None",
        after="None",
    ),
    Mutant(
        fault="a chunk that lies over the end of what was asked for",
        test=f"{_READER}::test_a_slice_is_what_numpy_makes_of_the_whole",
        path="tensorcas_mlflow/reader/_stored.py",
        before="        block[low:high] = data[low - begin : high - begin]\n",
        after="        block[low:high] = data[: high - low]\n",
    ),
    Mutant(
        fault="a file of more bytes than the machine has memory",
        test=f"{_LARGE}::test_of_a_file_that_is_larger_than_memory_parts_are_read[0]",
        path="tensorcas_mlflow/formats/_source.py",
        before="            with contextlib.suppress(OSError, ValueError):  # what cannot be mapped is read\n"
        "                self._mapped = map_privately(self._descriptor, self.size)\n",
        after="            self._mapped = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_COPY)\n",
    ),
    Mutant(
        fault="a column of a large tensor",
        test=f"{_LARGE}::test_little_is_held_besides_what_was_asked_for",
        path="tensorcas_mlflow/reader/_contents.py",
        before="        if selection.is_one_run or self._is_small(row, selection):\n",
        after="        if len(selection.starts):\n",
    ),
    Mutant(
        fault="a shape with more rows than anybody has experts",
        test=f"{_OUTLINE}::test_a_shape_makes_no_experts_that_nobody_has[shape0]",
        path="tensorcas_mlflow/reader/_outline.py",
        before="        if not 0 < n_experts <= _MOST_EXPERTS:\n",
        after="        if not 0 < n_experts <= 1 << 20:\n",
    ),
    Mutant(
        fault="layers 2 and 12 behind anything",
        test=f"{_OUTLINE}::test_a_number_beside_anything_is_a_whole_one",
        path="tensorcas_mlflow/reader/_naming.py",
        before='r"(?:[^.]*[^.0-9])?(?P")',
        after='r"[^.]*(?P")',
    ),
    Mutant(
        fault="one of two shards that is cut off",
        test="tests/mlflow/test_open_checkpoint.py::test_of_a_checkpoint_in_shards_none_is_opened_alone",
        path="tensorcas_mlflow/flavor/_open.py",
        before=" or _is_of_tensors(error):\n",
        after=":\n",
    ),
)
