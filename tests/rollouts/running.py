"""What the tests of rollouts share: a trainer that is built but not run, and transformers' own greedy answers."""
from pathlib import Path
from typing import Any

import torch


def trainer_and_data(argv: list[str]) -> tuple[Any, tuple[Any, Any]]:
    """All ranks of a case, collective: the trainer with its engine, before the first sync, and its data sets."""
    from accelerate import PartialState
    PartialState(cpu=True)
    from swift_megatron_grpo.pipeline import MegatronGRPO
    pipeline = MegatronGRPO(argv)
    datasets = pipeline._prepare_dataset()
    pipeline.args.init_iters(*datasets)
    return pipeline.prepare_trainer(), datasets


def trainer_of(argv: list[str]) -> Any:
    return trainer_and_data(argv)[0]


def greedy_of_transformers(folder: Path, weights: dict[str, torch.Tensor], prompts: tuple[str, ...],
                           max_tokens: int) -> list[tuple[list[int], list[float]]]:
    """(tokens, log-probabilities) of each prompt, without a cache, from the model in `folder` with `weights` in place of its own."""
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation='eager')
    if weights:
        load(model, weights)
    out = []
    for prompt in prompts:
        text = f'<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n'
        ids = tokenizer(text, return_tensors='pt', add_special_tokens=False)['input_ids']
        tokens, logprobs = [], []
        for _ in range(max_tokens):
            with torch.no_grad():
                row = torch.log_softmax(model(input_ids=ids).logits[0, -1].float(), -1)
            token = int(row.argmax())
            tokens.append(token)
            logprobs.append(float(row[token]))
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
            if token == tokenizer.eos_token_id:
                break
        out.append((tokens, logprobs))
    return out


def load(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Checkpoint names; the experts of a mixture are one tensor in transformers 5."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            if name in parameters:
                parameters[name].copy_(tensor)
                continue
            prefix, separator, rest = name.partition('.experts.')
            if not separator:
                continue  # a tied output layer
            number, leaf = rest.split('.')[:2]
            if leaf == 'down_proj':
                parameters[f'{prefix}.experts.down_proj'][int(number)].copy_(tensor)
            else:
                half = parameters[f'{prefix}.experts.gate_up_proj'][int(number)]
                size = half.shape[0] // 2
                (half[:size] if leaf == 'gate_proj' else half[size:]).copy_(tensor)
