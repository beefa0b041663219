"""Faults that somebody means: forged bytes, links, names, and secrets in what is told."""

from __future__ import annotations

from mutant import Mutant

_PARSERS = "tests/hostile/test_parsers.py::test_damaged_bytes_are_read_or_refused_with_our_own_errors"
_FORGERIES = "tests/hostile/test_forgeries.py"
_LINKS = "tests/hostile/test_links.py"
_SECRETS = "tests/hostile/test_secrets.py"

MUTANTS = (
    Mutant(
        fault="offsets in a manifest that lead out of its buffers",
        test=f"{_PARSERS}[manifest]",
        path="tensorcas_mlflow/_arrow.py",
        before="        _validate(column)\n",
        after="        pass\n",
    ),
    Mutant(
        fault="an index segment that unpacks to more than it has",
        test=f"{_FORGERIES}::test_an_index_segment_is_not_unpacked",
        path="tensorcas_mlflow/_arrow.py",
        before="    _check_messages(stream, what)\n",
        after="",
    ),
    Mutant(
        fault="a manifest whose shapes do not fit 64 bits",
        test=f"{_FORGERIES}::test_a_shape_that_cannot_be_costs_nothing",
        path="tensorcas_mlflow/manifest/_checks.py",
        before="    if about.max() > 2 * MAX_TENSOR_BYTES or ",
        after="    if ",
    ),
    Mutant(
        fault="other bytes under a chunk's name, with digests that fit them",
        test=f"{_FORGERIES}::test_other_bytes_under_a_chunks_name_are_never_given_out",
        path="tensorcas_mlflow/store/_take.py",
        before='    if b"".join(actual) == expected.tobytes():\n',
        after="    if actual:\n",
    ),
    Mutant(
        fault="a manifest under another's name",
        test=f"{_FORGERIES}::test_a_manifest_under_anothers_name_is_damage",
        path="tensorcas_mlflow/manifest/_manifest.py",
        before="if actual != name[: 2 * DIGEST_BYTES]:",
        after="if name == '':",
    ),
    Mutant(
        fault="a record that goes deeper than JSON is read",
        test=f"{_PARSERS}[intent]",
        path="tensorcas_mlflow/store/_records.py",
        before="(ValueError, RecursionError) as error:\n            raise CorruptError(info.key",
        after="ValueError as error:\n            raise CorruptError(info.key",
    ),
    Mutant(
        fault="a metric of four hundred digits",
        test=f"{_PARSERS}[ref]",
        path="tensorcas_mlflow/store/_records.py",
        before="        with suppress(OverflowError):  # JSON has numbers of any size\n",
        after="        with suppress(MemoryError):\n",
    ),
    Mutant(
        fault="a condemned list that names what is no pack",
        test=f"{_PARSERS}[condemned list]",
        path="tensorcas_mlflow/store/_condemned.py",
        before="packs=frozenset(filter(is_pack_name, packs)),",
        after="packs=frozenset(packs),",
    ),
    Mutant(
        fault="a file of the chunk cache whose extents are not its payload",
        test=f"{_PARSERS}[file of the chunk cache]",
        path="tensorcas_mlflow/extent_cache/_file.py",
        before="    if int(sizes.sum()) != payload_bytes or not sizes.all():\n",
        after="    if False:\n",
    ),
    Mutant(
        fault="a folder of packs that is a link to another store's",
        test=f"{_LINKS}::test_a_collection_deletes_no_packs_behind_a_link",
        path="tensorcas_mlflow/backends/_local.py",
        before="    if os.path.islink(folder):\n",
        after="    if folder == key:\n",
    ),
    Mutant(
        fault="a link deep among refs",
        test=f"{_LINKS}::test_what_a_folder_of_a_store_links_to_stays_as_it_is",
        path="tensorcas_mlflow/backends/_local.py",
        before="elif (entry.is_symlink() or entry.is_file(follow_symlinks=False)) and not",
        after="elif entry.is_file(follow_symlinks=False) and not",
    ),
    Mutant(
        fault="a pipe in the place of a blob",
        test=f"{_LINKS}::test_a_blob_that_is_a_pipe_is_not_waited_for",
        path="tensorcas_mlflow/backends/_local.py",
        before="            if not stat.S_ISREG(os.fstat(descriptor).st_mode):\n",
        after="            if descriptor < 0:\n",
    ),
    Mutant(
        fault="objects whose names lead out of the folder they are copied to",
        test=f"{_LINKS}::test_a_copy_tells_of_objects_whose_names_lead_elsewhere_and_leaves_them",
        path="tensorcas_mlflow/backends/_names.py",
        before="    return object_path(path) == name and not",
        after="    return path is not None or not",
    ),
    Mutant(
        fault="markup in names",
        test="tests/hostile/test_names.py::test_nothing_in_a_page_comes_of_a_name_but_text",
        path="tensorcas_mlflow/artifact_repo/_page.py",
        before="    return html.escape(visible)\n",
        after="    return visible\n",
    ),
    Mutant(
        fault="a password in a URI",
        test=f"{_SECRETS}::test_no_error_of_ours_holds_one",
        path="tensorcas_mlflow/_texts.py",
        before="_LOGIN.sub(_without_login, text)",
        after="text",
    ),
    Mutant(
        fault="a password in the URI of an artifact",
        test=f"{_SECRETS}::test_a_ref_holds_none_and_neither_does_what_shows_it",
        path="tensorcas_mlflow/store/_records.py",
        before='            object.__setattr__(self, "uri", without_secrets(self.uri))\n',
        after="            return\n",
    ),
    Mutant(
        fault="a password in the address of an object store that does not answer",
        test=f"{_SECRETS}::test_an_endpoints_password_and_signature_are_in_no_traceback",
        path="tensorcas_mlflow/backends/_object_errors.py",
        before="    error.args = tuple(without_credentials(fact)",
        after="    said = tuple(without_credentials(fact)",
    ),
    Mutant(
        fault="a folder that a group shares",
        test="tests/hostile/test_modes.py::test_folders_stay_with_the_group_that_shares_them",
        path="tensorcas_mlflow/backends/_local.py",
        before="        try:\n            os.mkdir(folder)\n",
        after="        try:\n            os.mkdir(folder, 0o700)\n",
    ),
    Mutant(
        fault="somebody who guesses the names of files under way",
        test="tests/hostile/test_modes.py::test_nobody_can_know_the_name_of_a_file_under_way",
        path="tensorcas_mlflow/transfer/_local_plain.py",
        before='        staging = place.with_name(f"{_UPLOADING}{uuid.uuid4().hex}")\n',
        after='        staging = place.with_name(f"{_UPLOADING}{place.name}")\n',
    ),
    Mutant(
        fault="somebody who opens a file of the chunk cache before its mode is set",
        test="tests/hostile/test_modes.py::"
        "test_what_was_read_is_never_anybody_elses_to_read_not_even_while_it_is_written",
        path="tensorcas_mlflow/extent_cache/_file.py",
        before='getattr(os, "O_CLOEXEC", 0), 0o600)',
        after='getattr(os, "O_CLOEXEC", 0), 0o644)',
    ),
    Mutant(
        fault="somebody else on the machine who looks into the chunk cache",
        test="tests/hostile/test_modes.py::test_what_was_read_is_kept_for_its_reader_alone",
        path="tensorcas_mlflow/extent_cache/_file.py",
        before="            os.fchmod(descriptor, 0o600)  # whatever the umask says\n",
        after="            os.fchmod(descriptor, 0o644)\n",
    ),
    Mutant(
        fault="somebody else on the machine who looks into the tally of the chunk cache",
        test="tests/hostile/test_modes.py::test_what_was_read_is_kept_for_its_reader_alone",
        path="tensorcas_mlflow/extent_cache/_room.py",
        before="                os.fchmod(descriptor, 0o600)\n",
        after="                os.fchmod(descriptor, 0o644)\n",
    ),
)
