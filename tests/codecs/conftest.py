from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorcas_mlflow.codecs import _native


@pytest.fixture(scope="module", params=["compiled", "numpy"], autouse=True)
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    """All tests of codecs are run with the compiled loops and with numpy's."""
    if request.param == "compiled" and _native.KERNELS is None:
        pytest.skip("the package was built without a compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(_native, "KERNELS", None)
        yield request.param
