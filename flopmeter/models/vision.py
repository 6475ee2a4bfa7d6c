"""Image classifiers, [batch, 3, size, size] -> [batch, 1000]: ResNet-50, vision transformers, ConvNeXt-T.

ResNet: He et al. 2015, arXiv 1512.03385, in torchvision's v1.5 form (the stride is in the 3x3 convolution);
    ResNet-50: 25,557,032 parameters, 4.09 GMAC at 224.
ViT: Dosovitskiy et al. 2020, arXiv 2010.11929; B/16: 86,567,656 parameters, 17.56 GMAC;
    L/16: 304,326,632, 61.55 GMAC.
ConvNeXt: Liu et al. 2022, arXiv 2201.03545, without stochastic depth; T: 28,589,128 parameters, 4.46 GMAC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.models.layers import MLP, PreNormBlock

CLASSES = 1000  # ImageNet-1k


class Classifier(nn.Module):
    """images -> logits, trained by cross-entropy."""

    def loss(self, images: Tensor) -> Tensor:
        """Cross-entropy; class 0 stands in for the labels, at the cost of one kernel of `batch` integers."""
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        return F.cross_entropy(self(images).float(), labels)


class ConvNorm(nn.Sequential):
    """Convolution with 'same' padding and batch normalization."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(channels_out),
        )


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the channels."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.reduce = ConvNorm(channels_in, channels, 1)
        self.spatial = ConvNorm(channels, channels, 3, stride)
        self.expand = ConvNorm(channels, 4 * channels, 1)
        same_shape = stride == 1 and channels_in == 4 * channels
        self.shortcut = nn.Identity() if same_shape else ConvNorm(channels_in, 4 * channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.reduce(x), inplace=True)
        branch = F.relu(self.spatial(branch), inplace=True)
        branch = self.expand(branch)
        branch += self.shortcut(x)
        return F.relu(branch, inplace=True)


class ResNet(Classifier):
    """`depths`: blocks of each stage. ResNet-50 by default."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = ConvNorm(3, width, 7, stride=2)
        self.blocks = nn.Sequential()
        channels_in = width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(Bottleneck(channels_in, channels, stride))
                channels_in = 4 * channels
        self.head = nn.Linear(channels_in, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.blocks(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@dataclass(frozen=True)
class ViTConfig:
    layers: int
    width: int
    heads: int
    patch: int = 16


VIT_B_16 = ViTConfig(layers=12, width=768, heads=12)
VIT_L_16 = ViTConfig(layers=24, width=1024, heads=16)


class ViT(Classifier):
    """Patches and a class token with learned positions, pre-norm blocks, the class token classified."""

    def __init__(self, config: ViTConfig, image_size: int = 224) -> None:
        super().__init__()
        tokens = (image_size // config.patch) ** 2 + 1
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.position = nn.Parameter(torch.randn(1, tokens, config.width) * 0.02)
        self.patches = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        blocks = (PreNormBlock(config.width, config.heads, epsilon=1e-6) for _ in range(config.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(config.width, 1e-6)
        self.head = nn.Linear(config.width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of [batch, channels, height, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """7x7 depthwise convolution, then an MLP over channels, scaled per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, 1e-6)
        self.mlp = MLP(channels, 4 * channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        branch = self.scale * self.mlp(branch)
        return x + branch.permute(0, 3, 1, 2)


class ConvNeXt(Classifier):
    """`depths` and `widths`: blocks and channels of each stage. ConvNeXt-T by default."""

    def __init__(self, depths: Sequence[int] = (3, 3, 9, 3), widths: Sequence[int] = (96, 192, 384, 768)) -> None:
        super().__init__()
        self.stages = nn.Sequential(nn.Conv2d(3, widths[0], 4, stride=4), ChannelNorm(widths[0], 1e-6))
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if stage > 0:
                before = widths[stage - 1]
                self.stages.extend([ChannelNorm(before, 1e-6), nn.Conv2d(before, width, 2, stride=2)])
            self.stages.extend([ConvNeXtBlock(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(widths[-1], 1e-6)
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(images).mean((2, 3))))
