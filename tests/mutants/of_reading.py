"""Faults of reading parts of a checkpoint: other bytes, bytes that nobody has looked at, more memory than there is."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="two models that differ in small values only",
        test="test_models_that_differ_in_small_values_only_are_told_apart",
        definition="RowContents.other_content",
        before='found["skeleton"] = identities.pop(names.index(SKELETON))',
        after="identities.pop(names.index(SKELETON))",
    ),
    Mutant(
        fault="files of equal tensors and other bytes beside them",
        test="test_files_of_equal_tensors_and_another_epoch_differ[a_file]",
        definition="ListedContents.other_content",
        before='digest_of_metadata(self.metadata) | {"bytes": digest_of(files)}',
        after="digest_of_metadata(self.metadata)",
    ),
    Mutant(
        fault="bytes of a file that strides leave out",
        test="test_bytes_that_strides_leave_out_are_compared",
        definition="_has_each_byte",
        before="return False",
        after="return True",
    ),
    Mutant(
        fault="an expert of a number that says that a tensor is of none",
        test="test_part_that_does_not_exist_is_refused[a_local_store]",
        definition="Outline.parts_of_expert",
        before="(found.expert[rows] == expert) & (found.expert[rows] != _NONE)",
        after="found.expert[rows] == expert",
    ),
    Mutant(
        fault="a layer of which a tensor cannot be read",
        test="test_layer_with_an_unreadable_tensor_is_refused",
        definition="CheckpointReader.layer",
        before="""
            self._refuse_left_out_rows(rows)
            return self._read(rows)
        """,
        after="return self._read(rows[rows < len(self)])",
    ),
    Mutant(
        fault="two arrays to read into that share memory",
        test="test_arrays_to_read_into_that_share_memory_are_refused[0]",
        definition="check_outs",
        before="_check_apart(out)",
        after="",
    ),
    Mutant(
        fault="damage in a chunk that a slice touches",
        test="test_every_way_of_reading_finds_damage[rows]",
        definition="StoredContents.read_chunks",
        before="self._verify",
        after="False",
    ),
    Mutant(
        fault="damage in a tensor that is mapped",
        test="test_every_way_of_reading_finds_damage[layer]",
        definition="ChunkReader._rows",
        before="digests if verify else None",
        after="None",
    ),
    Mutant(
        fault="somebody who writes into what was read",
        test="test_writing_into_a_tensor_that_was_read_changes_nothing_stored",
        definition="map_privately",
        before="mmap.mmap(...)",
        after="mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)",
    ),
    Mutant(
        fault="somebody who writes into a tensor of a file of this machine",
        test="test_writing_into_a_tensor_does_not_change_its_file",
        definition="LocalFile.__init__",
        before="map_privately(self._descriptor, self.size)",
        after="mmap.mmap(os.open(path, os.O_RDWR), self.size)",
    ),
    Mutant(
        fault="experts that are rows of one tensor",
        test="test_one_of_many_experts_in_one_tensor_comes_alone",
        definition="Outline.parts_of_expert",
        before="slice(expert * n_rows, (expert + 1) * n_rows)",
        after="slice((expert + 1) * n_rows, (expert + 2) * n_rows)",
    ),
    Mutant(
        fault="tensors of equal bytes and another dtype",
        test="test_a_digest_tells_names_dtypes_shapes_and_bytes_apart_and_no_order",
        definition="identity_of",
        before=r'(dtype or "").encode() + b"\0"',
        after=r'b"\0"',
    ),
    Mutant(
        fault="equal tensors in stores of other chunk sizes",
        test="test_equal_tensors_have_one_digest_wherever_they_are_kept",
        definition="RowContents._known",
        before="""
            if self.manifest.chunk_bytes != DEFAULT_CHUNK_BYTES:
                return None
        """,
        after="",
    ),
    Mutant(
        fault="equal tensors of which one is cut at places of its own",
        test="test_cuts_do_not_change_a_digest",
        definition="RowContents.known_identities",
        before="has_cuts is None or not has_cuts[stored]",
        after="True",
    ),
    Mutant(
        fault="a manifest that calls a tensor the skeleton",
        test="test_a_skeleton_is_no_tensor_whatever_a_manifest_says_of_it",
        definition="_tensor_rows",
        before="is_tensor[columns.names.find(SKELETON)] = False",
        after="",
    ),
    Mutant(
        fault="a stretch of another size where a tensor of a stored file begins",
        test="test_a_stored_file_gives_what_the_file_gives[views.pt-4096]",
        definition="StoredFileContents._rows_at",
        before="(starts[rows] == begins) & (sizes[rows] == wanted) & (wanted > 0)",
        after="wanted > 0",
    ),
    Mutant(
        fault="an array of a stored npz file that does not have its CRC-32",
        test="test_bytes_that_do_not_have_the_checksum_of_their_file_are_never_given_whole",
        definition="StoredFileContents.arrays",
        before="self.listing.check(place, bytes_of(array))",
        after="",
    ),
    Mutant(
        fault="an npz file that is streamed",
        test="test_bytes_that_do_not_have_the_checksum_of_their_file_are_never_given_whole",
        definition="ListedContents.pieces",
        before="place.is_plain and not place.checksum",
        after="place.is_plain",
    ),
    Mutant(
        fault="a slice that goes backwards down to the first row",
        test="test_an_index_finds_in_what_was_read_what_numpy_finds_in_all",
        definition="_moved",
        before="None if step < 0 and stop < 0 else stop",
        after="stop",
    ),
    Mutant(
        fault="a large selection that goes backwards",
        test="test_a_selection_that_is_divided_is_put_together_again",
        definition="_of_places",
        before="-1 if part.step is not None and part.step < 0 else None",
        after="None",
    ),
    Mutant(
        fault="a chunk that lies over the end of what was asked for",
        test="test_a_slice_is_what_numpy_makes_of_the_whole",
        definition="ChunksToFill.finish",
        before="data[low - begin : high - begin]",
        after="data[: high - low]",
    ),
    Mutant(
        fault="a file of more bytes than the machine has memory",
        test="test_reader_reads_parts_of_a_file_larger_than_memory[0]",
        definition="LocalFile.__init__",
        before="""
            with contextlib.suppress(OSError, ValueError):
                self._mapped = map_privately(self._descriptor, self.size)
        """,
        after="self._mapped = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_COPY)",
    ),
    Mutant(
        fault="a column of a large tensor",
        test="test_reading_a_part_holds_little_memory_besides_it",
        definition="Contents.select",
        before="selection.is_one_run or self._is_small(row, selection)",
        after="len(selection.starts)",
    ),
    Mutant(
        fault="a shape with more rows than anybody has experts",
        test="test_a_shape_makes_no_experts_that_nobody_has[shape0]",
        definition="Outline._fused",
        before="0 < n_experts <= _MOST_EXPERTS",
        after="0 < n_experts <= 1 << 20",
    ),
    Mutant(
        fault="layers 2 and 12 behind anything",
        test="test_a_number_beside_anything_is_a_whole_one",
        definition="_regex",
        before='r"(?:[^.]*[^.0-9])?(?P"',
        after='r"[^.]*(?P"',
    ),
    Mutant(
        fault="one of two files that is cut off",
        test="test_file_beside_a_damaged_one_is_not_opened_alone",
        definition="_the_one",
        before="isinstance(error, CorruptError | NewerFormatError) or _is_of_tensors(error)",
        after="isinstance(error, CorruptError | NewerFormatError)",
    ),
    Mutant(
        fault="parts of one chunk that each hold a copy of it",
        test="test_slices_of_parts_of_one_chunk_hold_little_memory_besides_them",
        definition="RowContents.select_each",
        before="windows[at].nbytes + fills[-1][1].n_bytes_aside",
        after="windows[at].nbytes",
    ),
    Mutant(
        fault="a store of many small chunks, checked as one shard",
        test="test_shards_have_few_rows_where_chunks_are_small",
        definition="divide",
        before="np.bincount(shard.pack, minlength=n_packs) / max(1, n_rows)",
        after="0",
    ),
)
