"""Diffusion models on latents [batch, 4, size, size] (images of 8 * size pixels): a transformer and a U-Net.

DiT: Peebles and Xie 2022, arXiv 2212.09748; github.com/facebookresearch/DiT. Sizes at latent size 32:
    S/2 6.06 GMAC; XL/2 675,129,632 parameters, 118.64 GMAC (the paper's 'Gflops' count a multiply-add once).
UNet: Rombach et al. 2021, arXiv 2112.10752, as github.com/CompVis/stable-diffusion, version 1, has it:
    859,520,964 parameters, 803 GFLOP at latent size 64.
Both predict the noise in the latent at a timestep; DiT is conditioned on a class, the U-Net on encoded text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.models.layers import MLP, SelfAttention

LATENT_CHANNELS = 4
LONGEST_PERIOD = 10_000.0  # of the sinusoids of the timestep, in timesteps


def sinusoids(timestep: Tensor, width: int) -> Tensor:
    """[batch] -> cosines, then sines, of the timestep at width/2 frequencies, in fp32."""
    steps = torch.arange(width // 2, device=timestep.device, dtype=torch.float32)
    angles = torch.outer(timestep.float(), torch.exp(-math.log(LONGEST_PERIOD) / (width // 2) * steps))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimestepEmbedding(nn.Module):
    """timestep [batch] -> [batch, width]: sinusoids through a two-layer MLP."""

    def __init__(self, frequencies: int, width: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.up = nn.Linear(frequencies, width)
        self.down = nn.Linear(width, width)

    def forward(self, timestep: Tensor) -> Tensor:
        waves = sinusoids(timestep, self.frequencies).to(self.up.weight.dtype)
        return self.down(F.silu(self.up(waves)))


@dataclass(frozen=True)
class DiTConfig:
    layers: int
    width: int
    heads: int
    patch: int = 2
    classes: int = 1000


DIT_S_2 = DiTConfig(layers=12, width=384, heads=6)
DIT_XL_2 = DiTConfig(layers=28, width=1152, heads=16)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale x [batch, tokens, width] by [batch, width]."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """Pre-norm block; the condition shifts and scales its norms and gates its branches (AdaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.mlp = MLP(width, 4 * width, approximate="tanh")
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """latent, timestep [batch], label [batch] -> [batch, 8, size, size]: the noise and its variance."""

    def __init__(self, config: DiTConfig, latent_size: int = 32) -> None:
        super().__init__()
        self.patch = config.patch
        grid = latent_size // config.patch
        self.patches = nn.Conv2d(LATENT_CHANNELS, config.width, config.patch, stride=config.patch)
        position = torch.randn(1, grid * grid, config.width) * 0.02
        self.position = nn.Parameter(position, requires_grad=False)  # sinusoids in the paper; never trained
        self.timestep = TimestepEmbedding(256, config.width)
        self.label = nn.Embedding(config.classes + 1, config.width)  # one more for 'no class'
        self.blocks = nn.ModuleList(DiTBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, 1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self.head = nn.Linear(config.width, config.patch**2 * 2 * LATENT_CHANNELS)

    def forward(self, latent: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        x = self.patches(latent).flatten(2).transpose(1, 2) + self.position
        condition = self.timestep(timestep) + self.label(label)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(F.silu(condition)).chunk(2, dim=1)
        x = self.head(modulate(self.norm(x), shift, scale))
        return self.unpatch(x, latent.shape[-1] // self.patch)

    def unpatch(self, x: Tensor, grid: int) -> Tensor:
        """[batch, grid * grid, patch * patch * channels] -> [batch, channels, size, size]."""
        x = x.view(len(x), grid, grid, self.patch, self.patch, -1)
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def loss(self, latent: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        """Squared error of the noise, for which the latent stands in; the variance is unused."""
        noise = self(latent, timestep, label)[:, :LATENT_CHANNELS]
        return F.mse_loss(noise, latent)


@dataclass(frozen=True)
class UNetConfig:
    width: int
    multipliers: tuple[int, ...] = (1, 2, 4, 4)  # channels of each level, in `width`s; all but the last have attention
    blocks: int = 2  # residual blocks a level on the way down, one more on the way up
    heads: int = 8
    context_width: int = 768  # of the text encoder, CLIP ViT-L/14


STABLE_DIFFUSION = UNetConfig(width=320)
UNET_SMALL = UNetConfig(width=64)


class ResBlock(nn.Module):
    """GroupNorm, SiLU, 3x3, twice; the timestep is added in between."""

    def __init__(self, channels_in: int, channels_out: int, time_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(32, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.time = nn.Linear(time_width, channels_out)
        self.norm2 = nn.GroupNorm(32, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        same = channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        branch = self.conv1(F.silu(self.norm1(x)))
        branch = branch + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(branch)))


class CrossAttention(nn.Module):
    """Attention from x [batch, pixels, width] to a context [batch, tokens, context_width]."""

    def __init__(self, width: int, context_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context_width, width, bias=False)
        self.value = nn.Linear(context_width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projected in (self.query(x), self.key(context), self.value(context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    """Gated MLP: half of the first layer's output, through GELU, scales the other half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, dim=-1)
        return self.down(value * F.gelu(gate))


class SpatialTransformer(nn.Module):
    """Pixels attend to each other, then to the text."""

    def __init__(self, channels: int, context_width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels, 1e-6)
        self.project_in = nn.Conv2d(channels, channels, 1)
        self.norm1 = nn.LayerNorm(channels)
        self.self_attention = CrossAttention(channels, channels, heads)
        self.norm2 = nn.LayerNorm(channels)
        self.cross_attention = CrossAttention(channels, context_width, heads)
        self.norm3 = nn.LayerNorm(channels)
        self.mlp = GEGLU(channels)
        self.project_out = nn.Conv2d(channels, channels, 1)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        x = self.project_in(self.norm(image)).flatten(2).transpose(1, 2)
        normed = self.norm1(x)
        x = x + self.self_attention(normed, normed)
        x = x + self.cross_attention(self.norm2(x), context)
        x = x + self.mlp(self.norm3(x))
        return image + self.project_out(x.transpose(1, 2).unflatten(2, image.shape[2:]))


class Stage(nn.Module):
    """A residual block, then attention where the level has it."""

    def __init__(self, channels_in: int, channels_out: int, config: UNetConfig, attends: bool) -> None:
        super().__init__()
        self.residual = ResBlock(channels_in, channels_out, 4 * config.width)
        self.attention = SpatialTransformer(channels_out, config.context_width, config.heads) if attends else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.attention is None else self.attention(x, context)


class Downsample(nn.Conv2d):
    """3x3 convolution with stride 2; takes a stage's arguments and ignores all but the image."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return super().forward(x)


class Upsample(nn.Conv2d):
    """Nearest neighbours, then a 3x3 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.interpolate(x, scale_factor=2.0))


class UNet(nn.Module):
    """latent, timestep [batch], context [batch, tokens, context_width] -> noise, shaped as the latent."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        channels = [config.width * multiplier for multiplier in config.multipliers]
        deepest = len(channels) - 1
        self.time = TimestepEmbedding(config.width, 4 * config.width)
        self.stem = nn.Conv2d(LATENT_CHANNELS, config.width, 3, padding=1)

        self.down = nn.ModuleList()
        skips = [config.width]  # channels of each output that the way up will read, innermost last
        for level, width in enumerate(channels):
            for _ in range(config.blocks):
                self.down.append(Stage(skips[-1], width, config, attends=level < deepest))
                skips.append(width)
            if level < deepest:
                self.down.append(Downsample(width))
                skips.append(width)

        self.middle = Stage(skips[-1], skips[-1], config, attends=True)
        self.middle_out = ResBlock(skips[-1], skips[-1], 4 * config.width)

        self.up = nn.ModuleList()
        below = skips[-1]
        for level, width in reversed(list(enumerate(channels))):
            for _ in range(config.blocks + 1):
                self.up.append(Stage(below + skips.pop(), width, config, attends=level < deepest))
                below = width
            if level > 0:
                self.up.append(Upsample(width))

        self.norm = nn.GroupNorm(32, config.width)
        self.head = nn.Conv2d(config.width, LATENT_CHANNELS, 3, padding=1)

    def forward(self, latent: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        time = self.time(timestep)
        x = self.stem(latent)
        skips = [x]
        for layer in self.down:
            x = layer(x, time, context)
            skips.append(x)
        x = self.middle_out(self.middle(x, time, context), time)
        for layer in self.up:
            x = layer(x) if isinstance(layer, Upsample) else layer(torch.cat((x, skips.pop()), dim=1), time, context)
        return self.head(F.silu(self.norm(x)))

    def loss(self, latent: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        """Squared error of the noise, for which the latent stands in."""
        return F.mse_loss(self(latent, timestep, context), latent)
