"""Handwritten digits on one device, as any PyTorch tutorial writes it: `python examples/single_device.py`."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from meshrun.recipes.digits import Digits, Net

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Net(128).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Digits("val"), batch_size=64, shuffle=True)

for epoch in range(2):
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
torch.save(model.state_dict(), "digits.pt")
