"""Loops of a script's own that sample tokens until one says that the text ends: unknown tokens are no such one."""

from __future__ import annotations

import pytest

from flopmeter.cli import main

SAMPLES = """
import torch
from torch import nn
VOCABULARY, END, TEXTS = 2000, {end}, {texts}
model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    tokens = torch.ones(TEXTS, 4, dtype=torch.long, device="cuda")
    ended = torch.zeros(TEXTS, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        for place in range(16):
            likely = model(tokens)[:, -1].softmax(-1)
            token = {sample}
            ended |= token[:, 0] == END
            if ended.all():
                break
            tokens = torch.cat([tokens, token], 1)
    print("made", tokens.shape[1] - 4, "ended", int(ended.sum()))
    model(tokens).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("end", [0, 2, 1999])
@pytest.mark.parametrize(
    ("sample", "texts"),
    [("torch.multinomial(likely, 1)", 1), ("likely.argmax(-1, keepdim=True)", 4), ("likely.topk(1)[1]", 4)],
)
def test_no_text_ends_before_the_loop_does(end, sample, texts, tmp_path, monkeypatch, capsys):
    """Tokenizers have special tokens at either end of the vocabulary: 0 ends a text of GPT-NeoX, 2 one of Llama."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SAMPLES.format(end=end, texts=texts, sample=sample))
    assert main(["run", "train.py"]) == 0
    assert capsys.readouterr().out == 3 * "made 16 ended 0\n"
