"""Train any causal language model of Hugging Face on any text, on one device or sharded over many.

python train_gpt.py                                          one process
scale run --nproc 2 train_gpt.py --stage 2                   two ranks of this host
torchrun --nproc-per-node 8 train_gpt.py --config ds.json    the same script, a configuration of your own
python train_gpt.py --resume --steps 500                     goes on, at any number of ranks and any stage
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

import polyscale

GPT2 = '{"model_type": "gpt2", "n_layer": 4, "n_embd": 160, "n_head": 4, "n_positions": 128, "vocab_size": 1024}'


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=GPT2, metavar="JSON", help="a model's config.json, or its text (%(default)s)")
    add("--text", nargs="+", type=Path, metavar="FILE", help="UTF-8 files (the topics of Python's own help)")
    add("--length", type=int, default=128, metavar="N", help="tokens of a sample (%(default)s)")
    add("--validation", type=int, default=128, metavar="N", help="samples held back, from the end (%(default)s)")
    add("--config", metavar="FILE", help="a DeepSpeed configuration, instead of the next two options")
    add("--stage", type=int, default=0, metavar="N", help="ZeRO stage, 0 to 3 (%(default)s)")
    add("--batch", type=int, default=8, metavar="N", help="samples of a micro-batch of one rank (%(default)s)")
    add("--steps", type=int, default=120, metavar="N", help="updates, those before a resume included (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, dropout and order (%(default)s)")
    add("--out", type=Path, default=Path("runs/gpt"), metavar="DIR", help="folder of the run (%(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint in that folder")
    add("--prompt", default="The value of", metavar="TEXT", help="what to go on writing at the end (%(default)s)")
    args = parser.parse_args()
    if not args.resume and (args.out / "checkpoint").exists():
        parser.error(f"{args.out} holds a run: --resume it, or choose another folder with --out")
    return args


def configuration(stage: int, batch: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.5e-3, "warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }


def build_model(config: str, seed: int) -> torch.nn.Module:
    settings = json.loads(config if config.lstrip().startswith("{") else Path(config).read_text("utf-8"))
    settings |= {"bos_token_id": None, "eos_token_id": None}  # our vocabulary has no special tokens
    torch.manual_seed(seed)
    with polyscale.partitioned_init():  # each rank makes its own share of the weights
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.loss_type = "ForCausalLM"  # transformers cannot tell from a name like GPT2LMHeadModel
    return model


def train_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def main() -> None:
    args = arguments()
    text = "\n\n".join([file.read_text("utf-8") for file in args.text] if args.text else topics.values())
    model = build_model(args.model, args.seed)
    engine = polyscale.initialize(model, config=args.config or configuration(args.stage, args.batch), seed=args.seed)
    first, batch = engine.topology.rank == 0, engine.config.batch(engine.topology.dp_size)
    if first and not args.resume:
        args.out.mkdir(parents=True, exist_ok=True)
        train_tokenizer(text, engine.module.config.vocab_size).save(str(args.out / "tokenizer.json"))
    torch.distributed.barrier(engine.topology.group("control"))  # the other ranks wait for it
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    rows = torch.tensor(tokenizer.encode(text).ids).split(args.length)[:-1]
    samples = [{"input_ids": row, "labels": row} for row in rows]  # transformers shifts the labels
    place = {"topology": engine.topology, "micro_batch_size": batch.micro}
    training = polyscale.data.loader(samples[: -args.validation], seed=args.seed, **place)
    validation = polyscale.data.loader(samples[-args.validation :], shuffle=False, **place)
    engine.track("data", training)
    if args.resume:
        engine.load(args.out / "checkpoint")

    def report(**values: object) -> None:
        if first:
            print(json.dumps({"step": engine.steps, **values}), flush=True)

    batches = itertools.chain.from_iterable(itertools.repeat(training))  # one epoch after the other
    begin = engine.steps
    while True:
        if engine.steps % 20 == 0 or engine.steps in (begin, args.steps):
            losses = [engine.eval_batch(iter([each])) for each in validation]
            report(validation_loss=torch.stack(losses).mean().item())
        if engine.steps >= args.steps:
            break
        started = time.perf_counter()
        loss = engine.train_batch(batches).item()
        speed = batch.train * args.length / (time.perf_counter() - started)
        report(loss=loss, tokens_per_s=round(speed), memory_mb=engine.memory().allocated >> 20)
    engine.save(args.out / "checkpoint", overwrite=True)
    prompt = torch.tensor([tokenizer.encode(args.prompt).ids[: args.length // 2]], device=engine.device)
    options = {"max_new_tokens": args.length // 2, "do_sample": False, "no_repeat_ngram_size": 3}
    report(sentence=tokenizer.decode(engine.eval().module.generate(prompt, **options)[0].tolist()))
    engine.close()


if __name__ == "__main__":
    main()
