"""What keeps experts evenly used: the auxiliary losses and the router's bias, against their formulas in transformers and in every layout."""
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.step.test_layouts import assert_same
from tests.step.training import Outcome, arguments, train, write_rollouts

pytestmark = pytest.mark.heavy

SGD = {'optimizer': 'sgd', 'sgd_momentum': 0.0, 'lr': 1.0, 'min_lr': 1.0, 'lr_decay_style': 'constant', 'weight_decay': 0.0, 'clip_grad': 0.0,
       'use_distributed_optimizer': 'false', 'train_iters': 1}
# One row a micro-batch: their statistics are those of a micro-batch, which would hold other rows where there are more data-parallel ranks.
ROWS = {'padding_free': 'false', 'micro_batch_size': 1}
BALANCED = {'moe_aux_loss_coeff': 0.1}
TYPES = {'qwen3_moe': 'aux_loss', 'deepseek_v3': 'seq_aux_loss'}
EXPERTS = 4
CHOSEN = 2
RATE = 64.0  # large, so that little of a step is rounded away
UPDATE_RATE = 1e-3  # Megatron's moe_router_bias_update_rate


@pytest.fixture(scope='module')
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp('rollouts'), generations=1, prompts=2, num_generations=4)


@pytest.fixture(scope='module')
def unrewarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of equal rewards: without advantages there is no gradient but that of the auxiliary losses."""
    folder = write_rollouts(tmp_path_factory.mktemp('unrewarded'), generations=1, prompts=2, num_generations=4)
    path = folder / 'generation-000000.jsonl'
    head, *lines = path.read_text().splitlines()
    path.write_text('\n'.join([head, *(json.dumps({**json.loads(line), 'rewards': [1.0]}) for line in lines)]) + '\n')
    return folder


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('auxiliary')
    known: dict[str, Outcome] = {}

    def run_it(kind: str, rollouts: Path, world_size: int = 1, **changes: Any) -> Outcome:
        key = f'{kind} {rollouts} {world_size} {sorted(changes.items())}'
        if key not in known:
            argv = arguments(work, tiny_model(kind), rollouts, **{'model_type': kind, 'moe_router_load_balancing_type': TYPES[kind], **SGD, **ROWS, **changes})
            known[key] = ranks.run(train, argv, world_size=world_size, deadline=300.)[-1]
        return known[key]

    return run_it


def sequences(rollouts: Path) -> list[torch.Tensor]:
    """Token ids (1, T) of each rollout, prompt and answer."""
    from tests import tiny_models
    tokenizer = tiny_models.tokenizer()
    rows = [json.loads(line) for line in (rollouts / 'generation-000000.jsonl').read_text().splitlines()[1:]]
    prompts = [tokenizer.encode(f'<|im_start|>user\n{row["messages"][0]["content"]}<|im_end|>\n<|im_start|>assistant\n') for row in rows]
    return [torch.tensor([prompt + [token for part in row['response_token_ids'] for token in part]]) for prompt, row in zip(prompts, rows)]


@contextmanager
def watched_routers(model: Any) -> Iterator[Callable[[], list[tuple[str, torch.Tensor, torch.Tensor]]]]:
    """A function that gives, and forgets, (name, logits (T, E), chosen experts (T, k)) of each router that ran since the last call."""
    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    hooks = [module.register_forward_hook(lambda _, __, out, name=name: seen.append((name, out[0], out[2])))
             for name, module in model.named_modules() if name.endswith('mlp.gate')]

    def take() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        taken = list(seen)
        seen.clear()
        return taken

    yield take
    for hook in hooks:
        hook.remove()


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation='eager').train()


def test_the_gradient_of_the_auxiliary_losses_is_that_of_their_formulas(run: Any, tiny_model: Any, unrewarded: Path) -> None:
    """Switch Transformer's loss (arXiv:2101.03961, equation 4) and ST-MoE's z-loss (arXiv:2202.08906, equation 5), each summed over layers and averaged
    over micro-batches; with k experts a token, a token counts 1/k for each."""
    from transformers.core_model_loading import revert_weight_conversion
    folder = tiny_model('qwen3_moe')
    model, rows = load(folder), sequences(unrewarded)
    with watched_routers(model) as take:
        for ids in rows:
            model(ids)
            loss = torch.zeros(())
            for _, logits, chosen in take():
                shares = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
                loss = loss + 0.1 * EXPERTS * (shares * logits.softmax(-1).mean(0)).sum() + 0.01 * logits.logsumexp(-1).square().mean()
            (loss / len(rows)).backward()
    gradients = revert_weight_conversion(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    outcome = run('qwen3_moe', unrewarded, **BALANCED, moe_z_loss_coeff=0.01, lr=RATE, min_lr=RATE)
    base = load_file(folder / 'model.safetensors')
    errors = {name: float(((base[name] - outcome.weights[name]) / RATE - gradient).norm() / gradient.norm()) for name, gradient in gradients.items()
              if gradient.norm() > 1e-4}
    assert sum(name.endswith('mlp.gate.weight') for name in errors) == 4
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 2e-5, f'{worst}: {errors[worst]:.1e}'
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item()
    assert outcome.column('grad_norm')[0] == pytest.approx(norm, rel=1e-5)


LAYOUTS = {
    'pp2-ep2-dp2': (4, {'pipeline_model_parallel_size': 2, 'expert_model_parallel_size': 2}),
    'tp2-sp-ep2-cp2': (4, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true', 'expert_model_parallel_size': 2, 'context_parallel_size': 2}),
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('kind', TYPES)
def test_with_an_auxiliary_loss_a_model_trains_alike_in(run: Any, rollouts: Path, kind: str, layout: str) -> None:
    """The bias of deepseek_v3's routers is among the weights."""
    world_size, changes = LAYOUTS[layout]
    expected, outcome = run(kind, rollouts, **BALANCED), run(kind, rollouts, world_size, **BALANCED, **changes)
    assert_same(outcome, expected)
    name = {'aux_loss': 'load_balancing_loss', 'seq_aux_loss': 'seq_load_balancing_loss'}[TYPES[kind]]
    assert outcome.column(name) == pytest.approx(expected.column(name), rel=1e-5) and expected.column(name)[0] > 1.0


def test_a_routers_bias_moves_towards_the_mean_and_is_exported(run: Any, tiny_model: Any, rollouts: Path) -> None:
    """Auxiliary-loss-free balancing (arXiv:2408.15664): by a fixed rate, up where an expert got fewer tokens of the step than the mean."""
    folder = tiny_model('deepseek_v3')
    base, weights = load_file(folder / 'model.safetensors'), run('deepseek_v3', rollouts, **BALANCED).weights
    counts: dict[str, torch.Tensor] = {}
    with torch.no_grad(), watched_routers(model := load(folder)) as take:
        for ids in sequences(rollouts):
            model(ids)
            for name, _, chosen in take():
                counts[name] = counts.get(name, torch.zeros(EXPERTS)) + torch.bincount(chosen.flatten(), minlength=EXPERTS)
    assert len(counts) == 3
    for name, count in counts.items():
        bias = f'{name}.e_score_correction_bias'
        assert torch.equal(weights[bias], base[bias] + UPDATE_RATE * torch.sign(count.mean() - count)), (name, count)


def router_settings(argv: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of what balances experts: (as this trainer sets it, as ms-swift's own GRPO arguments do)."""
    from accelerate import PartialState
    PartialState(cpu=True)
    from swift.megatron.arguments import MegatronArguments
    from swift_megatron_grpo.pipeline import MegatronGRPO
    from mcore_bridge import ModelConfig, hf_to_mcore_config
    from transformers import AutoConfig
    trainer = MegatronGRPO(argv).prepare_trainer()
    names = ('moe_router_load_balancing_type', 'moe_aux_loss_coeff', 'moe_z_loss_coeff', 'moe_router_enable_expert_bias', 'moe_router_bias_update_rate')
    of_family = hf_to_mcore_config(AutoConfig.from_pretrained(argv[argv.index('--model') + 1]))
    theirs = {}
    for name in names:
        given = MegatronArguments.__dataclass_fields__[name].default if name in MegatronArguments.__dataclass_fields__ else None
        theirs[name] = given if given is not None else of_family.get(name, ModelConfig.__dataclass_fields__[name].default)
    return {name: getattr(trainer.config, name) for name in names}, theirs


@pytest.mark.parametrize('kind, balancing, bias', [('qwen3_moe', 'aux_loss', False), ('deepseek_v3', 'seq_aux_loss', True)])
def test_nothing_given_means_what_it_means_in_ms_swift(ranks: Any, tiny_model: Any, tmp_path: Path, kind: str, balancing: str, bias: bool) -> None:
    ours, theirs = ranks.run(router_settings, arguments(tmp_path, tiny_model(kind), model_type=kind), world_size=1)[0]
    assert ours == theirs
    assert ours == {'moe_router_load_balancing_type': balancing, 'moe_aux_loss_coeff': 0.0, 'moe_z_loss_coeff': None,
                    'moe_router_enable_expert_bias': bias, 'moe_router_bias_update_rate': UPDATE_RATE}
