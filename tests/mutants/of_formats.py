"""Faults of files that other programs write."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="bytes hidden behind a bintensors header",
        test="test_bytes_hidden_behind_a_bintensors_header_are_refused_where_the_library_lets_them_pass",
        definition="_HeaderReader.end",
        before='self._data[self.at :].strip(b" ") or len(self._data) - self.at > 7',
        after='self._data[self.at :].strip(b" ") == b"x"',
    ),
    Mutant(
        fault="tensors of a foreign file that share bytes or leave holes",
        test="test_a_safetensors_header_that_is_not_sound_is_refused",
        definition="sorted_entries",
        before="begins != ends[:-1]",
        after="begins and begins[0]",
    ),
    Mutant(
        fault="a link among shards that leads out of their folder",
        test="test_a_link_out_of_the_folder_is_refused",
        definition="file_in",
        before="file.parent not in homes",
        after="not homes",
    ),
    Mutant(
        fault="an index of shards that says other than they do",
        test="test_an_index_that_says_other_than_the_shards_is_refused",
        definition="_list_indexed",
        before="shards != weight_map",
        after="not shards",
    ),
    Mutant(
        fault="a torch tensor that reaches beyond its storage",
        test="test_a_tensor_that_reaches_beyond_its_storage_is_refused",
        definition="LocationTable.add_view",
        before="begin + n_bytes > storage.raw_bytes",
        after="begin > storage.raw_bytes",
    ),
    Mutant(
        fault="a member of an exported program that nothing accounts for",
        test="test_a_payload_that_no_table_names_is_named",
        definition="_Archive.listing",
        before="""
            for path in self._left:
                ...
        """,
        after="",
    ),
    Mutant(
        fault="a weight of an exported program that reaches beyond its storage",
        test="test_entry_that_the_pt2_format_forbids_is_refused",
        definition="LocationTable.add_view",
        before="n_bytes and begin + n_bytes > storage.raw_bytes",
        after="n_bytes > storage.raw_bytes",
    ),
    Mutant(
        fault="an example input taken for a part of the model that an export leaves out",
        test="test_an_export_writes_the_weights",
        definition="check_left_out",
        before="left_out_parts(source.left_out)",
        after="{name: kind for name, kind in source.left_out.items() if name}",
    ),
    Mutant(
        fault="a storage named for one of many tensors that see a part of it",
        test="test_a_storage_of_which_tensors_see_parts_has_a_dtype_and_no_shape",
        definition="StorageTables._learn",
        before="path not in learned or learned[path].shape is None",
        after="path not in learned",
    ),
    Mutant(
        fault="a member of an archive that lies within another",
        test="test_members_of_a_zip_archive_that_overlap_or_lie_outside_are_refused",
        definition="list_members",
        before="not 0 <= info.header_offset - at <= gap",
        after="info.header_offset - at > gap",
    ),
    Mutant(
        fault="an .npz member whose bytes are not those of its checksum",
        test="test_a_damaged_member_of_an_npz_shows_by_its_checksum",
        definition="_check_crc",
        before="location.checksum[0] != crc",
        after="crc < 0",
    ),
    Mutant(
        fault="a skeleton that a foreign file brings along",
        test="test_an_index_of_serverlessllm_that_is_not_sound_is_refused",
        definition="LocationTable._check_name",
        before="not name or name == SKELETON",
        after="not name",
    ),
)
