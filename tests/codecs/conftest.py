from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorcas_mlflow.codecs import _codec, _words


@pytest.fixture(scope="module", params=["compiled", "numpy"], autouse=True)
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test of codecs with the compiled core and with numpy."""
    if request.param == "compiled" and _words.KERNELS is None:
        pytest.skip("the package was built without a compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(_words, "KERNELS", None)
            patch.setattr(_codec, "_ENCODER", None)
        yield request.param
