"""Texts to token files: the tokens that plain code gives, the same bytes however made, and what is refused."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshrun import TokenFile
from meshrun.cli.main import main
from meshrun.data.convert import texts as reading
from meshrun.data.convert import to_tokens as module
from meshrun.data.convert import tokenizing, work
from meshrun.data.convert.inputs import Input, files_below, opened
from meshrun.data.convert.parts import Filled, kept_parts, unwritable, whole_part, write_part
from meshrun.data.convert.result import Converted, checked
from meshrun.data.convert.texts import _READ
from meshrun.data.convert.to_tokens import Texts, to_tokens
from meshrun.data.convert.work import Bad, Crew
from meshrun.data.download import Quiet
from meshrun.data.sources import lines
from meshrun.errors import RunFailed, UserError

WORDS = [
    "the state",
    "of",
    "our",
    "union",
    "is",
    "strong, and",
    "Ünïted",
    "we'll",
    "stand;",
    "1790",
    "—",
    "2021!\tnew",
    "",
    "lines\n",
    "and\r\nspaces",
]


def texts(count: int = 24) -> list[str]:
    drawn = random.Random(0)
    return [" ".join(drawn.choices(WORDS, k=drawn.randrange(5, 200))) for _ in range(count)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST_PART", 2000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A document a file, in folders, some of them linked."""
    for number, text in enumerate(texts()):
        path = tmp_path / "news" / str(1790 + number // 8) / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path / "news"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("given") / "given.json"
    tokenizing.train(texts(), 400, path)
    return path


class Notes(Quiet):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def convert(source: Path, dest: Path, workers: int = 1, told: Quiet | None = None, **options: Any) -> Converted:
    return to_tokens(source, dest, Texts(**options), Crew(workers), told or Quiet())


def documents_of(path: Path) -> list[list[int]]:
    data = TokenFile(path, 1)._open()
    return [data._tokens[begin:end].tolist() for begin, end in zip(data.starts[:-1], data.starts[1:], strict=True)]


def test_the_tokens_are_those_of_plain_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_TRAINED_ON", 100)  # which holds where nobody says how many documents
    made = convert(folder, tmp_path / "news.tokens", vocabulary=350, train_on=20)
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        texts()[:20],
        trainers.BpeTrainer(
            vocab_size=350, special_tokens=["<|start|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    data = TokenFile(tmp_path / "news.tokens", 8)
    assert data.tokenizer.read_text() == plain.to_str()
    expected = [[0, *plain.encode(text).ids] for text in texts()]
    assert documents_of(tmp_path / "news.tokens") == expected
    assert (made.samples, made.tokens, made.bad) == (24, sum(map(len, expected)), 0)
    assert plain.decode(expected[3]) == texts()[3]


def test_any_number_of_processes_and_a_second_run_give_the_same_bytes(folder: Path, tmp_path: Path):
    made = [convert(folder, tmp_path / f"{n}.tokens", workers=n, vocabulary=350) for n in (1, 2, 3)]
    assert len({each.sha256 for each in made}) == 1
    assert len({(tmp_path / f"{n}.tokenizer.json").read_bytes() for n in (1, 2, 3)}) == 1
    assert not list(tmp_path.glob(".*"))
    sums = subprocess.run(["sha256sum", "--check", "2.tokens.sha256"], cwd=tmp_path, capture_output=True, check=True)
    assert sums.stdout == b"2.tokens: OK\n2.tokenizer.json: OK\n"


def killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_a_sentence_and_no_wait(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_part", killed)
    with pytest.raises(
        RunFailed, match=r"was killed, perhaps for want of memory; what is done so far is kept in .*parts"
    ):
        convert(folder, tmp_path / "news.tokens", workers=2, tokenizer=tokenizer)


def test_each_process_of_a_crew_begins_as_it_was_told(tmp_path: Path):
    with work._pool(Crew(1, (tmp_path / "begun").touch)) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
    assert (tmp_path / "begun").exists()


def test_a_document_is_the_same_from_any_kind_of_file(tokenizer: Path, tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [text.replace("\n", " ").replace("\r", "") for text in texts()]
    sources = {
        "folder": tmp_path / "flat",
        "lines": tmp_path / "news.txt",
        "json": tmp_path / "news.jsonl",
        "packed": tmp_path / "news.jsonl.gz",
        "parquet": tmp_path / "news.parquet",
    }
    sources["folder"].mkdir()
    for number, line in enumerate(lines):
        (sources["folder"] / f"{number:02d}.txt").write_bytes(b"\xef\xbb\xbf" + line.encode())
    sources["lines"].write_bytes("\n\n".join(lines).encode())
    rows = "".join(json.dumps({"n": 1, "document": line}) + "\r\n" for line in lines)
    sources["json"].write_text(rows)
    sources["packed"].write_bytes(gzip.compress(rows.encode()))
    pq.write_table(pa.table({"n": range(24), "document": lines}), sources["parquet"], row_group_size=5)
    made = {
        name: convert(
            source,
            tmp_path / f"{name}.tokens",
            tokenizer=tokenizer,
            column="document",
            split_lines=name == "lines",
        )
        for name, source in sources.items()
    }
    assert len({each.sha256 for each in made.values()}) == 1 and made["json"].samples == 24


def test_lines_that_begin_where_a_part_does_are_read_once(tokenizer: Path, tmp_path: Path):
    lines = [f"line {number:04d}" for number in range(500)]  # 200 of them, with their ends, are a part
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    convert(tmp_path / "lines.txt", tmp_path / "lines.tokens", tokenizer=tokenizer, split_lines=True)
    plain = Tokenizer.from_file(str(tokenizer))
    assert [plain.decode(each) for each in documents_of(tmp_path / "lines.tokens")] == lines


def test_a_long_document_has_the_same_tokens_in_pieces(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = convert(folder, tmp_path / "whole.tokens", tokenizer=tokenizer)
    monkeypatch.setattr(tokenizing, "_PIECE", 20)
    monkeypatch.setattr(module, "_AT_ONCE", 50)
    monkeypatch.setattr("meshrun.data.convert.texts._READ", 64)
    assert convert(folder, tmp_path / "cut.tokens", tokenizer=tokenizer).sha256 == whole.sha256


def test_another_tokenizer_under_the_same_name_is_another_result(folder: Path, tmp_path: Path):
    dest = tmp_path / "news.tokens"
    for vocabulary in (290, 310):
        made = to_tokens(folder, dest, Texts(vocabulary=vocabulary), Crew(), Quiet(), overwrite=True)
        plain = Tokenizer.from_file(str(tmp_path / "news.tokenizer.json"))
        assert documents_of(dest)[0] == [0, *plain.encode(texts()[0]).ids]
        assert (plain.get_vocab_size(), made.samples) == (vocabulary, 24)


def test_the_start_of_a_document_cannot_be_written_in_a_text(tokenizer: Path, tmp_path: Path):
    (tmp_path / "trick.txt").write_text("before <|start|> behind")
    convert(tmp_path / "trick.txt", tmp_path / "trick.tokens", tokenizer=tokenizer)
    [tokens] = documents_of(tmp_path / "trick.tokens")
    assert tokens.count(0) == 1 and tokens[0] == 0


def started_and_killed(source: Path, dest: Path, parts: int, **options: Any) -> None:
    """Convert in another process, and kill it when it has made so many parts."""
    child = os.fork()
    if child == 0:
        slow = module.write_part
        module.write_part = lambda *given: (time.sleep(0.05), slow(*given))[1]  # type: ignore[assignment]
        convert(source, dest, workers=2, **options)
        os._exit(0)
    until = time.monotonic() + 60
    while len(list(dest.with_name(f".{dest.name}.parts").glob("[0-9]*.json"))) < parts:
        assert time.monotonic() < until
        time.sleep(0.005)
    workers = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    while any(Path(f"/proc/{each}/cmdline").exists() and "Z" not in state_of(each) for each in workers):
        assert time.monotonic() < until, "processes that convert outlive the one that started them"
        time.sleep(0.01)
    assert len(workers) == 2


def state_of(process: str) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_after_a_kill_it_goes_on_and_ends_with_the_same_bytes(folder: Path, tokenizer: Path, tmp_path: Path):
    expected = convert(folder, tmp_path / "whole.tokens", tokenizer=tokenizer)
    dest, notes = tmp_path / "killed.tokens", Notes()
    started_and_killed(folder, dest, parts=3, tokenizer=tokenizer)
    assert not dest.exists()
    (tmp_path / "killed.tokenizer.json").write_text("{}")  # as if it had been killed between the names of both
    made = convert(folder, dest, workers=2, told=notes, tokenizer=tokenizer)
    assert made.resumed >= 3 and "going on from" in notes.lines[0]
    assert made.sha256 == expected.sha256 and not list(tmp_path.glob(".*"))


def test_a_part_that_is_damaged_meanwhile_is_made_anew(folder: Path, tokenizer: Path, tmp_path: Path):
    expected = convert(folder, tmp_path / "whole.tokens", tokenizer=tokenizer)
    dest = tmp_path / "damaged.tokens"
    started_and_killed(folder, dest, parts=3, tokenizer=tokenizer)
    left = sorted((tmp_path / ".damaged.tokens.parts").glob("*.part"))
    content = bytearray(left[0].read_bytes())
    content[3] ^= 1
    left[0].write_bytes(content)
    made = convert(folder, dest, tokenizer=tokenizer)
    assert made.sha256 == expected.sha256 and made.resumed <= len(left) - 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda facts: {**facts, "arrays": {"lengths": ["|O", 0, 64]}},  # objects at addresses that a file names
        lambda facts: {**facts, "arrays": {"lengths": ["<i8", 0, 1 << 40]}},
        lambda facts: {key: value for key, value in facts.items() if key != "samples"},
        lambda _: [1],
    ],
)
def test_what_is_said_of_a_part_is_checked_as_the_part_is(
    folder: Path, tokenizer: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], Any]
):
    expected = convert(folder, tmp_path / "whole.tokens", tokenizer=tokenizer)
    dest = tmp_path / "damaged.tokens"
    started_and_killed(folder, dest, parts=3, tokenizer=tokenizer)
    said = min((tmp_path / ".damaged.tokens.parts").glob("0*.json"))
    said.write_text(json.dumps(damage(json.loads(said.read_text()))))
    assert convert(folder, dest, tokenizer=tokenizer).sha256 == expected.sha256


def test_pipes_are_refused_and_not_waited_for(folder: Path, tokenizer: Path, tmp_path: Path):
    dest = tmp_path / "news.tokens"
    convert(folder, dest, tokenizer=tokenizer)
    (tmp_path / "news.tokens.sha256").unlink()
    os.mkfifo(tmp_path / "news.tokens.sha256")
    with pytest.raises(UserError, match="it is no plain file"):
        checked(dest, Quiet())
    os.mkfifo(folder / "1790" / "pipe.txt")
    with pytest.raises(UserError, match=r"pipe\.txt cannot be used: it is no plain file"):
        convert(folder, tmp_path / "other.tokens", tokenizer=tokenizer)


@pytest.mark.parametrize("change", ["inputs", "options"])
def test_parts_of_other_inputs_or_options_are_not_used(folder: Path, tokenizer: Path, tmp_path: Path, change: str):
    dest, notes, skip = tmp_path / "news.tokens", Notes(), change == "options"
    started_and_killed(folder, dest, parts=2, tokenizer=tokenizer)
    if change == "inputs":
        (folder / "1790" / "00.txt").write_text("Something else.")
    made = convert(folder, dest, told=notes, tokenizer=tokenizer, skip_bad=skip)
    said = "1790/00.txt has changed" if change == "inputs" else "skip_bad is True and was False"
    assert made.resumed == 0 and "starting anew" in notes.lines[0] and said in notes.lines[0]
    assert made.sha256 == convert(folder, tmp_path / "fresh.tokens", tokenizer=tokenizer).sha256


def test_beside_a_tokenizer_that_is_given_the_size_of_a_vocabulary_means_nothing(folder: Path, tokenizer: Path):
    one, other = (module._options(folder, Texts(tokenizer=tokenizer, vocabulary=size)) for size in (300, 400))
    assert one == other != module._options(folder, Texts(vocabulary=300))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({}, {"skip_bad": False}, "skip_bad is False and was absent"),
        ({"skip_bad": False}, {}, "skip_bad is absent and was False"),
    ],
)
def test_parts_of_a_version_with_other_options_are_not_used(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], said: str
):
    notes = Notes()
    with kept_parts(tmp_path / "news.tokens", then, [], notes) as parts:
        write_part(parts.folder, 0, lambda _: Filled({}, {}))
    with kept_parts(tmp_path / "news.tokens", now, [], notes) as parts:
        assert whole_part(parts.folder, 0) is None
    assert [line.endswith(f"without the 1 parts of an earlier start: {said}") for line in notes.lines] == [True]


def test_a_full_disk_is_a_sentence_and_parts_stay(folder: Path, tokenizer: Path, tmp_path: Path):
    dest = tmp_path / "news.tokens"
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))  # the parts have room, what they are joined to has not
        try:
            convert(folder, dest, tokenizer=tokenizer, vocabulary=300)
        except RunFailed as error:
            (tmp_path / "said").write_text(str(error))
        os._exit(0)
    os.waitpid(child, 0)
    said = (tmp_path / "said").read_text()
    assert "no room left for" in said and ".news.tokens.parts" in said and "run the same command again" in said
    made = convert(folder, dest, tokenizer=tokenizer, vocabulary=300)
    assert made.resumed > 5
    for number in (errno.ENOSPC, errno.EDQUOT):
        at_once = str(unwritable(dest, OSError(number, os.strerror(number)), tmp_path))
        assert at_once.endswith("; free some space and run the same command again"), "nothing was done"


def test_two_at_once_do_not_mix(folder: Path, tokenizer: Path, tmp_path: Path):
    from meshrun.data.convert.parts import kept_parts

    dest = tmp_path / "news.tokens"
    with kept_parts(dest, {}, [], Quiet()), pytest.raises(UserError, match="is being made by another process"):
        convert(folder, dest, tokenizer=tokenizer)


def test_an_input_that_changes_meanwhile_ends_the_conversion(folder: Path):
    file = folder / "1790" / "00.txt"
    listed = Input("1790/00.txt", file.stat().st_size, file.stat().st_mtime_ns)
    opened(folder, listed).close()
    os.utime(file, ns=(listed.changed, listed.changed + 1))  # as if it was written anew, as long as before
    with pytest.raises(RunFailed, match=r"00\.txt has changed while it was being converted"):
        opened(folder, listed)
    file.write_text("Something else.")
    os.utime(file, ns=(listed.changed, listed.changed))
    with pytest.raises(RunFailed, match=r"00\.txt has changed while it was being converted"):
        opened(folder, listed)


def test_bad_documents_end_it_or_are_left_out(folder: Path, tokenizer: Path, tmp_path: Path):
    expected = convert(folder, tmp_path / "good.tokens", tokenizer=tokenizer)
    (folder / "1790" / "05b.txt").write_bytes(b"fine at first\n" * 10 + b"caf\xe9 au lait")
    (folder / "1791" / "11b.txt").write_bytes(b"\xff\xfe")
    (folder / "1791" / "12b.txt").write_bytes(b"")
    (folder / "1791" / "13b.txt").write_bytes(b"x" * (_READ - 1) + b"\xc3")
    for workers in (1, 2):
        with pytest.raises(
            UserError, match=r"1790/05b\.txt cannot be used: it is not UTF-8 \(byte 0xe9\); .*--skip-bad"
        ):
            convert(folder, tmp_path / "bad.tokens", workers=workers, tokenizer=tokenizer)
    made = convert(folder, tmp_path / "skipped.tokens", workers=2, tokenizer=tokenizer, skip_bad=True)
    assert (made.bad, made.empty, made.sha256) == (3, 1, expected.sha256)
    assert [Path(why.split(" ")[0]).name for why in made.why] == ["05b.txt", "11b.txt", "13b.txt"]


def test_a_damaged_row_group_is_named_and_can_be_left_out(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = tmp_path / "news.parquet"
    words = [f"hello world {number} " * 20 for number in range(400)]
    pq.write_table(pa.table({"text": words}), source, row_group_size=200, compression="snappy", use_dictionary=False)
    data = bytearray(source.read_bytes())
    data[1000:2000] = b"\xff" * 1000
    source.write_bytes(data)
    with pytest.raises(UserError, match=r"row group 0 of .*news\.parquet cannot be used: .* after 0 of its rows; "):
        convert(source, tmp_path / "news.tokens", vocabulary=300)
    made = convert(source, tmp_path / "skipped.tokens", vocabulary=300, skip_bad=True)
    assert (made.samples, made.bad) == (200, 1)


def test_a_bad_line_is_named_by_its_number(tokenizer: Path, tmp_path: Path):
    source, dest = tmp_path / "news.jsonl", tmp_path / "news.tokens"
    rows = [json.dumps({"text": text}) for text in texts()]
    for bad, said in [
        ('{"text": "half', r"line 20 of .*news\.jsonl cannot be used: it is no JSON"),
        ('{"body": "x", "n": 1}', r"line 20 of .* it has no column 'text' but 'body', 'n' \(--column\)"),
        ('{"text": 7}', r"line 20 of .* its 'text' is no text but int"),
        ('{"text": "\\ud800"}', r"line 20 of .* it holds half of a character"),
        ("[1]", r"line 20 of .* it is no object but list"),
        ("[" * 200_000, r"line 20 of .* it is nested too deeply"),
    ]:
        source.write_text("\n".join([*rows[:19], bad, *rows[20:]]) + "\n")
        with pytest.raises(UserError, match=said):
            convert(source, dest, tokenizer=tokenizer)
        made = convert(source, tmp_path / "other.tokens", tokenizer=tokenizer, skip_bad=True)
        assert (made.samples, made.bad) == (23, 1)
        for each in tmp_path.glob("other.*"):
            each.unlink()


def test_what_cannot_be_converted_is_a_sentence(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dest = tmp_path / "some.tokens"
    mixed, empty, blank = tmp_path / "mixed", tmp_path / "empty", tmp_path / "blank.txt"
    for each in (mixed, empty):
        each.mkdir()
    (mixed / "a.txt").write_text("a")
    (mixed / "b.jsonl").write_text("{}")
    blank.write_text("")
    (tmp_path / "no.parquet").write_text("no")
    nothing = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (tmp_path / "startless.json").write_text(json.dumps(nothing))
    for source, options, said in [
        (tmp_path / "none", {}, "No such file"),
        (empty, {}, "there are no files in"),
        (mixed, {}, r"several kinds, such as a\.txt and b\.jsonl"),
        (mixed / "b.jsonl", {"split_lines": True}, "--split-lines is for plain texts"),
        (blank, {"tokenizer": tokenizer}, "no document with a text"),
        (tmp_path / "no.parquet", {"tokenizer": tokenizer}, "is not a Parquet file"),
        (folder, {"vocabulary": 256}, r"vocabulary is 256; it must be at least 257.*--vocabulary"),
        (folder, {"train_on": 0}, "--train-on"),
        (folder, {"tokenizer": tmp_path / "gpt2.json"}, r"there is no tokenizer .*gpt2\.json; give .*--tokenizer"),
        (folder, {"tokenizer": blank}, r"blank\.txt is not a tokenizer.*--tokenizer"),
        (folder, {"tokenizer": tmp_path / "startless.json"}, r"none of the tokens <\|start\|>, .*--start"),
    ]:
        with pytest.raises(UserError, match=said):
            convert(source, dest, **options)
    assert not list(tmp_path.glob(".*")), "parts of what was refused stay behind"
    dest.write_text("mine")
    with pytest.raises(UserError, match=r"some\.tokens is there already; .*--overwrite"):
        convert(folder, dest, tokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"not installed; pip install 'meshrun\[text\]'"):
        convert(folder, tmp_path / "other.tokens", vocabulary=300)


def test_a_damaged_result_is_found(folder: Path, tokenizer: Path, tmp_path: Path):
    dest = tmp_path / "news.tokens"
    convert(folder, dest, tokenizer=tokenizer)
    assert checked(dest, Quiet()) == []
    content = bytearray(dest.read_bytes())
    content[-1] ^= 1
    dest.write_bytes(content)
    assert "news.tokens is not as it was made" in checked(dest, Quiet())[0]
    sums = tmp_path / "news.tokens.sha256"
    sums.write_text(f"{sums.read_text()}{'0' * 64}  ../elsewhere\n")
    with pytest.raises(UserError, match=r"names '../elsewhere', which is no file beside news.tokens"):
        checked(dest, Quiet())
    sums.unlink()
    assert "its sum is wrong" in checked(dest, Quiet())[0]


def test_the_command_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    dest = str(tmp_path / "news.tokens")

    def status(*words: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["convert-data", *words])
        return ended.value.code

    assert status(str(folder), dest, "--vocabulary", "300", "--workers", "2", "--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert document.keys() >= {
        "destination",
        "kind",
        "samples",
        "bytes",
        "tokens",
        "sha256",
        "bad",
        "seconds",
        "resumed",
    }
    assert (document["destination"], document["kind"], document["samples"]) == (dest, "tokens", 24)
    assert np.sum([len(each) for each in documents_of(Path(dest))]) == document["tokens"]
    assert status("--check", dest) == 0 and "is as it was made" in capfd.readouterr().out
    for words, said in [
        ([str(folder), dest], "--overwrite"),
        ([str(folder), str(tmp_path / "news.zip")], "must end in .h5, .hdf5, .tokens (DEST)"),
        ([str(folder), dest, "--size", "7"], "--size is for images (DEST.h5)"),
        (
            [str(folder), dest, "--tokenizer", "x.json", "--vocabulary", "9"],
            "--vocabulary is for a tokenizer that is trained",
        ),
        ([str(folder)], "needs SOURCE and DEST"),
    ]:
        assert status(*words) == 2
        assert said in capfd.readouterr().err


@pytest.mark.parametrize("planted", ["link", "folder"])
def test_parts_are_not_kept_in_a_folder_that_another_has_put_there(planted: str, folder: Path, tmp_path: Path):
    """Beside a result in a folder that all may write to, such as /tmp: parts and lists would go where he wants."""
    precious, parts = tmp_path / "precious", tmp_path / ".out.tokens.parts"
    precious.write_text("years of work")
    if planted == "link":
        (tmp_path / "theirs").mkdir()
        parts.symlink_to(tmp_path / "theirs")
    else:
        parts.mkdir()
        parts.chmod(0o777)
    (parts / "inputs.jsonl.new").symlink_to(precious)
    with pytest.raises(UserError, match=r"out\.tokens\.parts, .* must be a folder that this user alone can write to"):
        convert(folder, tmp_path / "out.tokens", vocabulary=300)
    assert precious.read_text() == "years of work"


def test_a_text_that_is_longer_than_its_file_can_hold_is_refused(tmp_path: Path):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"text": ["x" * 10_000_000]}), path, compression="zstd")
    (unit,) = (job.units[0] for job in reading.jobs_of(path, files_below(path), reading.Reading("parquet"), 1 << 20))
    with pytest.raises(UserError, match=r"row group 0 of .* has rows of 10,\d+,\d+ bytes .* cannot hold"):
        next(iter(reading.documents(path, [unit], reading.Reading("parquet"))))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "a", "b": [' + b"{}, " * 20_000 + b"1]}", r"line 2 of .* it has 80,\d+ bytes that take"),
        (b'{"text": "' + b"a" * 300_000 + b'"}', r"line 2 of it has more than 262,144 bytes, too much for a file of"),
    ],
    ids=["objects", "a text"],
)
def test_a_long_line_that_would_take_far_more_memory_than_its_file_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, why: str
):
    monkeypatch.setattr(lines, "_LONG", 1 << 12)
    monkeypatch.setattr("meshrun.data.sources.source.AT_ONCE", 1 << 20)
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "b"}\n' + line + b'\n{"text": "c"}\n'))
    (unit,) = (job.units[0] for job in reading.jobs_of(path, files_below(path), reading.Reading("json"), 1 << 20))
    bad = Bad()
    documents = reading.good(reading.documents(path, [unit], reading.Reading("json")), True, bad)
    assert next("".join(each) for each in documents) == "b"
    list(documents)
    assert bad.count == 1 and re.search(why, bad.why[0])


def test_a_text_that_a_column_of_parquet_holds_once_is_in_memory_once(tmp_path: Path):
    """1,000 rows of 200,000 characters, in a file of some hundred bytes."""
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"text": ["x" * 200_000] * 1000}), path, compression="zstd")
    (unit,) = (job.units[0] for job in reading.jobs_of(path, files_below(path), reading.Reading("parquet"), 1 << 20))
    before = pa.total_allocated_bytes()
    documents = reading.documents(path, [unit], reading.Reading("parquet"))
    assert all(isinstance(next(documents), reading.Document) for _ in range(5))
    assert pa.total_allocated_bytes() - before < 20 << 20


def test_no_number_of_processes_beyond_reason_is_started(folder: Path, tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        main(["convert-data", str(folder), str(tmp_path / "t.tokens"), "--workers", "1000000"])
    assert ended.value.code == 2
