import shutil
import subprocess
from pathlib import Path

import pytest

from meshrun.world.gpu import open_early

DRIVER = """
#include <stdio.h>
static void tell(const char *what, int which) {
    FILE *file = fopen("CALLS", "a");
    fprintf(file, "%s %d\\n", what, which);
    fclose(file);
}
int cuInit(unsigned flags) { tell("init", flags); return STATUS; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { tell("open", device); return 0; }
"""


def driver(folder: Path, status: int) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "driver.c", folder / "libdriver.so"
    source.write_text(DRIVER.replace("CALLS", str(folder / "calls")).replace("STATUS", str(status)))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def test_the_gpu_of_this_place_of_the_node_is_opened(tmp_path: Path) -> None:
    open_early(local_rank=1, driver=str(driver(tmp_path, status=0))).join(10)
    assert (tmp_path / "calls").read_text().splitlines() == ["init 0", "open 41"]


def test_a_driver_that_refuses_is_left_to_torch(tmp_path: Path) -> None:
    open_early(local_rank=0, driver=str(driver(tmp_path, status=100))).join(10)
    assert (tmp_path / "calls").read_text().splitlines() == ["init 0"]


def test_without_a_driver_nothing_happens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    thread = open_early(local_rank=0, driver=str(tmp_path / "libcuda.so.1"))
    thread.join(10)
    assert not thread.is_alive()
    assert capfd.readouterr() == ("", "")
