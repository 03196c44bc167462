"""The same loop on any number of devices: `meshrun run examples/any_mesh.py --procs 2`, or torchrun, srun, mpirun."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import meshrun
from meshrun.recipes.digits import Digits, Net

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = meshrun.replicate(Net(128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = meshrun.shard(DataLoader(Digits("val"), batch_size=64, shuffle=True))

for epoch in range(2):
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = meshrun.mean_over_ranks(F.cross_entropy(model(images), labels, reduction="sum"), len(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    meshrun.print0(f"epoch {epoch}: loss {loss.item():.4f}")
meshrun.save0(model.state_dict(), "digits.pt")
