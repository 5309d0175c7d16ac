"""Expert answers in the step (CHORD): their loss is the cross entropy that transformers computes, in every layout."""
import json
from pathlib import Path
from typing import Any

import pytest

from tests.step.training import Outcome, arguments, train, write_rollouts

SGD = {'optimizer': 'sgd', 'sgd_momentum': 0.5, 'lr': 0.1, 'min_lr': 0.05, 'use_distributed_optimizer': 'false', 'clip_grad': 0.0}
ANSWERS = [('what is 1 + 2?', '3'), ('what is 20 + 22?', 'it is 42'), ('how much is 5 + 5, please?', '10, of course, what else should it be'), ('7 + 1?', '8')]


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('experts')
    data = work / 'experts.jsonl'
    data.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]}) + '\n'
                            for question, answer in ANSWERS))
    rollouts = write_rollouts(work / 'rollouts', generations=2, prompts=2, num_generations=4)
    # 2 rows a device and micro-step, 2 micro-steps on one process: all four rows in each step
    experts = {'chord_sft_dataset': data, 'chord_sft_per_device_train_batch_size': 2, 'chord_mu_warmup_steps': 0, 'chord_mu_decay_steps': 0,
               'chord_mu_peak': 1.0, 'chord_mu_valley': 1.0}

    def run_it(name: str, world_size: int = 1, *, plain: bool = False, model: str = 'qwen3', **changes: Any) -> Outcome:
        argv = arguments(work, tiny_model(model), rollouts, **{'output_dir': work / name, **SGD, **({} if plain else experts), **changes})
        return ranks.run(train, argv, world_size=world_size, deadline=300.)[-1]

    return run_it


def cross_entropy(model: Path, phi: bool) -> tuple[float, float]:
    """(token mean of -phi log p over the answers and their end marks, norm of its gradient), by transformers alone."""
    import torch
    import transformers

    from tests import tiny_models
    tokenizer = tiny_models.tokenizer()
    network = transformers.AutoModelForCausalLM.from_pretrained(model).train()
    losses = []
    for question, answer in ANSWERS:
        prompt = tokenizer.encode(f'<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n')
        tokens = tokenizer.encode(f'{answer}<|im_end|>\n')  # ms-swift's chatml gives loss to the line break too
        logits = network(input_ids=torch.tensor([prompt + tokens])).logits[0]
        picked = torch.log_softmax(logits, -1)[len(prompt) - 1:-1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        probabilities = picked.detach().exp()
        losses.append(-picked * (probabilities * (1 - probabilities) if phi else 1.0))
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]).norm().item()


@pytest.mark.parametrize('phi', [False, True])
def test_with_nothing_but_experts_the_step_is_one_of_supervised_training(run: Any, tiny_model: Any, phi: bool) -> None:
    got = run(f'experts-{phi}', chord_enable_phi_function=str(phi).lower())
    loss, norm = cross_entropy(tiny_model('qwen3'), phi)
    assert got.column('loss')[0] == pytest.approx(loss, rel=1e-5)
    assert got.column('grad_norm')[0] == pytest.approx(norm, rel=1e-5)
    assert got.column('chord/sft_loss')[0] == pytest.approx(loss, rel=1e-5) and got.column('chord/mu') == [1.0, 1.0]


LAYOUTS = {'tp2-pp2': (4, {'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 2}), 'dp2': (2, {'micro_batch_size': 2}),
           'cp2': (2, {'context_parallel_size': 2}), 'unpacked': (1, {'padding_free': 'false'}),
           'vpp2-pp2': (2, {'pipeline_model_parallel_size': 2, 'virtual_pipeline_model_parallel_size': 2})}


def test_rollouts_and_experts_share_a_step_alike_in_every_layout(run: Any) -> None:
    # mu is 0.6, then 0.4: cosine from 0.6 to 0.2 in two steps
    half = {'chord_mu_peak': 0.6, 'chord_mu_valley': 0.2, 'chord_mu_decay_steps': 2, 'chord_enable_phi_function': 'true', 'beta': 0.05}
    expected, plain = run('half', **half), run('plain', plain=True, beta=0.05)
    assert expected.column('chord/mu') == pytest.approx([0.6, 0.4])
    policy, experts = plain.column('loss')[0], expected.column('chord/sft_loss')[0]
    assert expected.column('loss')[0] == pytest.approx(0.4 * policy + 0.6 * experts, rel=1e-5)
    for layout, (world_size, sizes) in LAYOUTS.items():
        assert_same(run(layout, world_size, **half, **sizes), expected, layout)


def assert_same(got: Outcome, expected: Outcome, layout: str) -> None:
    for name in ('loss', 'grad_norm', 'chord/sft_loss'):
        assert got.column(name) == pytest.approx(expected.column(name), rel=1e-5, abs=1e-7), (layout, name)
    for name, weight in expected.weights.items():
        assert float((got.weights[name] - weight).abs().max()) < 1e-5 * float(weight.abs().max()), (layout, name)


LORA = {'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16, 'target_modules': 'all-linear'}
MIXTURE = {'model': 'qwen3_moe', 'model_type': 'qwen3_moe', 'moe_router_load_balancing_type': 'none'}
# what is trained -> (arguments, layout, its world size, its arguments)
TRAINED: dict[str, tuple[dict[str, Any], str, int, dict[str, Any]]] = {
    'adapter': (LORA, 'vpp2-pp2', *LAYOUTS['vpp2-pp2']),
    'mixture': (MIXTURE, 'ep2-dp2', 2, {'expert_model_parallel_size': 2, 'micro_batch_size': 2}),
    'adapter-of-mixture': ({**LORA, **MIXTURE}, 'ep2-tp2-sp', 2, {
        'expert_model_parallel_size': 2, 'expert_tensor_parallel_size': 1, 'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}),
}


@pytest.mark.parametrize('trained', TRAINED)
def test_rollouts_and_experts_share_a_step_alike_where_there_is(run: Any, trained: str) -> None:
    changes, layout, world_size, sizes = TRAINED[trained]
    half = {'chord_mu_peak': 0.6, 'chord_mu_valley': 0.2, 'chord_mu_decay_steps': 2, 'chord_enable_phi_function': 'true', 'beta': 0.05, **changes}
    expected = run(trained, **half)
    assert expected.column('chord/sft_loss')[0] > 0.01 and expected.column('grad_norm')[0] > 1e-3
    assert_same(run(f'{trained}-{layout}', world_size, **half, **sizes), expected, layout)


def test_while_the_share_is_zero_the_step_is_the_plain_one(run: Any) -> None:
    got = run('warming', chord_mu_warmup_steps=4, train_iters=1)
    plain = run('plain-one', plain=True, train_iters=1)
    assert got.column('chord/mu') == [0.0] and got.column('grad_norm') == plain.column('grad_norm') and got.forwards == plain.forwards


def test_the_rows_of_a_step_are_a_function_of_its_number(ranks: Any) -> None:
    assert ranks.run(check_rows, world_size=1) == [4]


def check_rows() -> int:
    from types import SimpleNamespace

    from swift_megatron_grpo.step.expert import Experts
    args = SimpleNamespace(global_batch_size=16, micro_batch_size=4, chord_sft_per_device_train_batch_size=1, seed=42)
    experts = Experts(args, list(range(5)), None, dp_size=2)  # type: ignore[arg-type]
    straight = [row for update in range(5) for row in experts.rows(update)]
    assert all(sorted(straight[start:start + 5]) == [0, 1, 2, 3, 4] for start in (0, 5, 10, 15))
    assert straight[:5] != straight[5:10]
    assert Experts(args, list(range(5)), None, dp_size=2).rows(3) == straight[12:16]  # type: ignore[arg-type]
    return experts.num_rows
