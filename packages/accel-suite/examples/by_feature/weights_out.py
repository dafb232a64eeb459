"""Send the weights to a second process during training, as to an inference engine.

accel launch --cpu --num_processes 2 packages/accel-suite/examples/by_feature/weights_out.py
"""

import json
import socket
import subprocess
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.utils import set_seed

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def serve(port):
    """Run the engine: receive weights, and reply to each complete update with the number of hits."""
    model = make_model().bfloat16()
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rwb") as stream:
        for line in stream:
            header = json.loads(line)
            if header["name"]:
                content = bytearray(stream.read(header["bytes"]))
                parameter = model.get_parameter(header["name"])
                parameter.data.copy_(torch.frombuffer(content, dtype=torch.bfloat16).view(parameter.shape))
                continue
            with torch.no_grad():
                hits = (model(images.bfloat16()).argmax(dim=1) == labels).sum().item()
            stream.write(f"{hits}\n".encode())
            stream.flush()


def send(name, content, stream):
    """Send one line of JSON, then the bytes of a tensor."""
    stream.write(json.dumps({"name": name, "bytes": len(content)}).encode() + b"\n" + content)


def train():
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if accelerator.is_main_process:
        listener = socket.create_server(("127.0.0.1", 0))
        engine = subprocess.Popen([sys.executable, __file__, "--engine", str(listener.getsockname()[1])])
        connection, _ = listener.accept()
        stream = connection.makefile("rwb")
    for epoch in range(3):
        for image, label in loader:
            accelerator.backward(nn.functional.cross_entropy(model(image), label))
            optimizer.step()
            optimizer.zero_grad()
        # The model is sharded: all processes gather each bucket, and only the main process receives it.
        parameters = accelerator.named_full_parameters(
            dtype=torch.bfloat16, bucket_bytes=16 << 10, to_main_only=True
        )
        for name, tensor in parameters:
            send(name, tensor.cpu().view(torch.uint8).numpy().tobytes(), stream)
        if accelerator.is_main_process:
            send("", b"", stream)
            stream.flush()
            print(f"epoch {epoch}: the engine has {int(stream.readline())} of {len(labels)} right")
    if accelerator.is_main_process:
        for part in (stream, connection, listener):
            part.close()
        engine.wait()  # it exits when the connection closes


if sys.argv[1:2] == ["--engine"]:
    serve(int(sys.argv[2]))
else:
    train()
