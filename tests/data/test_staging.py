"""Staged files are whole, are found again, and are missed in a sentence that says how to get them."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from meshrun import mesh
from meshrun.cli.main import main
from meshrun.data import download, staging
from meshrun.data.staging import Place, Stage, missing_of, read_list, staged, use, verified
from meshrun.errors import RunFailed, UserError
from tests.data.server import Server
from tests.launch.command import MODULE, Ended, meshrun

FETCHED = str(Path(__file__).parent / "programs" / "fetched.py")
FILE = bytes(range(256)) * 64


def points() -> bytes:
    x = np.linspace(0, 1, 20, dtype=np.float32)
    written = io.BytesIO()
    np.save(written, np.stack([x, np.ones_like(x), 2 * x], axis=1))
    return written.getvalue()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({"a.bin": FILE, "points.npy": points()}) as made:
        yield made


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(download, "PAUSE", 0.01)
    yield
    monkeypatch.setattr(staging, "_place", None)


class Heard:
    """Keeps what a person would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.begun: list[tuple[str, int, int | None]] = []

    def begin(self, what: str, done: int, total: int | None) -> None:
        self.begun.append((what, done, total))

    def advance(self, count: int) -> None: ...

    def line(self, text: str) -> None:
        self.lines.append(text)


class Refused(Heard):
    """Has the server refuse the next try."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server

    def line(self, text: str) -> None:
        super().line(text)
        self.server.statuses = [403]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs a command line in this process: importing torch once is enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def called(*words: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words)))
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        mesh.finish()
        return Ended(ended.value.code, said.out, said.err)

    return called


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_download_is_whole_and_written_down(tmp_path: Path, server: Server):
    stage = Stage(tmp_path)
    path = stage.download(f"{server.url}/a.bin?token=secret", sha256=sha256(FILE).upper())
    assert path == tmp_path / "a.bin" and path.read_bytes() == FILE
    (found,) = read_list(tmp_path).values()
    assert (found.name, found.size, found.sha256, found.url) == (
        "a.bin",
        len(FILE),
        sha256(FILE),
        f"{server.url}/a.bin",
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.bin", "staged.json"]


def test_a_name_and_password_are_given_and_not_written_down(tmp_path: Path, server: Server):
    Stage(tmp_path).download(f"{server.url}/a.bin".replace("://", "://me:se%20cret@"))
    assert server.authorization == "Basic bWU6c2UgY3JldA=="
    assert "cret" not in (tmp_path / "staged.json").read_text()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_name_and_password_are_not_sent_to_where_a_server_redirects(tmp_path: Path, server: Server, elsewhere: bool):
    """Another port is another server; the same server gets them again."""
    with Server({"a.bin": FILE}) as other:
        server.redirects["moved"] = f"{(other if elsewhere else server).url}/a.bin"
        Stage(tmp_path).download(f"{server.url}/moved".replace("://", "://me:secret@"))
        assert (tmp_path / "moved").read_bytes() == FILE
        assert (other if elsewhere else server).authorization == (None if elsewhere else "Basic bWU6c2VjcmV0")


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:99999/x",
        "http://127.0.0.1:x/",
        "http://[::x/",
        f"http://{'a' * 300}/",
        "ftp://127.0.0.1/x",
        "//",
    ],
)
def test_a_server_that_leads_to_no_address_is_told_of_in_one_line(tmp_path: Path, server: Server, address: str):
    server.redirects["moved"] = address
    leads = r"it is, or leads to, no address of a web server \(the server leads to " * address.startswith("ftp:")
    with pytest.raises(RunFailed, match=rf"^http://127\.0\.0\.1:\d+/moved cannot be fetched: {leads}[^\n]*$"):
        Stage(tmp_path).download(f"{server.url}/moved")


def test_staging_again_fetches_only_what_is_wrong(tmp_path: Path, server: Server):
    server.files["b.bin"] = b"b" * 1000
    for _ in range(2):
        stage = Stage(tmp_path)
        for name in ("a.bin", "b.bin"):
            stage.download(f"{server.url}/{name}")
    assert len(server.asked) == 2 and stage.kept == ["a.bin", "b.bin"]
    (tmp_path / "b.bin").write_bytes(b"c" * 1000)
    assert verified(tmp_path) == [f"{tmp_path / 'b.bin'} has another checksum than when it was staged"]
    stage = Stage(tmp_path)
    for name in ("a.bin", "b.bin"):
        stage.download(f"{server.url}/{name}")
    assert (stage.kept, stage.brought) == (["a.bin"], ["b.bin"])
    assert not verified(tmp_path)


def test_a_download_that_is_cut_off_goes_on_where_it_was(tmp_path: Path, server: Server):
    server.cut_after = 5000
    heard = Heard()
    Stage(tmp_path, heard).download(f"{server.url}/a.bin")
    assert (tmp_path / "a.bin").read_bytes() == FILE
    assert server.asked == [("a.bin", None), ("a.bin", "bytes=5000-")]
    assert (
        f"{server.url}/a.bin: the connection ended after 5,000 of 16,384 bytes; trying again in 0.01 s" in heard.lines
    )
    assert ("a.bin", 5000, len(FILE)) in heard.begun


def test_a_server_that_goes_on_from_elsewhere_is_asked_for_all_of_it(tmp_path: Path, server: Server):
    server.cut_after, server.goes_on_from = 5000, 5001
    heard = Heard()
    Stage(tmp_path, heard).download(f"{server.url}/a.bin")
    assert (tmp_path / "a.bin").read_bytes() == FILE
    assert [each for _, each in server.asked] == [None, "bytes=5000-", None]
    assert any("the server went on from elsewhere" in line for line in heard.lines)


def test_a_server_that_sends_a_file_in_parts_is_asked_until_it_is_whole(tmp_path: Path, server: Server):
    server.cut_after, server.range_of = 5000, 6000
    assert Stage(tmp_path).download(f"{server.url}/a.bin").read_bytes() == FILE
    assert [each for _, each in server.asked] == [None, "bytes=5000-", "bytes=11000-"]


@pytest.mark.parametrize("status", [204, 206])
def test_a_part_that_was_not_asked_for_is_no_file(tmp_path: Path, server: Server, status: int):
    server.statuses = [status]
    with pytest.raises(RunFailed, match=f"the server answers {status}, which is no whole file"):
        Stage(tmp_path).download(f"{server.url}/a.bin")
    assert not (tmp_path / "a.bin").exists()


def test_a_download_does_not_go_on_with_what_may_be_other_bytes_of_the_same_meaning(tmp_path: Path, server: Server):
    server.cut_after, server.weak = 5000, "W/"
    Stage(tmp_path).download(f"{server.url}/a.bin")
    assert (tmp_path / "a.bin").read_bytes() == FILE and server.asked == [("a.bin", None)] * 2


def test_a_later_staging_goes_on_with_what_an_earlier_one_had(tmp_path: Path, server: Server):
    server.cut_after, server.statuses = 5000, []
    part = tmp_path / ".a.bin.part"
    with pytest.raises(RunFailed, match="answers 403"):
        Stage(tmp_path, Refused(server)).download(f"{server.url}/a.bin")
    assert part.read_bytes() == FILE[:5000] and not read_list(tmp_path)
    Stage(tmp_path).download(f"{server.url}/a.bin")
    assert (tmp_path / "a.bin").read_bytes() == FILE and server.asked[-1] == ("a.bin", "bytes=5000-")


def test_the_beginning_of_another_file_is_thrown_away(tmp_path: Path, server: Server):
    (tmp_path / ".a.bin.part").write_bytes(b"old")
    (tmp_path / ".a.bin.part.json").write_text(json.dumps({"url": "…", "same": '"another"'}))
    Stage(tmp_path).download(f"{server.url}/a.bin")
    assert (tmp_path / "a.bin").read_bytes() == FILE


@pytest.mark.parametrize("same", ["a\r\nX-Other: b", "\u20ac", 7, ["x"], None])
def test_a_note_of_what_no_server_can_have_said_is_not_asked_for(tmp_path: Path, server: Server, same: object):
    (tmp_path / ".a.bin.part").write_bytes(FILE[:100])
    (tmp_path / ".a.bin.part.json").write_text(json.dumps({"url": "…", "same": same}))
    Stage(tmp_path).download(f"{server.url}/a.bin")
    assert (tmp_path / "a.bin").read_bytes() == FILE and server.asked == [("a.bin", None)]


def test_a_beginning_that_was_damaged_is_fetched_again_where_the_sum_is_known(tmp_path: Path, server: Server):
    server.cut_after = 5000
    with pytest.raises(RunFailed, match="answers 403"):
        Stage(tmp_path, Refused(server)).download(f"{server.url}/a.bin")
    (tmp_path / ".a.bin.part").write_bytes(b"?" * 5000)
    Stage(tmp_path).download(f"{server.url}/a.bin", sha256=sha256(FILE))
    assert (tmp_path / "a.bin").read_bytes() == FILE
    assert [each for _, each in server.asked] == [None, "bytes=5000-", "bytes=5000-", None]


def test_a_wrong_sum_is_told_and_nothing_is_kept(tmp_path: Path, server: Server):
    with pytest.raises(
        RunFailed, match=rf"came with the sha256 {sha256(FILE)}, but stage_data asks for 0{{64}}; it was"
    ):
        Stage(tmp_path).download(f"{server.url}/a.bin", sha256="0" * 64)
    assert not list(tmp_path.iterdir())


def test_an_address_that_does_not_exist_is_no_missing_network(server: Server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}/nothing.bin")
    assert missing_of(refused.value) is None
    assert "internet" in str(missing_of(urllib.error.URLError("no route to host")))


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(tmp_path: Path, server: Server):
    server.statuses = [503, 429]
    Stage(tmp_path).download(f"{server.url}/a.bin")
    assert len(server.asked) == 3
    with pytest.raises(
        RunFailed, match=r"nothing\.bin cannot be fetched: the server answers 404 Not Found; the address"
    ):
        Stage(tmp_path).download(f"{server.url}/nothing.bin")
    assert len(server.asked) == 4


def test_a_server_without_names_for_its_files_is_begun_anew(tmp_path: Path, server: Server):
    server.named, server.cut_after = False, 5000
    Stage(tmp_path).download(f"{server.url}/a.bin")
    assert (tmp_path / "a.bin").read_bytes() == FILE and server.asked == [("a.bin", None)] * 2


def test_no_internet_is_a_sentence(tmp_path: Path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://name:password@127.0.0.1:{unused.getsockname()[1]}/a.bin"
        with pytest.raises(RunFailed) as failed:
            Stage(tmp_path).download(url)
    said = str(failed.value)
    assert said.endswith(
        "cannot be fetched: Connection refused; stage on a machine with internet, such as a login node"
    )
    assert "password" not in said


def test_a_full_disk_is_a_sentence(tmp_path: Path, server: Server):
    if os.getuid() != 0:
        pytest.skip("a small disk can only be mounted by root")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.strip()}")
    try:
        server.files["big.bin"] = b"b" * 200_000
        with pytest.raises(RunFailed, match=r"no space left for .*big\.bin \(0\.\d MB are free.*\(--data\)$"):
            Stage(small).download(f"{server.url}/big.bin")
        (tmp_path / "big.bin").write_bytes(b"b" * 200_000)
        with pytest.raises(RunFailed, match=r"no space left for .*big\.bin"):
            Stage(small).copy(tmp_path / "big.bin")
        assert not (small / ".big.bin.part").exists()
    finally:
        subprocess.run(["umount", small], check=True)


def test_files_and_folders_are_copied_and_made_ones_added(tmp_path: Path):
    source, folder = tmp_path / "source", tmp_path / "data"
    (source / "deep").mkdir(parents=True)
    (source / "one").write_text("1")
    (source / "deep" / "two").write_text("22")
    folder.mkdir()
    stage = Stage(folder)
    stage.copy(source, name="all")
    stage.copy(source / "one")
    (folder / "made").write_text("333")
    assert not stage.has("made")
    stage.add(folder / "made")
    assert stage.has("made")
    assert stage.brought == ["all/deep/two", "all/one", "one", "made"]
    with pytest.raises(UserError, match=r"two files are to be staged as 'one'"):
        stage.download("http://127.0.0.1:9/one")
    with pytest.raises(UserError, match=r"two files are to be staged as 'one'"):
        stage.copy(source / "one")
    again = Stage(folder)
    again.copy(source, name="all")
    assert again.kept == ["all/deep/two", "all/one"]
    with pytest.raises(UserError, match=r"two files are to be staged as 'all/one'"):
        again.copy(source / "one", name="all/one")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda stage: stage.download("ftp://host/x"),
            r"download\('ftp://host/x'\) is no address; it must be http\(s\)://",
        ),
        (lambda stage: stage.download("http://host:99999/x"), r"download\('http://host:99999/x'\) is no address"),
        (lambda stage: stage.download("http://[::x/y"), r"download\('http://\[::x/y'\) is no address"),
        (lambda stage: stage.download(5), r"download\(5\) is no address"),
        (lambda stage: stage.download("http://host/"), r"would be called '' here; give it a plain name"),
        (lambda stage: stage.download("http://host/x", name="../x"), r"would be called '\.\./x' here"),
        (lambda stage: stage.download("http://host/staged.json"), r"would be called 'staged\.json' here"),
        (lambda stage: stage.download("http://host/x", sha256="abc"), r"sha256 of http://host/x is 'abc'; .* 64"),
        (lambda stage: stage.copy("/not/there"), r"copy\('/not/there'\): there is no such file"),
        (lambda stage: stage.add("../.."), r"add\('\.\./\.\.'\) is not in .*; make the file there, or use copy"),
        (lambda stage: stage.add("not-there"), r"not-there does not exist; make the file first"),
        (
            lambda stage: stage.add("/etc/passwd"),
            r"add\('/etc/passwd'\) is not in .*; make the file there, or use copy",
        ),
    ],
)
def test_what_cannot_be_staged_is_refused(tmp_path: Path, call, sentence: str):
    with pytest.raises(UserError, match=sentence):
        call(Stage(tmp_path))


def test_a_staged_file_is_found_and_a_missing_or_cut_one_names_the_command(tmp_path: Path):
    use(Place(tmp_path, "meshrun stage my.py --size=2"))
    with pytest.raises(
        UserError, match=r"x\.npy is not here; on a machine with internet: meshrun stage my\.py --size=2$"
    ):
        staged("x.npy")
    (tmp_path / "x.npy").write_bytes(b"12345")
    Stage(tmp_path).add("x.npy")
    assert staged("x.npy") == tmp_path / "x.npy"
    (tmp_path / "x.npy").write_bytes(b"123")
    with pytest.raises(UserError, match=r"has 3 bytes here, but had 5 when it was staged; on a machine with internet"):
        staged("x.npy")


def test_two_cannot_stage_into_one_folder_at_once(tmp_path: Path):
    another = pytest.raises(UserError, match="is being staged by another process")
    with staging.staging(tmp_path), another, staging.staging(tmp_path):
        pass
    with staging.staging(tmp_path):
        pass


def hub_error() -> Exception:
    kind = type("LocalEntryNotFoundError", (FileNotFoundError,), {"__module__": "huggingface_hub.errors"})
    return kind("Cannot find the requested files in the disk cache")


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError(socket.gaierror(-2, "Name or service not known")),
        OSError("We couldn't connect to 'https://huggingface.co' to load the files"),
        ConnectionError("Couldn't reach 'imdb' on the Hub (OfflineModeIsEnabled)"),
        hub_error(),
    ],
)
def test_what_is_wanted_from_the_internet_names_the_stage_command(error: Exception):
    use(Place(Path("data/my"), "meshrun stage my.py"))
    outer = RuntimeError("the model cannot be built")
    outer.__cause__ = error
    for each in (error, outer):
        said = missing_of(each)
        assert said is not None and said.endswith("on a machine with internet: meshrun stage my.py")


def test_other_errors_are_not_taken_for_a_missing_internet():
    others = [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        RuntimeError("[gloo] Connection closed by peer"),
        FileNotFoundError("points.npy"),
        UserError("x is not here"),
    ]
    assert [missing_of(each) for each in others] == [None] * 4


IN_NO_NETWORK = (
    *("unshare", "--net", "sh", "-c"),
    f'{sys.executable} -c "$0" && exec "$@"',
    """import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lo:  # lo up, and nothing else
    fcntl.ioctl(lo, 0x8914, struct.pack("16sh", b"lo", 1))
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    assert "unreachable" in str(error), error
else:
    raise SystemExit("there is a route")""",
)
"""Runs what follows where only loopback is."""


def test_a_run_without_any_route_trains_from_what_was_staged(
    tmp_path: Path, server: Server, call: Callable[..., Ended]
):
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("a network without routes can only be made by root")
    offline = (*IN_NO_NETWORK, *MODULE)

    brought = call("stage", FETCHED, "--source", server.url, "--sum", sha256(points()), "--json")
    assert brought.status == 0, brought.err
    assert brought.document["brought"] == ["points.npy", "made/half.npy"] and "halved" in brought.err
    assert brought.document["bytes"] == 616

    ran = meshrun(tmp_path, "run", FETCHED, "--procs", 2, "--json", launcher=offline)
    assert ran.status == 0, ran.err
    assert ran.document["world"] == 2 and ran.document["eval"]["half"]["count"] == 10

    wanting = meshrun(tmp_path, "run", FETCHED, "--late", launcher=offline)
    assert wanting.status == 1, wanting.err
    assert wanting.sentences[0].endswith(f"on a machine with internet: meshrun stage {FETCHED} --late")


def test_a_run_of_what_was_never_staged_names_the_command(tmp_path: Path, call: Callable[..., Ended]):
    place = tmp_path / "data" / "fetched" / "points.npy"
    nothing = call("run", FETCHED)
    assert nothing.status == 2
    assert nothing.sentences == [f"{place} is not here; on a machine with internet: meshrun stage {FETCHED}"]
    wanting = call("run", FETCHED, "--hub", "--data", "elsewhere")
    assert wanting.status == 2
    assert wanting.sentences[0].endswith(f"internet: meshrun stage {FETCHED} --hub --data elsewhere")


def test_stage_checks_and_mends_and_says_what_it_did(tmp_path: Path, server: Server, call: Callable[..., Ended]):
    source = ("--source", server.url)
    nothing = call("stage", FETCHED, "--verify")
    assert nothing.status == 2 and "nothing is staged in data/fetched" in nothing.sentences[0]
    first = call("stage", FETCHED, *source)
    assert first.status == 0 and first.out == "data/fetched: 2 brought (616 B)\n", first.err
    (tmp_path / "data/fetched/points.npy").write_bytes(b"short")
    checked = call("stage", FETCHED, "--verify", "--json")
    assert checked.status == 1 and not checked.document["ok"]
    assert checked.document["problems"] == ["data/fetched/points.npy has 5 bytes, but had 368 when it was staged"]
    mended = call("stage", FETCHED, *source)
    assert mended.out == "data/fetched: 1 brought (368 B), 1 here and right (248 B)\n", mended.err
    assert call("stage", FETCHED, "--verify").status == 0


def test_an_experiments_own_stage_data_needs_no_argument_and_errors_in_it_are_located(
    tmp_path: Path, call: Callable[..., Ended]
):
    program = tmp_path / "own.py"
    program.write_text(
        "from meshrun import Experiment, mean_squared_error\n"
        "def fetch():\n"
        "    print('fetching')\n"
        "    raise ValueError('no luck')\n"
        "def experiment() -> Experiment:\n"
        "    return Experiment(model=print, train=[1], loss=mean_squared_error, optimizer=print, batch=1, steps=1,\n"
        "        stage_data=fetch)\n"
    )
    ended = call("stage", program, "--json")
    assert ended.status == 1 and "fetching" in ended.err
    assert ended.document["error"] == f"stage_data of own.py failed at {program}:4: ValueError: no luck"


def test_an_experiment_that_reads_what_is_to_be_staged_is_told_where_to_write_it(
    tmp_path: Path, call: Callable[..., Ended]
):
    program = tmp_path / "own.py"
    program.write_text(
        "from meshrun import Experiment, staged\ndef experiment() -> Experiment:\n    open(staged('x.npy'))\n"
    )
    ended = call("stage", program)
    assert ended.status == 2
    assert "write a function stage_data(stage) beside it in the same file" in ended.sentences[0]


def test_a_program_that_needs_nothing_says_so(tmp_path: Path, call: Callable[..., Ended]):
    program = tmp_path / "own.py"
    program.write_text(
        "from meshrun import Experiment, mean_squared_error\n"
        "def experiment() -> Experiment:\n"
        "    return Experiment(model=print, train=[1], loss=mean_squared_error, optimizer=print, batch=1, steps=1)\n"
    )
    ended = call("stage", program)
    assert ended.status == 0 and ended.out.startswith("own.py has no stage_data: it needs nothing from the internet")


def test_what_another_has_put_beside_a_file_is_not_written_through(tmp_path: Path, server: Server):
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.bin", "b.bin"):
        (folder / f".{name}.part").symlink_to(precious)
    (folder / ".a.bin.part.json").write_text(json.dumps({"same": f'"{hashlib.md5(FILE).hexdigest()}"'}))
    (tmp_path / "b.bin").write_bytes(FILE)
    with staging.staging(folder) as stage:
        stage.download(f"{server.url}/a.bin")
        stage.copy(tmp_path / "b.bin")
    assert precious.read_text() == "years of work"
    assert [(folder / name).read_bytes() == FILE for name in ("a.bin", "b.bin")] == [True, True]


def test_other_users_cannot_hold_the_lock_of_a_folder(tmp_path: Path):
    """Who can open a file can lock it, also to read only."""
    with staging.staging(tmp_path):
        assert not (tmp_path / ".lock").stat().st_mode & 0o007


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")
@pytest.mark.parametrize("theirs", [".a.bin.part", ".a.bin.part.json"])
def test_a_download_does_not_go_on_with_what_another_user_has_begun(tmp_path: Path, server: Server, theirs: str):
    (tmp_path / ".a.bin.part").write_bytes(b"poison")
    (tmp_path / ".a.bin.part.json").write_text(json.dumps({"same": f'"{hashlib.md5(FILE).hexdigest()}"'}))
    os.chown(tmp_path / theirs, 65534, 65534)
    path = Stage(tmp_path).download(f"{server.url}/a.bin")
    assert path.read_bytes() == FILE and path.stat().st_uid == 0


def test_a_copy_is_no_more_open_to_others_than_the_file(tmp_path: Path):
    for mode in (0o600, 0o644):
        source = tmp_path / f"file-{mode}"
        source.touch(mode)
        copy = Stage(tmp_path / "data").copy(source)
        assert stat.S_IMODE(copy.stat().st_mode) == mode


def test_a_link_in_place_of_the_lock_of_a_folder_is_refused(tmp_path: Path):
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFailed, match="symbolic link"), staging.staging(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_name_and_password_in_the_address_of_a_redirect_are_for_that_server(tmp_path: Path, server: Server):
    with Server({"a.bin": FILE}) as other:
        server.redirects["moved"] = f"{other.url}/a.bin".replace("://", "://you:th%40t@")
        Stage(tmp_path).download(f"{server.url}/moved".replace("://", "://me:secret@"))
        assert other.authorization == "Basic eW91OnRoQHQ="


def test_a_password_for_a_proxy_does_not_go_to_where_a_server_redirects(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    """The first server is reached through a proxy, the second without."""
    monkeypatch.setenv("http_proxy", server.url.replace("://", "://me:secret@"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server({"a.bin": FILE}) as other:
        server.redirects["http://example.org/a.bin"] = f"{other.url}/a.bin"
        Stage(tmp_path).download("http://example.org/a.bin")
        assert server.headers["Proxy-Authorization"] == "Basic bWU6c2VjcmV0"
        assert other.headers["Proxy-Authorization"] is None


@pytest.mark.parametrize("address", ["http://me:s3cret@host:port/x", "ftp://me:s3cret@host/x"])
def test_an_address_that_cannot_be_is_named_without_its_password(tmp_path: Path, address: str):
    with pytest.raises(UserError, match="is no address") as refused:
        Stage(tmp_path).download(address)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "../a", "/a", "staged.json", "a\nb"])
def test_a_list_that_names_what_is_no_file_of_the_folder_is_refused(tmp_path: Path, name: str):
    file = {"name": name, "size": 3, "sha256": "ab" * 32, "when": "2026-01-01", "url": None}
    (tmp_path / "staged.json").write_text(json.dumps({"format": 1, "files": [file]}))
    with pytest.raises(UserError, match="which lies outside of the folder"):
        read_list(tmp_path)
