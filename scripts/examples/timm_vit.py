"""A vision transformer of timm under automatic mixed precision, over the batch.

    pip install timm
    python scripts/examples/timm_vit.py

The weights stay in fp32, as AMP has them; autocast casts them for each product.
"""

from __future__ import annotations

import timm
import torch

from flopmeter import sweep

NAME, HARDWARE, PIXELS = "vit_base_patch16_224", "rtx-4090", 224


def main() -> None:
    with torch.device("meta"):
        model = timm.create_model(NAME, pretrained=False).eval()

    def classify(batch: int) -> None:
        images = torch.empty(batch, 3, PIXELS, PIXELS, device="meta")
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            model(images)

    print(sweep(classify, (1, 2, 4, 8, 16, 32, 64), HARDWARE, unit="images"))


if __name__ == "__main__":
    main()
