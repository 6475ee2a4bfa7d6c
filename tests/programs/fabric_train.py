"""Lightning Fabric: a loop of one's own, with Fabric's device and precision."""

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
fabric.launch()
with fabric.init_module():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=8))
for x in loader:
    loss = model(x).square().mean()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(x.device, loss.item())
