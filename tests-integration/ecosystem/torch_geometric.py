"""PyTorch Geometric: graph networks; a graph is not rows, so it is whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from ecosystem_runs import Found, Run, parameters
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GAT, GCN, GIN, global_mean_pool

PACKAGES = ("torch_geometric",)


class Graphs(nn.Module):
    """A class for each of several graphs."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.nodes = kind(6, 16, num_layers=2, out_channels=8, dropout=0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, graphs: Any) -> torch.Tensor:
        found = self.nodes(graphs.x, graphs.edge_index)
        logits: torch.Tensor = self.head(global_mean_pool(found, graphs.batch, 5))
        return logits


def graphs() -> Any:
    source = torch.Generator().manual_seed(5)

    def one(nodes: int) -> Data:
        edges = torch.randint(nodes, (2, 3 * nodes), generator=source)
        return Data(x=torch.randn(nodes, 6, generator=source), edge_index=edges)

    return Batch.from_data_list([one(3 + at) for at in range(5)])


def of_graphs(kind: Any) -> Any:
    def case(run: Run) -> Found:
        torch.manual_seed(1)
        model = run.parallelize(Graphs(kind))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        classes = torch.tensor([0, 1, 2, 0, 1])
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(model(graphs()), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, **parameters(model)}

    return case


CASES = {"GCN": of_graphs(GCN), "GAT": of_graphs(GAT), "GIN": of_graphs(GIN)}
