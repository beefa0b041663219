"""Faults of files that other programs write."""

from __future__ import annotations

from mutant import Mutant

_HOSTILE = "tests/formats/test_read_hostile.py"
_FOLDERS = "tests/formats/test_read_folders.py"
_TORCH = "tests/formats/test_read_torch.py"

MUTANTS = (
    Mutant(
        fault="bytes hidden behind a bintensors header",
        test=f"{_HOSTILE}::test_bytes_hidden_behind_a_bintensors_header_are_refused_where_the_library_lets_them_pass",
        path="tensorcas_mlflow/containers/_bintensors.py",
        before='        if self._data[self.at :].strip(b" ") or len(self._data) - self.at > 7:\n',
        after='        if self._data[self.at :].strip(b" ") == b"x":\n',
    ),
    Mutant(
        fault="tensors of a foreign file that share bytes or leave holes",
        test=f"{_HOSTILE}::test_a_safetensors_header_that_is_not_sound_is_refused",
        path="tensorcas_mlflow/containers/_tensor_fact.py",
        before="    if begins != ends[:-1]:\n",
        after="    if begins and begins[0]:\n",
    ),
    Mutant(
        fault="a link among shards that leads out of their folder",
        test=f"{_FOLDERS}::test_a_link_out_of_the_folder_is_refused",
        path="tensorcas_mlflow/formats/_folder.py",
        before="    if file.parent not in homes:\n",
        after="    if not homes:\n",
    ),
    Mutant(
        fault="an index of shards that says other than they do",
        test=f"{_FOLDERS}::test_an_index_that_says_other_than_the_shards_is_refused",
        path="tensorcas_mlflow/formats/_read_folders.py",
        before="    if shards != weight_map:\n",
        after="    if not shards:\n",
    ),
    Mutant(
        fault="a torch tensor that reaches beyond its storage",
        test=f"{_TORCH}::test_a_tensor_that_reaches_beyond_its_storage_is_refused",
        path="tensorcas_mlflow/formats/_pickle_places.py",
        before="        if n_bytes and begin + n_bytes > member.raw_bytes:\n",
        after="        if n_bytes and begin > member.raw_bytes:\n",
    ),
    Mutant(
        fault="a member of an exported program that nothing accounts for",
        test="tests/formats/test_read_pt2.py::test_a_payload_that_no_table_names_is_named",
        path="tensorcas_mlflow/formats/_read_pt2.py",
        before="        for path in self._left:\n",
        after="        for path in ():\n",
    ),
    Mutant(
        fault="a weight of an exported program that reaches beyond its storage",
        test="tests/formats/test_read_pt2.py::test_what_the_format_forbids_is_refused",
        path="tensorcas_mlflow/formats/_read_pt2.py",
        before="        if n_bytes and begin + n_bytes > storage.raw_bytes:\n",
        after="        if n_bytes and begin > storage.raw_bytes:\n",
    ),
    Mutant(
        fault="an example input taken for a part of the model that an export leaves out",
        test="tests/mlflow/test_exported_models.py::test_an_export_writes_the_weights",
        path="tensorcas_mlflow/exchange/_import.py",
        before="    left_out = left_out_parts(source.left_out)\n",
        after="    left_out = {name: kind for name, kind in source.left_out.items() if name}\n",
    ),
    Mutant(
        fault="a storage named for one of many tensors that see a part of it",
        test="tests/containers/test_exported.py::test_a_storage_of_which_tensors_see_parts_has_a_dtype_and_no_shape",
        path="tensorcas_mlflow/containers/_torch.py",
        before="                if path not in learned or learned[path].shape is None:\n",
        after="                if path not in learned:\n",
    ),
    Mutant(
        fault="a member of an archive that lies within another",
        test=f"{_HOSTILE}::test_members_of_a_zip_archive_that_overlap_or_lie_outside_are_refused",
        path="tensorcas_mlflow/formats/_zip_directory.py",
        before="        if not 0 <= info.header_offset - at <= gap:\n",
        after="        if info.header_offset - at > gap:\n",
    ),
    Mutant(
        fault="an .npz member whose bytes are not those of its checksum",
        test="tests/formats/test_read_files.py::test_a_damaged_member_of_an_npz_shows_by_its_checksum",
        path="tensorcas_mlflow/formats/_arrays.py",
        before="    if place.checksum and place.checksum[0] != crc:\n",
        after="    if place.checksum and crc < 0:\n",
    ),
    Mutant(
        fault="a skeleton that a foreign file brings along",
        test=f"{_FOLDERS}::test_an_index_of_serverlessllm_that_is_not_sound_is_refused",
        path="tensorcas_mlflow/formats/_places.py",
        before="        if not name or name == SKELETON:\n",
        after="        if not name:\n",
    ),
)
