"""sentence-transformers: pairs of token ids, trained with a contrastive loss in its own loop."""

import torch
from sentence_transformers import SentenceTransformer, losses
from sentence_transformers.models import Pooling
from transformers import BertConfig, BertModel


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(
            BertConfig(
                num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128, vocab_size=500
            )
        )

    def forward(self, features):
        out = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {**features, "token_embeddings": out.last_hidden_state}


model = SentenceTransformer(modules=[Encoder(), Pooling(64)], device="cuda")
criterion = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters())


def pair():
    ids = torch.randint(0, 500, (8, 16))
    return {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}


for step in range(8):
    loss = criterion([pair(), pair()], None)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, model.device, loss.item())
