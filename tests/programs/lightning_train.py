"""Lightning's Trainer on one GPU, with a validation loop and a metric."""

import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, number):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        self.log("accuracy", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=8, logger=False, default_root_dir=folder
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
