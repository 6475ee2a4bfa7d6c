"""An image model of timm with its optimizer, loss, averaged weights and mixed precision."""

import timm
import timm.loss
import timm.optim
import timm.utils
import torch

device = torch.device("cuda")
model = timm.create_model("resnet18", num_classes=10).to(device, memory_format=torch.channels_last)
average = timm.utils.ModelEmaV3(model, decay=0.99)
optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9)
scaler = timm.utils.NativeScaler(device=device.type)
criterion = timm.loss.LabelSmoothingCrossEntropy(0.1).to(device)
losses = timm.utils.AverageMeter()
for step in range(8):
    images = torch.randn(4, 3, 64, 64).to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
    target = torch.randint(0, 10, (4,)).to(device)
    with torch.amp.autocast(device_type=device.type, dtype=torch.float16):
        loss = criterion(model(images), target)
    optimizer.zero_grad()
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    average.update(model, step=step)
    torch.cuda.synchronize()
    losses.update(loss.item(), len(images))
    print(step, losses.avg)
