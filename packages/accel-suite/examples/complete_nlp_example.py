"""Fine-tune a BERT as in nlp_example.py, with gradient accumulation, trackers, checkpoints and resuming.

By default the model and the data are small and nothing is downloaded. `--real` fine-tunes bert-base-cased on
MRPC.

    accel launch complete_nlp_example.py --with_tracking --checkpointing_steps 20
    accel launch complete_nlp_example.py --resume_from_checkpoint
"""

import argparse

from nlp_example import evaluate, get_dataloaders, make_model
from torch.optim import AdamW
from transformers import get_linear_schedule_with_warmup

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed


def training_function(config, args):
    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="tensorboard" if args.with_tracking else None,
        project_config=project,
        dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True),
    )
    set_seed(config["seed"])
    train_loader, test_loader, vocab_size = get_dataloaders(accelerator, config["batch_size"], args.real)
    model = make_model(args.real, vocab_size)
    optimizer = AdamW(model.parameters(), lr=config["lr"])
    steps = len(train_loader) * config["num_epochs"] // args.gradient_accumulation_steps
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=steps // 10, num_training_steps=steps
    )

    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    if args.resume_from_checkpoint and accelerator.has_checkpoint:
        accelerator.load_state()  # weights, optimizer, schedule, random states, data position
        accelerator.print(f"resuming in epoch {train_loader.iteration}")
    accelerator.init_trackers("complete_nlp_example", config)

    step = 0
    while train_loader.iteration < config["num_epochs"]:
        epoch = train_loader.iteration
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.log({"train/loss": loss}, step=step)
                if args.checkpointing_steps and step % args.checkpointing_steps == 0:
                    accelerator.save_state()
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        accelerator.log({"test/accuracy": accuracy, "epoch": epoch}, step=step)
        accelerator.save_state()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--real", action="store_true", help="fine-tune bert-base-cased on MRPC")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument(
        "--checkpointing_steps", type=int, help="save every this many steps, not only every epoch"
    )
    parser.add_argument(
        "--resume_from_checkpoint", action="store_true", help="resume from the newest checkpoint"
    )
    parser.add_argument("--with_tracking", action="store_true", help="log to TensorBoard")
    parser.add_argument("--project_dir", default="nlp-run", help="folder of checkpoints and logs")
    args = parser.parse_args()
    made_up = {"lr": 1e-3, "num_epochs": 3, "seed": 42, "batch_size": 32}
    training_function(
        {**made_up, "lr": 2e-5, "num_epochs": 3, "batch_size": 16} if args.real else made_up, args
    )


if __name__ == "__main__":
    main()
