"""A training loop with accelerate: it chooses the device, the precision and how to go backward."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
loader = DataLoader(TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,))), batch_size=8, pin_memory=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.print(accelerator.device, accelerator.gather(loss).mean().item())
