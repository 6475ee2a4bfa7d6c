"""A graph network of PyTorch Geometric on a random graph."""

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
edges = torch.randint(0, 100, (2, 400))
data = Data(x=torch.randn(100, 16), edge_index=edges, y=torch.randint(0, 4, (100,)), train_mask=torch.rand(100) < 0.5)
data = data.to(device)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(16, 32), GCNConv(32, 4)

    def forward(self, x, edge_index):
        x = torch.nn.functional.dropout(self.first(x, edge_index).relu(), training=self.training)
        return self.second(x, edge_index)


model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), weight_decay=5e-4)
for step in range(8):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = torch.nn.functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    print(step, float(loss), int((out.argmax(-1) == data.y).sum()))
