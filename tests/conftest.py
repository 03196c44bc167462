"""The markers of this suite.

@pytest.mark.ranks(4, timeout=20)     # the body runs on 4 local gloo ranks, 60 s at most unless told
def test_sum(tmp_path): ...           # fixtures are resolved here; their values travel, so they must pickle

@pytest.mark.gpu                      # skipped where torch sees no CUDA device
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests import ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are as many workers and ranks as cores, or more
settings.register_profile("suite", deadline=None)  # how long an example takes is up to what else the machine does
settings.register_profile("planted", deadline=None, phases=[Phase.explicit, Phase.generate])  # make mutants
settings.load_profile("suite")
TIMEOUT_S = 60.0
REPLACED = {
    "torch.nn.functional": (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
        "scaled_dot_product_attention",
    ),
    "torch._VF": ("lstm", "gru", "rnn_tanh", "rnn_relu"),
}
torch_functions: dict[tuple[str, str], Any] = {}
"""torch's own functions of the modules and names in REPLACED."""
LONG = (
    "tests/cluster/test_deadline.py",
    "tests/train/test_axes.py",
    "tests/train/test_ending.py",
    "tests/cluster/",
    "tests/check/test_chaos.py",
    "tests/launch/test_restarts.py",
    "tests/observe/test_hang.py",
    "tests/launch/test_other_launchers.py",
    "tests/train/test_resume.py",
    "tests/launch/test_local.py",
    "tests/launch/test_nodes.py",
    "tests/check/",
    "tests/train/test_compiled.py",
)
"""Where tests take longest. They come first: begun last, one such file keeps a worker busy when the other is done.
Those that mostly wait, such as a job for its time limit, are beside others that compute."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first. And pytest-timeout stays the last resort: a test's own limit, which shows stacks, is below."""
    items.sort(key=lambda item: [*(item.nodeid.startswith(each) for each in LONG), True].index(True))
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        marker = item.get_closest_marker("ranks")
        if marker and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(marker.kwargs.get("timeout", TIMEOUT_S) + 60))


def pytest_collection_finish() -> None:
    """Record torch's own functions before any test or fixture, whatever its scope, trains in this process."""
    for place, names in REPLACED.items():
        if (module := sys.modules.get(place)) is not None:
            torch_functions.update({(place, name): getattr(module, name) for name in names})


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A training in the test's own process replaces functions of torch, which later tests must not meet."""
    for (place, name), function in torch_functions.items():
        setattr(sys.modules[place], name, function)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not cuda_is_available():
        pytest.skip("needs a CUDA device, and torch sees none here")


@pytest.fixture(autouse=True)
def no_gpus_unless_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts see no GPU, so that the suite does the same on every machine."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@functools.cache
def cuda_is_available() -> bool:
    import torch  # only for a gpu test: without one, pytest starts without torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    try:
        n, timeout = asked(*marker.args, **marker.kwargs)
    except TypeError as error:
        raise pytest.fail.Exception(f"@pytest.mark.ranks(n, timeout=seconds): {error}", pytrace=False) from None
    names = [pyfuncitem.cls.__qualname__] if pyfuncitem.cls else []
    qualname = ".".join([*names, pyfuncitem.originalname])
    kwargs = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        ranks.run_on_ranks(str(pyfuncitem.path), qualname, n, kwargs, timeout)
    except ranks.RanksFailed as failed:
        raise pytest.fail.Exception(str(failed), pytrace=False) from None
    return True


def asked(n: int, *, timeout: float = TIMEOUT_S) -> tuple[int, float]:
    """The marker's arguments, checked by being a signature."""
    return n, timeout


def pytest_unconfigure() -> None:
    ranks.stop()
