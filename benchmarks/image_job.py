"""A small image job from start to end, beside Lightning: ResNet-18, two classes, batch 1, 50 epochs, validated in each.

    python benchmarks/image_job.py                        # on a GPU: about 8 minutes, most of them Lightning's
    python benchmarks/image_job.py --sides meshrun,lightning-8 --rounds 3 --json
    meshrun run benchmarks/image_job.py --images PICTURES --epochs 50        # what meshrun's side is

244 + 153 JPEG files of 500 x 375 are drawn anew, as many and as large as those of the transfer-learning tutorial that
this job is taken from. Each side is a fresh process on the same files, timed from its start to its end, imports
included. Both train torchvision's network with BatchNorm from random weights, with SGD and a rate that is a tenth after
every 7 epochs, on parts of the pictures that are cut out and mirrored at random, and are validated on the middle of
every picture after every epoch. Convolutions round what they multiply to 10 bits, as torch by itself has it on a GPU:
what meshrun calls tf32. One thing differs: meshrun cuts random parts out of the middle square of a picture, which it
decodes once.

The ratio is meshrun's time over the other's of the same round, the median over rounds. That both train the same shows
in the mean loss of the last epoch. The accuracy after it is printed too, and is a matter of luck on either side: with a
picture a batch, what BatchNorm validates with are the statistics of the last ten or so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from meshrun import Experiment, ImageFolder, accuracy, cross_entropy, random_crop, random_flip
from meshrun.recipes.images import PRESETS, ResNet

ROOT = Path(__file__).parents[1]
RATE, MOMENTUM, EVERY, FACTOR = 0.001, 0.9, 7, 0.1
"""Of the tutorial: the learning rate, which is multiplied by the factor after so many epochs."""
WIDTH, HEIGHT = 500, 375
CLASSES = ("ants", "bees")
SIDES = ("meshrun", "lightning-8", "lightning-0")


def experiment(images: Path = Path("pictures")) -> Experiment:
    """The job as meshrun trains it.

    images: folder with train/CLASS and val/CLASS
    """
    train = ImageFolder(images / "train", 256)
    val = ImageFolder(images / "val", 256, classes=train.classes)
    shape = replace(PRESETS["resnet18"], norm="batch")

    return Experiment(
        model=lambda: ResNet(shape, train.classes),
        train=train,
        evals={"val": val},
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
        augment=lambda batch, draws: random_flip(random_crop(batch, 224, draws, scale=(0.08, 1.0)), draws),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM),
        schedule=lambda step, _: FACTOR ** (step // len(train) // EVERY),
        precision="tf32",
        batch=1,
        epochs=50,
    )


def main() -> int:
    options = parsed()
    if options.tiny:
        options.train, options.val, options.epochs, options.rounds = 6, 4, 1, 1
    sides = options.sides.split(",")
    if unknown := set(sides) - set(SIDES):
        print(f"--sides has {', '.join(sorted(unknown))}; it must be of {', '.join(SIDES)}", file=sys.stderr)
        return 2
    if options.side:
        print(json.dumps(with_lightning(options.pictures, options.epochs, int(options.side.partition("-")[2]))))
        return 0
    missing = [name for name in ("lightning", "torchvision") if find_spec(name) is None]
    left_out = {side: f"{missing[0]} is not installed" for side in sides if side != "meshrun" and missing}
    sides = [side for side in sides if side not in left_out]
    took: dict[str, list[float]] = {side: [] for side in sides}
    reached: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="meshrun-images-") as folder:
        pictures = draw(Path(folder) / "pictures", options.train, options.val)
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                seconds, reached[side] = run(side, pictures, options, Path(folder) / f"{side}-{number}")
                took[side].append(seconds)
                print(f"round {number + 1}: {side}: {seconds:.1f} s, {in_words(reached[side])}", file=sys.stderr)
    result = {**summary(took, reached, options), "left_out": left_out}
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=50, help="(50)")
    parser.add_argument("--rounds", type=int, default=1, help="times that every side has its turn (1)")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"some of {','.join(SIDES)}")
    parser.add_argument("--train", type=int, default=244, help="pictures to train on (244)")
    parser.add_argument("--val", type=int, default=153, help="pictures to validate on (153)")
    parser.add_argument("--tiny", action="store_true", help="a few pictures, once: to see that it works")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--pictures", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def draw(folder: Path, train: int, val: int) -> Path:
    """Photographs of nothing: clouds of colour with a grain, and in each class stripes of another direction.

    With fainter stripes it is a matter of luck whether a network sees them before its rate is a tenth.
    """
    rng = np.random.default_rng(0)
    down, across = np.mgrid[0:HEIGHT, 0:WIDTH]
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            kind = number % len(CLASSES)
            path = folder / split / CLASSES[kind] / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            clouds = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((WIDTH, HEIGHT))
            phase, wave = rng.uniform(0, 6.28), rng.uniform(12, 30)
            stripes = 60 * np.sin((down if kind else across) * 6.28 / wave + phase)
            grain = rng.normal(0, 18, (HEIGHT, WIDTH, 3))
            pixels = np.asarray(clouds, dtype=np.float32) * 0.4 + 75 + stripes[:, :, None] + grain
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return folder


def run(side: str, pictures: Path, options: argparse.Namespace, folder: Path) -> tuple[float, dict[str, float]]:
    """Seconds of a fresh process from its start to its end, and what it has reached."""
    if side == "meshrun":
        words = ["-m", "meshrun", "run", __file__, "--images", str(pictures), "--epochs", str(options.epochs)]
        words += ["--runs", str(folder), "--json"]
    else:
        words = [__file__, "--side", side, "--pictures", str(pictures), "--epochs", str(options.epochs)]
    folder.mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{side} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    if side == "meshrun":
        last = found["losses"][-options.train :]
        found = {"train_loss": statistics.fmean(last), "accuracy": found["eval"]["val"]["accuracy"]}
    return seconds, found


def in_words(reached: dict[str, float]) -> str:
    return f"training loss {reached['train_loss']:.4f}, accuracy {reached['accuracy']:.3f}"


def with_lightning(pictures: Path, epochs: int, workers: int) -> dict[str, float]:
    """The job as Lightning's pages show how to write one."""
    import lightning as L
    import torch.nn.functional as F
    from torch.utils.data import DataLoader
    from torchvision import datasets, models, transforms

    out = os.dup(1)
    os.dup2(2, 1)  # standard output is for the result
    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    cut = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
    whole = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = models.resnet18(num_classes=len(CLASSES))
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            self.log("train_loss", loss)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            logits = self.model(x)
            self.log("val_loss", F.cross_entropy(logits, y))
            self.log("val_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, EVERY, FACTOR)]

    train = datasets.ImageFolder(pictures / "train", transforms.Compose(cut))
    val = datasets.ImageFolder(pictures / "val", transforms.Compose(whole))
    trainer = L.Trainer(max_epochs=epochs, accelerator="auto", devices=1)
    trained = Classifier()
    trainer.fit(
        trained,
        DataLoader(train, batch_size=1, shuffle=True, num_workers=workers),
        DataLoader(val, batch_size=1, num_workers=workers),
    )
    sys.stdout.flush()
    os.dup2(out, 1)
    last = torch.stack(trained.losses[-len(train) :])
    return {"train_loss": float(last.mean()), "accuracy": float(trainer.callback_metrics["val_acc"])}


def summary(
    took: dict[str, list[float]], reached: dict[str, dict[str, float]], options: argparse.Namespace
) -> dict[str, Any]:
    rows = [
        {"side": side, "seconds": statistics.median(times), "all": times, **reached[side]}
        for side, times in took.items()
    ]
    ratios = {}
    for side, times in took.items():
        if side != "meshrun" and "meshrun" in took:
            name = f"image_job_vs_lightning_{side.partition('-')[2]}_workers"
            ratios[name] = statistics.median(a / b for a, b in zip(took["meshrun"], times, strict=True))
    if "image_job_vs_lightning_8_workers" in ratios:
        ratios["image_job_vs_lightning"] = ratios["image_job_vs_lightning_8_workers"]
    setting = {name: getattr(options, name) for name in ("epochs", "rounds", "train", "val")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"rows": rows, "ratios": ratios, "setting": {**setting, "device": device, "torch": torch.__version__}}


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        print(f"{row['side']:<14} {row['seconds']:8.1f} s   {in_words(row)}")
    for side, why in result["left_out"].items():
        print(f"{side:<14} left out: {why}")
    for name, ratio in result["ratios"].items():
        print(f"{name} {ratio:.3f}")


if __name__ == "__main__":
    sys.exit(main())
