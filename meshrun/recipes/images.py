"""Image classification: a ResNet on a folder of images, or on one HDF5 file of them.

    meshrun run images                                         # 155 animals and plants that come with the package
    meshrun run images --procs 2                               # two local processes, the same losses
    meshrun run images --images photos --preset resnet18       # photos/train/CLASS/*.jpg and photos/val/CLASS/*.jpg
    meshrun convert-data photos photos.h5                      # one file instead of very many
    meshrun run images --images photos.h5 --preset resnet50 --precision bf16
    meshrun stage images && meshrun run images --images hymenoptera --preset resnet18      # 244 ants and bees
    meshrun use runs/images-1 classify --image cat.jpg

The networks are torchvision's, names of parameters and all, so that its weights can be started from (`--weights`); but
they normalise over groups of channels unless told otherwise, since statistics over a batch depend on how it is split.

The file has four parts: the network, the data, the experiment, and how well it did: a confusion matrix.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from meshrun import (
    BadSample,
    Experiment,
    Hdf5,
    ImageFolder,
    Schedule,
    Stage,
    UserError,
    accuracy,
    cross_entropy,
    random_crop,
    random_flip,
    staged,
)

STAMPS = Path(__file__).parent / "data" / "stamps"
HYMENOPTERA = "https://download.pytorch.org/tutorial/hymenoptera_data.zip"
ENDINGS = (".jpg", ".jpeg", ".png")
REHEARSAL = {"preset": "tiny", "size": 32, "weights": None, "norm": "group"}
"""Options of a model that `meshrun rehearse` trains in no time."""
Norm = Literal["group", "batch", "frozen"]


@dataclass(frozen=True)
class Shape:
    """The numbers that make a network."""

    blocks: tuple[int, int, int, int]
    """How many there are in each of four stages, of which each has half the resolution of the one before."""
    width: int = 64
    """Channels of the first stage; each stage has twice those of the one before."""
    bottleneck: bool = False
    """Blocks of three convolutions with four times the channels between blocks, rather than of two."""
    smooth: bool = False
    """GELU and averages rather than ReLU and maxima: those jump where two values are equal but for the last bit, and
    blow up the rounding by which sums over two ranks differ from sums over one."""
    size: int = 224
    """Pixels along each side of an image; the weights do not depend on it."""
    norm: Norm = "group"

    @property
    def pixels(self) -> int:
        """Somewhat more than what the network sees: in training a part of each image at random, else the middle."""
        return self.size * 9 // 8


PRESETS = {
    "tiny": Shape((1, 1, 1, 1), width=16, smooth=True, size=64),
    "resnet18": Shape((2, 2, 2, 2)),
    "resnet50": Shape((3, 4, 6, 3), bottleneck=True),
}


class Frozen(nn.BatchNorm2d):
    """Normalises by the statistics that came with the weights, in training too: then no sample depends on others."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def norm_of(shape: Shape, channels: int) -> nn.Module:
    if shape.norm == "group":
        return nn.GroupNorm(min(32, channels // 8), channels)
    return (Frozen if shape.norm == "frozen" else nn.BatchNorm2d)(channels)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    made = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


class Block(nn.Module):
    """Two convolutions, or three of which the outer ones see single pixels, added to what came in."""

    def __init__(self, shape: Shape, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * channels if shape.bottleneck else channels
        if shape.bottleneck:
            convolutions = [conv(inputs, channels, 1), conv(channels, channels, 3, stride), conv(channels, outputs, 1)]
        else:
            convolutions = [conv(inputs, channels, 3, stride), conv(channels, channels, 3)]
        for number, each in enumerate(convolutions, 1):  # torchvision's names
            self.add_module(f"conv{number}", each)
            self.add_module(f"bn{number}", norm_of(shape, each.out_channels))
        self.depth = len(convolutions)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), norm_of(shape, outputs))
        self.activation = nn.GELU() if shape.smooth else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for number in range(1, self.depth + 1):
            out = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(out))
            if number < self.depth:
                out = self.activation(out)
        return self.activation(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Images (N, 3, H, W) of 0 to 255 to a score for each class."""

    def __init__(self, shape: Shape, classes: Sequence[str]) -> None:
        super().__init__()
        self.shape, self.classes = shape, tuple(classes)
        self.conv1 = conv(3, shape.width, 7, stride=2)
        self.bn1 = norm_of(shape, shape.width)
        self.activation = nn.GELU() if shape.smooth else nn.ReLU()
        self.pool = nn.AvgPool2d(2) if shape.smooth else nn.MaxPool2d(3, stride=2, padding=1)
        inputs = shape.width
        for stage, count in enumerate(shape.blocks):
            channels = shape.width * 2**stage
            blocks = []
            for number in range(count):
                blocks.append(Block(shape, inputs, channels, stride=2 if stage and not number else 1))
                inputs = 4 * channels if shape.bottleneck else channels
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, len(self.classes))

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for stage in range(1, 5) for block in getattr(self, f"layer{stage}")]

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.activation(self.bn1(self.conv1(normalised(fitted(images, self.shape.size))))))
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))


def fitted(images: Tensor, size: int) -> Tensor:
    """The middle of images that are larger than `size` pixels; smaller ones are enlarged."""
    if min(images.shape[-2:]) < size:
        return F.interpolate(images.float(), (size, size), mode="bilinear")
    top, left = ((each - size) // 2 for each in images.shape[-2:])
    return images[..., top : top + size, left : left + size].float()


def normalised(pixels: Tensor) -> Tensor:
    """Of 0 to 255, to what each colour of photographs has for a mean and a deviation."""
    x = pixels / 255
    for colour, (mean, deviation) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        x[:, colour].sub_(mean).div_(deviation)  # a tensor of these numbers would be sent to the device in every step
    return x


def segments(net: Any) -> Sequence[nn.Module]:
    """The network as modules applied in order."""
    return [net.conv1, net.bn1, *net.blocks, net.fc]


def load(net: ResNet, path: Path) -> None:
    """Read weights in torchvision's names from a safetensors file; a head for other classes stays as it was drawn."""
    own = {name: each for name, each in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    try:
        with safe_open(path, framework="pt") as file:
            theirs = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            head = [name for name in ("fc.weight", "fc.bias") if theirs.get(name) != list(own[name].shape)]
            wanted = {name: each for name, each in own.items() if not (head and name.startswith("fc."))}
            if "bn1.running_mean" in theirs and net.shape.norm == "group":
                raise UserError(
                    f"{path} holds weights of a network with batch statistics, but norm is group; keep those "
                    f"statistics (--norm frozen), or go on with them (--norm batch)"
                )
            for name, each in wanted.items():
                if theirs.get(name) != list(each.shape):
                    found = f"has the shape {theirs[name]}" if name in theirs else "is missing"
                    raise UserError(
                        f"{name} {found} in {path}, but this network needs {list(each.shape)}; "
                        f"give weights of the same preset and norm (--weights, --preset, --norm)"
                    )
            with torch.no_grad():
                for name, each in wanted.items():
                    each.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read weights from {path}: {error} (--weights)") from None


def stage_data(stage: Stage) -> None:
    """Fetch the ants and bees (`--images hymenoptera`): of their archive the images, and nothing else."""
    archive = stage.download(HYMENOPTERA)
    folder = stage.folder / "hymenoptera"
    try:
        with zipfile.ZipFile(archive) as opened:
            for each in opened.infolist():
                parts = PurePosixPath(each.filename).parts
                if ".." in parts or each.filename.startswith("/"):
                    raise UserError(f"{archive} has a file {each.filename!r}, which would lie outside of {folder}")
                if len(parts) != 4 or parts[0] != "hymenoptera_data" or not parts[3].lower().endswith(ENDINGS):
                    continue
                path = folder.joinpath(*parts[1:])
                if not path.is_file() or path.stat().st_size != each.file_size:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(opened.read(each))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{archive} cannot be unpacked ({error}); remove it, and stage again") from None
    stage.add("hymenoptera")


def sets_of(images: Path | None, pixels: int) -> tuple[ImageFolder | Hdf5, ImageFolder | Hdf5]:
    """Training and validation images, decoded to so many pixels."""
    where = images or STAMPS
    if where == Path("hymenoptera") and not where.exists():
        where = staged("hymenoptera")
    if not where.exists():
        raise UserError(
            f"there are no images at {where}; give a folder with train/CLASS and val/CLASS, an .h5 file that "
            f"meshrun convert-data has made of one, or hymenoptera (--images)"
        )
    train = opened(where, "train", pixels)
    val = opened(where, "val", pixels, train.classes)
    if not train.classes or train.classes != val.classes:
        raise UserError(
            f"{where} has the classes {listed(train.classes)} for training but {listed(val.classes)} for validation; "
            f"both must have the same ones (--images)"
        )
    return train, val


def opened(where: Path, split: str, pixels: int, classes: Sequence[str] | None = None) -> ImageFolder | Hdf5:
    """The images of a split; those of a folder numbered like `classes`, which it need not have all of."""
    if where.is_dir():
        return ImageFolder(where / split, pixels, classes=classes)
    try:
        return Hdf5(where, split)  # arrays stay as large as they were stored
    except UserError:  # which encoded images are without a size
        return Hdf5(where, split, size=pixels)


def listed(classes: Sequence[str] | None) -> str:
    names = list(classes or ["none"])
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def experiment(
    preset: Literal["tiny", "resnet18", "resnet50"] = "tiny",
    images: Path | None = None,
    size: int | None = None,
    norm: Norm = "group",
    weights: Path | None = None,
    lr: float | None = None,
) -> Experiment:
    """Image classification.

    preset: the network: tiny (0.3 million parameters, 64 pixels), resnet18 or resnet50 (224 pixels)
    images: folder with train/CLASS and val/CLASS, .h5 file made of one, or hymenoptera; shipped ones when absent
    size: pixels along each side that the network sees; the preset's when absent
    norm: group, the same on every mesh; batch (see --sync-batchnorm); frozen, with the statistics of --weights
    weights: safetensors file to start from, torchvision's or a run's; a head for other classes is drawn anew
    lr: highest learning rate; 3e-3 for tiny, else 1e-3, and a tenth of it from weights, when absent
    """
    shape = replace(PRESETS[preset], norm=norm, size=PRESETS[preset].size if size is None else size)
    if shape.size < 32:
        raise UserError(f"size is {shape.size}; the network sees at least 32 pixels (--size)")
    if norm == "frozen" and weights is None:
        raise UserError(
            "norm is frozen, but there are no weights whose statistics could be kept; give some (--weights)"
        )
    train, val = sets_of(images, shape.pixels)
    highest = (3e-3 if preset == "tiny" else 1e-3) * (0.1 if weights else 1.0) if lr is None else lr

    def model() -> ResNet:
        made = ResNet(shape, train.classes)
        if weights is not None:
            load(made, weights)
        return made

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        everything = list(parameters)
        kernels = {"params": [p for p in everything if p.ndim >= 2], "weight_decay": 0.05}
        scales = {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([kernels, scales], lr=highest, eps=1e-6)

    return Experiment(
        model=model,
        train=train,
        evals={"val": val},
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
        augment=lambda batch, draws: random_flip(random_crop(batch, shape.size, draws), draws),
        optimizer=optimizer,
        schedule=Schedule("cosine", warmup=0.1),
        clip=1.0,
        batch=32,
        epochs=20,
        segments=segments,
        after=lambda trained, folder: judge(trained, val, folder),
    )


def judge(net: Any, data: Any, folder: Path) -> dict[str, Any]:
    """Which class was taken for which: on the terminal, as a picture, and for result.json."""
    counts = confusion(net, data)
    right, everything = int(counts.trace()), int(counts.sum())
    title = f"accuracy {right / everything:.3f}: {right:,} of {everything:,} right"
    picture = folder / "pictures" / "confusion.svg"
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(drawing(counts, net.classes, title), encoding="utf-8")
    print(f"{table(counts, net.classes)}\n{title}; drawn in {picture}")
    return {"accuracy": right / everything, "confusion": counts.tolist(), "classes": list(net.classes)}


def confusion(net: Any, data: Any, batch: int = 64) -> Tensor:
    """(classes, classes): how often what the row says was taken for what the column says."""
    device = next(net.parameters()).device
    counts = torch.zeros(len(net.classes), len(net.classes), dtype=torch.int64)
    for start in range(0, len(data), batch):
        images, labels = [], []
        for number in range(start, min(start + batch, len(data))):
            with suppress(BadSample):  # of a run that was told to go on without such samples: else it had ended
                image, label = data[number]
                images.append(image)
                labels.append(int(label))
        if images:
            with torch.no_grad():
                guesses = net(torch.stack(images).to(device)).argmax(1).cpu()
            counts.index_put_((torch.tensor(labels), guesses), torch.ones_like(guesses), accumulate=True)
    return counts


def table(counts: Tensor, classes: Sequence[str]) -> str:
    """The matrix as text; of many classes those that were mistaken most often."""
    if len(classes) > FEW:
        wrong = [(n, a, b) for a, row in enumerate(counts.tolist()) for b, n in enumerate(row) if n and a != b]
        worst = sorted(wrong, key=lambda each: -each[0])[:FEW]
        return "\n".join(["most often mistaken", *(f"{n:>7,}  {classes[a]} for {classes[b]}" for n, a, b in worst)])
    names = [short(each, 16) for each in classes]
    wide = max(map(len, names))
    lines = [" " * wide + "  taken for", " " * wide + "".join(f"  {each:>6}" for each in names) + "   right"]
    for number, row in enumerate(counts.tolist()):
        cells = "".join(f"  {n:>{max(6, len(name))},}" for n, name in zip(row, names, strict=True))
        lines.append(f"{names[number]:<{wide}}{cells}  {row[number] / max(1, sum(row)):>6.0%}")
    return "\n".join(lines)


def drawing(counts: Tensor, classes: Sequence[str], title: str) -> str:
    """The matrix as SVG: the stronger the colour, the larger the share of the row. Counts where there is room."""
    few = len(classes) <= FEW
    side = 84 if few else max(2, 720 // len(classes))
    named = side >= 14
    left, top, edge = 48 + (min(200, 8 * max(map(len, classes))) if named else 0), 96, side * len(classes)
    wide, high = max(left + edge, 10 * len(title) + 24) + 24, top + edge + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{wide}" height="{high}" style="fill: var(--paper)"/>',
        f'<text class="title" x="24" y="34">{escape(title)}</text>',
        f'<text class="small muted" x="{left}" y="60">taken for</text>',
    ]
    for a, row in enumerate(counts.tolist()):
        y, across = top + a * side, left + (a + 0.5) * side
        if named:
            parts.append(
                f'<text class="end" x="{left - 10}" y="{y + side / 2 + 5}">{escape(short(classes[a], 25))}</text>'
            )
        if few:
            parts.append(f'<text class="mid" x="{across}" y="{top - 10}">{escape(short(classes[a], 11))}</text>')
        for b, n in enumerate(row):
            x, share = left + b * side, n / max(1, sum(row))
            if n:
                parts.append(
                    f'<rect class="cell" x="{x}" y="{y}" width="{side}" height="{side}" fill-opacity="{share:.3f}">'
                    f"<title>{escape(f'{classes[a]} taken for {classes[b]}: {n} ({share:.0%})')}</title></rect>"
                )
            if few:
                on, x = "on" if share > 0.5 else "", x + side // 2
                parts.append(f'<text class="mid {on}" x="{x}" y="{y + side // 2}">{n:,}</text>')
                parts.append(
                    f'<text class="mid small {on or "muted"}" x="{x}" y="{y + side // 2 + 18}">{share:.0%}</text>'
                )
    lines = range(len(classes) + 1) if named else (0, len(classes))
    parts += [f'<path class="grid" d="M{left} {top + k * side}h{edge}M{left + k * side} {top}v{edge}"/>' for k in lines]
    return "\n".join([*parts, "</svg>\n"])


def short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


FEW = 12
"""Classes whose whole matrix can be read."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --muted: #59636e; --accent: #0a66c2; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ec; --muted: #9ba5af; --accent: #62adff; } }
text { fill: var(--ink); font: 14px system-ui, sans-serif; }
.title { font-size: 16px; font-weight: 600; }
.end { text-anchor: end; }
.mid { text-anchor: middle; }
.small { font-size: 12px; }
.muted { fill: var(--muted); }
.on { fill: var(--paper); }
.cell { fill: var(--accent); }
.grid { fill: none; stroke: var(--muted); stroke-opacity: .4; }
"""


def classify(model: Any, image: Path, top: int = 5) -> dict[str, float]:
    """Say what an image shows: the likeliest classes, and how likely each is.

    image: the file
    top: how many classes to name
    """
    from PIL import Image, ImageOps

    pixels = model.shape.pixels
    try:
        with Image.open(image) as opened:
            opened.draft("RGB", (pixels, pixels))
            upright = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{image} cannot be read as an image: {why} (--image)") from None
    raw = torch.frombuffer(bytearray(upright.tobytes()), dtype=torch.uint8).view(upright.height, upright.width, 3)
    square = fitted(raw.permute(2, 0, 1)[None], min(upright.size)).byte()
    resized = F.interpolate(square, (pixels, pixels), mode="bilinear", antialias=True)
    with torch.no_grad():
        shares = model(resized.to(next(model.parameters()).device))[0].softmax(0)
    best = shares.topk(min(top, len(shares)))
    return {model.classes[number]: round(share, 4) for share, number in zip(*map(Tensor.tolist, best), strict=True)}
