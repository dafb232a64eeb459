"""Train one model for each fold of the data, and average their predictions for held-out samples."""

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed

folds = 3
accelerator = Accelerator()
set_seed(0)

features, labels = load_breast_cancer(return_X_y=True)
features = (features - features.mean(0)) / features.std(0)
features, labels = torch.tensor(features, dtype=torch.float32), torch.tensor(labels)
used, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
test_loader = accelerator.prepare(
    DataLoader(TensorDataset(features[held_out], labels[held_out]), batch_size=16)
)

votes = []
for fold, parts in enumerate(StratifiedKFold(folds).split(used, labels[used])):
    train, valid = (torch.tensor(used)[part] for part in parts)
    train_loader = DataLoader(TensorDataset(features[train], labels[train]), batch_size=16, shuffle=True)
    valid_loader = DataLoader(TensorDataset(features[valid], labels[valid]), batch_size=16)
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, train_loader, valid_loader
    )
    for _ in range(5):
        for x, y in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        pairs = [accelerator.gather_for_metrics((model(x).argmax(1), y)) for x, y in valid_loader]
        votes.append(torch.cat([accelerator.gather_for_metrics(model(x).softmax(1)) for x, _ in test_loader]))
    guessed, true = (torch.cat(column) for column in zip(*pairs, strict=True))
    accelerator.print(f"fold {fold}: {(guessed == true).float().mean():.3f} of {len(true)} right")
    model, optimizer = accelerator.free_memory(model, optimizer)

truth = labels[held_out].to(accelerator.device)
accuracy = (torch.stack(votes).mean(0).argmax(1) == truth).float().mean()
accelerator.print(f"all folds together: {accuracy:.3f} of {len(truth)} held-out samples right")
