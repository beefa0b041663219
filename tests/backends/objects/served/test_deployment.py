"""The tests of a server with a store as destination, run with servers in S3."""

from __future__ import annotations

import pytest

from tests.deploy.test_models import (
    test_a_model_comes_back_as_it_was,
    test_a_nested_run_has_artifacts_of_its_own,
    test_a_run_that_is_deleted_and_restored_has_its_artifacts,
    test_autologging_logs_models_and_pictures,
    test_deleting_a_run_while_it_is_written_hurts_no_other_run,
    test_registered_versions_aliases_and_copies_load,
    user,
)
from tests.deploy.test_proxied_artifacts import (
    test_an_artifact_that_is_logged_again_is_the_new_one,
    test_an_empty_file_is_kept,
    test_artifacts_of_new_experiments_go_through_the_server,
    test_attachments_of_traces_are_kept,
    test_errors_reach_the_client_at_once_and_say_what_is_wrong,
    test_folders_come_back_bit_for_bit_through_every_address,
    test_names_with_spaces_and_unicode_and_long_paths_are_kept,
    test_several_clients_that_upload_the_same_at_once_all_succeed,
    test_several_clients_that_write_one_artifact_leave_one_of_theirs,
    test_the_client_has_no_plugin,
    test_whatever_mlflow_logs_can_be_loaded,
)
from tests.deploy.test_uploads import (
    eager_client,
    run,
    test_a_client_that_asks_for_a_way_past_the_store_goes_through_it,
    test_a_way_past_the_store_is_refused,
    test_a_worker_that_is_killed_during_an_upload_leaves_nothing_to_be_seen,
    test_an_upload_that_breaks_off_leaves_nothing_to_be_seen,
    test_an_upload_that_breaks_off_leaves_what_was_there,
    test_the_server_offers_no_way_past_the_store,
)

__all__ = [
    "eager_client",
    "run",
    "test_a_client_that_asks_for_a_way_past_the_store_goes_through_it",
    "test_a_model_comes_back_as_it_was",
    "test_a_nested_run_has_artifacts_of_its_own",
    "test_a_run_that_is_deleted_and_restored_has_its_artifacts",
    "test_a_way_past_the_store_is_refused",
    "test_a_worker_that_is_killed_during_an_upload_leaves_nothing_to_be_seen",
    "test_an_artifact_that_is_logged_again_is_the_new_one",
    "test_an_empty_file_is_kept",
    "test_an_upload_that_breaks_off_leaves_nothing_to_be_seen",
    "test_an_upload_that_breaks_off_leaves_what_was_there",
    "test_artifacts_of_new_experiments_go_through_the_server",
    "test_attachments_of_traces_are_kept",
    "test_autologging_logs_models_and_pictures",
    "test_deleting_a_run_while_it_is_written_hurts_no_other_run",
    "test_errors_reach_the_client_at_once_and_say_what_is_wrong",
    "test_folders_come_back_bit_for_bit_through_every_address",
    "test_names_with_spaces_and_unicode_and_long_paths_are_kept",
    "test_registered_versions_aliases_and_copies_load",
    "test_several_clients_that_upload_the_same_at_once_all_succeed",
    "test_several_clients_that_write_one_artifact_leave_one_of_theirs",
    "test_the_client_has_no_plugin",
    "test_the_server_offers_no_way_past_the_store",
    "test_whatever_mlflow_logs_can_be_loaded",
    "user",
]

pytestmark = pytest.mark.long
