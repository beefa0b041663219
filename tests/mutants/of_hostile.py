"""Faults that somebody means: forged bytes, links, names, and secrets in what is told."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="offsets in a manifest that are in no order and end elsewhere",
        test="test_changed_bytes_never_read_as_other_contents_than_pyarrow_finds[mixed-10]",
        definition="_offsets",
        before="at[0] == 0 and at[-1] == n_items and bool((at[1:] >= at[:-1]).all())",
        after="at[0] == 0",
    ),
    Mutant(
        fault="names of a manifest that are split inside of a character",
        test="test_name_split_inside_of_a_character_is_refused",
        definition="_texts",
        before="not (found[starts] & 0xC0 == 0x80).any()",
        after="True",
    ),
    Mutant(
        fault="offsets of names that descend",
        test="test_names_with_descending_offsets_are_refused",
        definition="_offsets",
        before="bool((at[1:] >= at[:-1]).all())",
        after="True",
    ),
    Mutant(
        fault="one name of two of many tensors",
        test="test_name_of_two_of_many_tensors_is_refused_by_whoever_goes_by_names[list]",
        definition="CheckpointReader._specs",
        before="self._numbers.numbers",
        after="self._numbers",
    ),
    Mutant(
        fault="a manifest with other columns",
        test="test_changed_bytes_never_read_as_other_contents_than_pyarrow_finds[one-10]",
        definition="_columns",
        before="stream[begin : begin + len(_COLUMNS)] == _COLUMNS",
        after="True",
    ),
    Mutant(
        fault="a manifest whose shapes do not fit 64 bits",
        test="test_a_shape_that_cannot_be_costs_nothing",
        definition="check_shapes",
        before="about.max() > 2 * MAX_TENSOR_BYTES or row_sizes(shape_at, factors, itemsizes).max() > MAX_TENSOR_BYTES",
        after="row_sizes(shape_at, factors, itemsizes).max() > MAX_TENSOR_BYTES",
    ),
    Mutant(
        fault="other bytes under a chunk's name, with digests that fit them",
        test="test_other_bytes_under_a_chunks_name_are_never_given_out",
        definition="decode_chain",
        before="expected is not None and digest(made) != expected",
        after="False",
    ),
    Mutant(
        fault="a manifest under another's name",
        test="test_a_manifest_under_anothers_name_is_damage",
        definition="_check_digest",
        before="actual != name[: 2 * DIGEST_BYTES]",
        after='name == ""',
    ),
    Mutant(
        fault="a record that goes deeper than JSON is read",
        test="test_damaged_bytes_are_read_or_refused_with_our_own_errors[intent]",
        definition="parse_intent",
        before="(ValueError, RecursionError)",
        after="ValueError",
    ),
    Mutant(
        fault="a metric of four hundred digits",
        test="test_damaged_bytes_are_read_or_refused_with_our_own_errors[ref]",
        definition="_read_float",
        before="suppress(OverflowError)",
        after="suppress(MemoryError)",
    ),
    Mutant(
        fault="a condemned list that names what is no pack",
        test="test_damaged_bytes_are_read_or_refused_with_our_own_errors[condemned list]",
        definition="_parse_list",
        before="all(map(is_pack_name, packs))",
        after="True",
    ),
    Mutant(
        fault="a file of the chunk cache whose extents are not its payload",
        test="test_damaged_bytes_are_read_or_refused_with_our_own_errors[file of the chunk cache]",
        definition="open_file",
        before="int(sizes.sum()) != payload_bytes or not sizes.all()",
        after="False",
    ),
    Mutant(
        fault="a folder of packs that is a link to another store's",
        test="test_a_collection_deletes_no_packs_behind_a_link",
        definition="_refuse_link",
        before="raise RefusedError(...)",
        after="pass",
    ),
    Mutant(
        fault="a link deep among refs",
        test="test_target_of_a_linked_store_folder_stays_unchanged",
        definition="LocalBackend.list_dir",
        before="entry.is_file(follow_symlinks=False) or entry.is_symlink()",
        after="entry.is_file(follow_symlinks=False)",
    ),
    Mutant(
        fault="a pipe in the place of a blob",
        test="test_a_blob_that_is_a_pipe_is_not_waited_for",
        definition="LocalBackend._open",
        before="not stat.S_ISREG(os.fstat(descriptor).st_mode)",
        after="descriptor < 0",
    ),
    Mutant(
        fault="objects whose names lead out of the folder they are copied to",
        test="test_a_copy_tells_of_objects_whose_names_lead_elsewhere_and_leaves_them",
        definition="is_readable_name",
        before="object_path(path) == name and not any(...)",
        after="path is not None",
    ),
    Mutant(
        fault="markup in names",
        test="test_hostile_name_is_only_text_in_a_page",
        definition="_environment",
        before="visible(value)",
        after="Markup(visible(value))",
    ),
    Mutant(
        fault="markup in addresses",
        test="test_any_name_is_text_and_short[1]",
        definition="_environment",
        before='html.escape("".join(filter(str.isprintable, value)))',
        after='"".join(filter(str.isprintable, value))',
    ),
    Mutant(
        fault="a password in a URI",
        test="test_no_error_of_ours_holds_a_secret",
        definition="without_secrets",
        before="_LOGIN.sub(_without_login, text)",
        after="text",
    ),
    Mutant(
        fault="a password in the URI of an artifact",
        test="test_no_ref_and_no_view_of_a_ref_holds_a_secret",
        definition="RefTarget.__post_init__",
        before='object.__setattr__(self, "uri", without_secrets(self.uri))',
        after="return",
    ),
    Mutant(
        fault="a password in the address of an object store that does not answer",
        test="test_an_endpoints_password_and_signature_are_in_no_traceback",
        definition="translated",
        before="error.args = tuple(...)",
        after="",
    ),
    Mutant(
        fault="a folder that a group shares",
        test="test_folders_stay_with_the_group_that_shares_them",
        definition="LocalBackend._make_below",
        before="""
            try:
                os.mkdir(folder)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    self._make_below(os.path.dirname(folder))
                os.mkdir(folder)
        """,
        after="""
            try:
                os.mkdir(folder, 0o700)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    self._make_below(os.path.dirname(folder))
                os.mkdir(folder)
        """,
    ),
    Mutant(
        fault="somebody who guesses the names of files under way",
        test="test_nobody_can_know_the_name_of_a_file_under_way",
        definition="_partial",
        before='f"{UPLOADING}{new_name()}"',
        after='f"{UPLOADING}{place.name}"',
    ),
    Mutant(
        fault="somebody who opens a file of the chunk cache before its mode is set",
        test="test_cache_file_is_private_while_it_is_written",
        definition="write_file",
        before='os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)',
        after='os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)',
    ),
    Mutant(
        fault="somebody else on the machine who looks into the chunk cache",
        test="test_cached_chunks_are_readable_by_their_user_alone",
        definition="write_file",
        before="os.fchmod(descriptor, 0o600)",
        after="os.fchmod(descriptor, 0o644)",
    ),
    Mutant(
        fault="somebody else on the machine who looks into the tally of the chunk cache",
        test="test_cached_chunks_are_readable_by_their_user_alone",
        definition="Room._begin_tally",
        before="os.fchmod(descriptor, 0o600)",
        after="os.fchmod(descriptor, 0o644)",
    ),
    Mutant(
        fault="a link in the place of a database",
        test="test_file_behind_a_link_in_the_place_of_a_database_stays_as_it_is[save-blobs.db]",
        definition="Database._check_names",
        before="os.path.islink(self._beside(name))",
        after="False",
    ),
    Mutant(
        fault="a database with triggers",
        test="test_database_with_a_schema_of_somebody_else_is_refused[a trigger]",
        definition="Database._connect_by",
        before='run("SELECT type, name, sql FROM sqlite_schema").fetchall() != _schema()',
        after="False",
    ),
)
