"""Clients of a server read what forms derive, which an optimization with direct access has written."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.errors import DirectAccessError
from tensorcas_mlflow.integration.server_store import find_carrier
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import plan_optimize, verify
from tensorcas_mlflow.store import Store
from tests.derived.made import Tensors, as_bfloat16, model, save
from tests.forms.made import collect, digests_of, drop, held, no_search, optimize
from tests.integration.server_store.conftest import Experiment


def check_reads(store: Store, ref: Ref, tensors: Tensors) -> None:
    found = store.read_tensors(store.manifest(ref))
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


def test_client_reads_what_a_form_derives_from_the_chunks_of_a_dropped_checkpoint(carried: Experiment) -> None:
    tensors = model(1, d=128, n_layers=1)
    copy = as_bfloat16(tensors)
    client, _ = find_carrier(carried.uri, create=True)
    with no_search():
        of_model, of_copy = save(client, tensors, run_id="model"), save(client, copy, run_id="copy")
    check_reads(client, of_copy, copy)

    assert optimize(carried.store()).n_forms == 1
    drop(carried.store(), of_model)
    collect(carried.store())
    assert not digests_of(carried.store(), of_copy) <= held(carried.store().backend)

    check_reads(client, of_copy, copy)
    fresh, _ = find_carrier(carried.uri)
    check_reads(fresh, of_copy, copy)
    assert verify(fresh, full=True).problems == ()
    with pytest.raises(DirectAccessError):
        plan_optimize(fresh).execute()
    with no_search():
        check_reads(fresh, save(fresh, copy, run_id="again"), copy)
