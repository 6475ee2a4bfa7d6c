"""A small UNet of diffusers, trained to predict noise."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

model = UNet2DModel(
    sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
model.to("cuda")
average = EMAModel(model.parameters())
schedule = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
generator = torch.Generator(device="cuda").manual_seed(0)
for step in range(8):
    clean = torch.randn(2, 3, 16, 16, device="cuda", generator=generator)
    noise = torch.randn(clean.shape, device=clean.device)
    times = torch.randint(0, schedule.config.num_train_timesteps, (2,), device=clean.device).long()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(schedule.add_noise(clean, noise, times), times).sample, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.step(model.parameters())
    print(step, loss.detach().item())
