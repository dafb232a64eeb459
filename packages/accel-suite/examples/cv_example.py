"""Train a timm image classifier.

By default a small ResNet with random weights learns scikit-learn's handwritten digits, so that nothing is
downloaded. `--data_dir` fine-tunes a pretrained ResNet-50 on a folder of images, with a subfolder for each
class in `train` and `val`.

    accel launch cv_example.py
    accel launch cv_example.py --data_dir pets --mixed_precision bf16
"""

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel import Accelerator
from accel.utils import set_seed


def get_data(data_dir):
    """Return the training and evaluation data, and the number of classes."""
    if data_dir:
        train, test = (
            timm.data.create_dataset(
                "", root=data_dir, split=split, transform=timm.data.create_transform(224, part)
            )
            for split, part in (("train", True), ("val", False))
        )
        return train, test, len(train.reader.class_to_idx)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = nn.functional.interpolate(images, size=32).expand(-1, 3, -1, -1)
    train, test = random_split(
        TensorDataset(images, torch.tensor(labels)), [0.8, 0.2], torch.Generator().manual_seed(0)
    )
    return train, test, 10


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])
    with accelerator.main_process_first():
        train, test, classes = get_data(args.data_dir)
        name, pretrained = ("resnet50", True) if args.data_dir else ("test_resnet", False)
        model = timm.create_model(name, pretrained=pretrained, num_classes=classes)
    train_loader = DataLoader(train, batch_size=config["batch_size"], shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=config["batch_size"])
    if pretrained:  # fine-tune the head only
        for parameter in model.parameters():
            parameter.requires_grad = False
        for parameter in model.get_classifier().parameters():
            parameter.requires_grad = True
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config["lr"] / 25)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config["lr"], epochs=config["num_epochs"], steps_per_epoch=len(train_loader)
    )

    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for epoch in range(config["num_epochs"]):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        correct = total = 0
        for images, labels in test_loader:
            with torch.no_grad():
                predictions = model(images).argmax(dim=-1)
            predictions, truths = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == truths).sum().item()
            total += len(truths)
        accelerator.print(f"epoch {epoch}: accuracy {correct / total:.3f} of {total} images")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data_dir", help="a folder of images instead of the digits")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()
    training_function({"lr": 2e-2, "num_epochs": 2, "seed": 42, "batch_size": 64}, args)


if __name__ == "__main__":
    main()
