"""The images recipe: torchvision's networks, pictures from folders and files, learnt well and the same on any mesh."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from meshrun import Experiment, ImageFolder, UserError, mesh
from meshrun.data import staging
from meshrun.recipes import images
from meshrun.recipes.images import PRESETS, STAMPS, ResNet, Shape, classify, experiment, load, segments, stage_data
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.data.server import Server
from tests.ranks import run_on_ranks

SMALL = Shape((1, 1, 1, 1), width=8, size=32)
NORMS = ("group", "batch", "frozen")
MAJORITY = 36 / 61


@pytest.mark.parametrize("preset, parameters, tensors", [("resnet18", 11_689_512, 122), ("resnet50", 25_557_032, 320)])
def test_presets_are_torchvisions_networks(preset: str, parameters: int, tensors: int):
    with torch.device("meta"):
        net = ResNet(replace(PRESETS[preset], norm="batch"), [f"class {n}" for n in range(1000)])
    assert sum(each.numel() for each in net.parameters()) == parameters
    names = net.state_dict()
    assert len(names) == tensors
    wanted = {"conv1.weight", "bn1.running_var", "layer1.0.conv2.weight", "layer4.1.bn2.bias", "fc.bias"}
    assert wanted | {"layer2.0.downsample.0.weight", "layer2.0.downsample.1.num_batches_tracked"} <= names.keys()
    if preset == "resnet50":
        assert names["layer3.0.conv3.weight"].shape == (1024, 256, 1, 1)
        assert net.layer2[0].conv2.stride == (2, 2), "as torchvision has it, not in the first convolution"


@pytest.mark.parametrize("norm", NORMS)
def test_segments_are_all_of_the_network_in_its_order(norm: Any):
    net = ResNet(replace(SMALL, norm=norm, bottleneck=True), "ab")
    inside = [id(each) for segment in segments(net) for each in segment.parameters()]
    assert sorted(inside) == sorted(id(each) for each in net.parameters())
    called: list[Any] = []
    for segment in segments(net):
        segment.register_forward_hook(lambda module, *_: called.append(module))
    net.eval()(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    assert called == list(segments(net))


@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_a_sample_does_not_depend_on_its_batch(norm: Any):
    torch.manual_seed(0)
    net = ResNet(replace(SMALL, norm=norm), "abc").train()
    pictures = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    assert torch.allclose(net(pictures)[:1], net(pictures[:1]), atol=1e-5)


def test_of_larger_pictures_it_sees_the_middle_and_smaller_ones_are_enlarged():
    net = ResNet(SMALL, "ab").eval()
    large = torch.randint(0, 256, (2, 3, 36, 40), dtype=torch.uint8)
    assert torch.equal(net(large), net(large[:, :, 2:34, 4:36]))
    twice = torch.nn.functional.interpolate(large[:, :, :16, :16].float(), (32, 32), mode="bilinear")
    assert torch.equal(net(large[:, :, :16, :16]), net(twice)), "smaller ones are enlarged"


def kept(folder: Path, shape: Shape, classes: str) -> tuple[ResNet, Path]:
    """A network with drawn statistics, and its weights as torchvision would keep them."""
    torch.manual_seed(3)
    net = ResNet(shape, classes).eval()
    for name, each in net.state_dict().items():
        if name.endswith(("running_mean", "running_var")):
            each.uniform_(0.5, 1.5)
    save_file(net.state_dict(), folder / "weights.safetensors")
    return net, folder / "weights.safetensors"


@pytest.mark.parametrize("norm", ["batch", "frozen"])
def test_weights_are_started_from_and_a_head_for_other_classes_is_drawn(norm: Any, tmp_path: Path):
    theirs, path = kept(tmp_path, replace(SMALL, norm="batch"), "abcdef")
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    same, other = (ResNet(replace(SMALL, norm=norm), classes).eval() for classes in ("uvwxyz", "uv"))
    load(same, path)
    assert torch.equal(same(pictures), theirs(pictures))
    drawn = other.fc.weight.clone()
    load(other, path)
    assert torch.equal(other.fc.weight, drawn) and torch.equal(
        other.layer4[0].conv2.weight, theirs.layer4[0].conv2.weight
    )


def test_frozen_statistics_stay_in_training(tmp_path: Path):
    _, path = kept(tmp_path, replace(SMALL, norm="batch"), "ab")
    net = ResNet(replace(SMALL, norm="frozen"), "ab")
    load(net, path)
    before = net.bn1.running_mean.clone()
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(net.train()(pictures), net.eval()(pictures)) and torch.equal(net.bn1.running_mean, before)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path):
    _, path = kept(tmp_path, replace(SMALL, norm="batch"), "ab")
    with pytest.raises(UserError, match=r"batch statistics, but norm is group; .*--norm frozen.*--norm batch"):
        load(ResNet(SMALL, "ab"), path)
    with pytest.raises(
        UserError, match=r"conv1\.weight has the shape \[8, 3, 7, 7\] in .* needs \[16, 3, 7, 7\].*--weights"
    ):
        load(ResNet(replace(SMALL, norm="batch", width=16), "ab"), path)
    with pytest.raises(UserError, match=r"layer1\.1\.conv1\.weight is missing in .*--preset"):
        load(ResNet(replace(SMALL, norm="batch", blocks=(2, 1, 1, 1)), "ab"), path)
    path.write_bytes(b"no safetensors")
    with pytest.raises(UserError, match=r"cannot read weights from .*--weights"):
        load(ResNet(SMALL, "ab"), path)
    with pytest.raises(UserError, match=r"norm is frozen, but there are no weights .*--weights"):
        experiment(norm="frozen")
    with pytest.raises(UserError, match=r"there are no images at photos; give a folder .*--images"):
        experiment(images=Path("photos"))
    with pytest.raises(UserError, match=r"size is 8; .*--size"):
        experiment(size=8)


def test_pictures_come_with_the_package_and_their_source_is_told():
    made = experiment(size=32)
    assert (len(made.train), len(made.evals["val"])) == (155, 61)
    image, label = made.train[0]
    assert (image.shape, image.dtype, int(label)) == ((3, 36, 36), torch.uint8, 0)
    assert made.model().classes == ("animal", "plant")
    text = (STAMPS.parent / "README.md").read_text()
    assert "stamps/" in text and "tuxpaint-stamps-default" in text and "GPL-2" in text


def picture(colour: str = "red") -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (40, 32), colour).save(written, "JPEG")
    return written.getvalue()


def folder_of(where: Path, *names: str) -> Path:
    for name in names:
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(picture())
    return where


def test_classes_of_validation_are_those_of_training_or_some_of_them(tmp_path: Path):
    where = folder_of(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "val/dog/1.jpg")
    _train, val = images.sets_of(where, 36)
    assert val[0][1] == 1
    folder_of(tmp_path, "val/cow/1.jpg")
    with pytest.raises(UserError, match=r"val has the class 'cow', which is none of cat, dog"):
        experiment(images=where)


def test_a_file_of_pictures_trains_as_the_folder_does(tmp_path: Path):
    with h5py.File(tmp_path / "stamps.h5", "w") as file:
        file.attrs["format"] = "meshrun-images-1"
        for split in ("train", "val"):
            source = ImageFolder(STAMPS / split, 36)
            pictures, labels = source.batch_of(list(range(len(source))))
            group = file.create_group(split)
            group["images"], group["labels"] = pictures.numpy(), labels.numpy()
            group.attrs["classes"] = source.classes
            group.attrs["format"] = "meshrun-images-1"
    ours, theirs = experiment(size=32), experiment(size=32, images=tmp_path / "stamps.h5")
    assert theirs.model().classes == ("animal", "plant")
    for mine, other in ((ours.train, theirs.train), (ours.evals["val"], theirs.evals["val"])):
        assert len(mine) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(mine.batch_of([60, 7]), other.batch_of([60, 7]), strict=True))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> staging.Place:
    found = staging.Place(tmp_path / "staged", "meshrun stage images")
    monkeypatch.setattr(staging, "_place", found)
    monkeypatch.chdir(tmp_path)
    return found


def archive(*names: str, also: tuple[str, ...] = ()) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as opened:
        for name in names:
            opened.writestr(f"hymenoptera_data/{name}", picture())
        for name in also:
            opened.writestr(name, b"something else")
    return written.getvalue()


def stage(place: staging.Place, data: bytes, monkeypatch: pytest.MonkeyPatch, between: Any = None) -> staging.Stage:
    with Server({"hymenoptera_data.zip": data}) as server:
        monkeypatch.setattr(images, "HYMENOPTERA", f"{server.url}/hymenoptera_data.zip")
        with staging.staging(place.folder) as made:
            stage_data(made)
        if between is not None:
            between()
            with staging.staging(place.folder) as made:
                stage_data(made)
            assert len(server.asked) == 1
        return made


NAMES = [f"{split}/{kind}/{n}.jpg" for split in ("train", "val") for kind in ("ants", "bees") for n in range(20)]


def test_ants_and_bees_are_staged_and_trained_on(place: staging.Place, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="hymenoptera is not here; on a machine with internet: meshrun stage images"):
        experiment(images=Path("hymenoptera"))
    junk = (
        "__MACOSX/train/ants/._0.jpg",
        "hymenoptera_data/train/ants/imageNotFound.gif",
        "hymenoptera_data/val/.DS_Store",
    )
    lost = place.folder / "hymenoptera" / NAMES[3]
    again = stage(place, archive(*NAMES, also=junk), monkeypatch, lambda: lost.write_bytes(b"not all of it"))
    assert len(again.kept) == 81 and not again.brought, "the archive and its pictures, one of them unpacked again"
    found = sorted(str(each.relative_to(place.folder)) for each in place.folder.rglob("*") if each.is_file())
    assert [each for each in found if each.startswith("hymenoptera/")] == sorted(
        f"hymenoptera/{each}" for each in NAMES
    )
    assert lost.read_bytes() == picture()
    made = experiment(images=Path("hymenoptera"), size=32)
    assert (len(made.train), len(made.evals["val"]), made.model().classes) == (40, 40, ("ants", "bees"))


@pytest.mark.parametrize("evil", ["hymenoptera_data/train/ants/../../../../evil.jpg", "/tmp/train/ants/evil.jpg"])
def test_an_archive_that_reaches_outside_is_refused(evil: str, place: staging.Place, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="would lie outside of"):
        stage(place, archive(NAMES[0], also=(evil,)), monkeypatch)
    assert not list(place.folder.parent.rglob("evil.jpg"))


def test_a_broken_archive_is_refused(place: staging.Place, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"hymenoptera_data\.zip cannot be unpacked .*stage again"):
        stage(place, archive(*NAMES)[:-30], monkeypatch)


def on(layout: str) -> None:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))


@pytest.mark.ranks(2)
def test_two_ranks_learn_to_tell_animals_from_plants(tmp_path: Path):
    """Always saying animal is right for 0.59 of them; the seeds 0 to 4 reach 0.84 to 0.89."""
    on("dp=2")
    found = Trainer(replace(experiment(), epochs=8), weights=tmp_path).train()
    scores = found["eval"]["val"]
    assert scores["count"] == 61
    assert scores["accuracy"] > 0.75 > MAJORITY + 0.15 and scores["loss"] < 0.5


STEPS = 7
"""Five an epoch: the last one has 27 samples, of which two ranks get 14 and 13."""


def small() -> Experiment:
    return replace(experiment(size=32), steps=STEPS)


def train(layout: str, folder: Path) -> None:
    """The body of a rank; rank 0 writes down what came out."""
    on(layout)
    found = Trainer(small()).train()
    if mesh.start().rank == 0:
        (folder / "result.json").write_text(json.dumps(found))


def trained(layout: str, ranks: int, folder: Path) -> dict[str, Any]:
    run_on_ranks(__file__, "train", ranks, {"layout": layout, "folder": folder}, 60)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_every_mesh_trains_to_the_same_losses(tmp_path: Path):
    one = trained("dp=1", 1, tmp_path)
    assert len(one["losses"]) == STEPS
    for layout in ("dp=2", "fsdp=2", "pp=2"):
        many = trained(layout, 2, tmp_path)
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5), layout
        assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-4), layout
        assert many["eval"]["val"]["loss"] == pytest.approx(one["eval"]["val"]["loss"], rel=1e-5), layout
        assert many["sample_ids_sha256"] == one["sample_ids_sha256"]


CUT = 3


def begin(folder: Path) -> None:
    on("dp=2")
    trainer = Trainer(small(), keeping=Keeping(folder / "state", every=Every(steps=CUT)))
    _write_ids(trainer, folder, until=CUT)
    assert trainer.keeper is not None
    trainer.keeper.finish()


def go_on(folder: Path) -> None:
    on("dp=3")
    trainer = Trainer(small(), keeping=Keeping(folder / "state", every=Every(never=True)))
    found = trainer.resume()
    assert found is not None and found["step"] == CUT
    _write_ids(trainer, folder, until=STEPS)
    if mesh.start().rank == 0:
        (folder / "losses.json").write_text(json.dumps(trainer.totals.losses))


def _write_ids(trainer: Trainer, folder: Path, until: int) -> None:
    lines = []
    for update in trainer.steps():
        if update.step == until:  # lost, as after a crash: the state was saved before it
            break
        lines += [f"{update.step} {number}" for piece in update.pieces for number in piece]
    (folder / f"ids-{until}-{mesh.start().rank}").write_text("\n".join(lines))


def test_it_goes_on_in_the_middle_of_an_epoch_on_another_number_of_ranks(tmp_path: Path):
    run_on_ranks(__file__, "begin", 2, {"folder": tmp_path}, 60)
    run_on_ranks(__file__, "go_on", 3, {"folder": tmp_path}, 60)
    used = [tuple(map(int, line.split())) for each in tmp_path.glob("ids-*") for line in each.read_text().splitlines()]
    assert len({each.name for each in tmp_path.glob("ids-*")}) == 5
    first = sorted(number for step, number in used if step < 5)
    assert first == list(range(155)), "each picture once in the epoch that was cut"
    assert len(used) == 155 + 2 * 32 == len(set(used))
    one = trained("dp=1", 1, tmp_path)
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(one["losses"], rel=1e-5)


def test_what_was_taken_for_what_is_told_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = experiment(size=32)
    torch.manual_seed(0)
    net = made.model().eval()
    assert made.after is not None
    found = made.after(net, tmp_path)
    assert found is not None
    counts = np.array(found["confusion"])
    assert counts.sum(1).tolist() == [36, 25] and found["classes"] == ["animal", "plant"]
    data = made.evals["val"]
    pictures, labels = data.batch_of(list(range(61)))
    assert found["accuracy"] == counts.trace() / 61 == (net(pictures).argmax(1) == labels).double().mean()
    text = capsys.readouterr().out.splitlines()
    assert text[1].split() == ["animal", "plant", "right"]
    assert text[2].split() == ["animal", *map(str, counts[0]), f"{counts[0, 0] / 36:.0%}"]
    assert f"accuracy {counts.trace() / 61:.3f}: {counts.trace()} of 61 right" in text[4]
    drawn = ET.parse(tmp_path / "pictures" / "confusion.svg").getroot()
    words = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("animal") == words.count("plant") == 2 and words[0] == text[4].split(";")[0]
    assert {f"{each}" for each in counts.flatten()} <= set(words)


def test_many_classes_are_drawn_small_and_the_worst_mistakes_are_told():
    names = [f"<class & {n}>" for n in range(300)]
    counts = torch.eye(300, dtype=torch.int64) * 50
    counts[4, 9], counts[7, 1] = 11, 20
    assert images.table(counts, names).splitlines()[1:] == [
        "     20  <class & 7> for <class & 1>",
        "     11  <class & 4> for <class & 9>",
    ]
    text = images.drawing(counts, names, "fine")
    assert len(list(ET.fromstring(text).iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 302 and len(text) < 100_000


@pytest.mark.parametrize("number", [0, 17, 60])
def test_a_single_picture_is_classified_as_in_the_validation(number: int, tmp_path: Path):
    made = experiment()
    torch.manual_seed(0)
    net = made.model().eval()
    data: Any = made.evals["val"]
    wanted = net(data[number][0][None])[0].softmax(0)
    found = classify(net, STAMPS / "val" / data.files[number])
    assert list(found) == [net.classes[n] for n in wanted.argsort(descending=True)]
    assert [found[name] for name in net.classes] == pytest.approx(wanted.tolist(), abs=2e-3)
    assert len(classify(net, STAMPS / "val" / data.files[number], top=1)) == 1
    (tmp_path / "cat.jpg").write_bytes(picture()[:200])
    with pytest.raises(UserError, match=r"cat\.jpg cannot be read as an image: .*--image"):
        classify(net, tmp_path / "cat.jpg")
