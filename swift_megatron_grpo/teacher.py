"""A teacher for on-policy distillation: its log-probabilities of the sampled tokens (import tier 2).

The advantage of a token is then its sequence's plus teacher_kl_coef * (teacher - old log-probability), see step/advantage.py; with
`--advantage_reweight rlsd` it is scaled instead, and with `--sdar_loss_coef` the teacher speaks in the loss. The kinds:

| arguments | teacher |
|---|---|
| `--teacher_model PATH` | a frozen copy on Megatron, in the policy's layout; its sizes may differ from the policy's, its tokenizer may not |
| `--tuner_type lora --teacher_model` the policy's own model | the policy with the adapter switched off; nothing is loaded |
| none, and rows with a column `teacher_prompt` (or `teacher_images`) | the policy as it is, which reads the teacher's prompt in place of the last question |
| `--teacher_model_server URL`, or a JSON list of `{"url", "tags"}` | one or several vLLM servers, asked for the log-probabilities of the sampled tokens |

Where a row has a `teacher_prompt`, each kind reads that prompt, and the same answer after it.
"""
from __future__ import annotations

import contextlib
import torch
from collections.abc import Callable, Iterable, Iterator, Sequence
from swift.infer_engine.protocol import RequestConfig
from swift.megatron.model import get_mcore_model
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.gkd_helpers import build_teacher_requests, parse_teacher_model_server, route_samples_to_teachers
from swift.rlhf_trainers.utils import parse_prompt_logprobs
from swift.utils import get_logger
from transformers import AutoConfig
from typing import Any

from .deadlines import deadline
from .errors import RunError, UserError
from .parallel import Topology, agree, contiguous_share
from .step.batch import StepBatch
from .step.forward import PolicyForward, collect_logprobs
from .step.rollout import ScoredRollouts
from .types import Rollout

logger = get_logger()

# After the answer a template puts its end-of-turn tokens; the server sees them, and they carry no loss.
_MAX_TOKENS_AFTER_ANSWER = 4


def build_teacher(trainer: Any, topology: Topology, policy: PolicyForward, device: torch.device) -> LocalTeacher | ServerTeacher:
    """The teacher that the arguments ask for; without any, one that teaches where rows bring a prompt for it. All ranks, collective."""
    args = trainer.args
    if args.teacher_model_server is not None:
        return ServerTeacher(args, trainer.template, topology, device)
    return LocalTeacher(trainer, topology, policy, device)


def refuse_own_prompts(args: Any, rows: Iterable[tuple[int, dict[str, Any]]]) -> None:
    """A teacher's prompt in a row makes advantages differ from token to token; losses that need one a sequence refuse it. SDAR leaves them alone.

    Args:
        rows: (row of the data set, its columns).
    """
    if args.sdar_loss_coef > 0 or not (args.loss_type in ('real', 'fipo') or args.off_policy_sequence_mask_delta is not None):
        return
    for dataset_index, columns in rows:
        for column in ('teacher_prompt', 'teacher_images'):
            if columns.get(column):
                raise UserError(f'Data set row {dataset_index} has the column {column!r}: a teacher makes the advantage differ from token to '
                                f'token, and loss_type {args.loss_type} with off_policy_sequence_mask_delta {args.off_policy_sequence_mask_delta} '
                                'needs one a sequence. Remove the column, or use loss_type grpo, bnpo, dr_grpo, dapo, cispo or sapo without that mask.')


def teacher_samples(scored: ScoredRollouts) -> tuple[dict[int, GRPOSample], bool]:
    """Rollout index -> sample with the teacher's prompt put in, and whether any has one."""
    samples = {rollout.index: scored.sample(rollout) for rollout in scored.rollouts}
    views = [sample.build_teacher_view() for sample in samples.values()]  # of each, also after the first that has one
    return samples, any(views)


class LocalTeacher:
    """A frozen model on Megatron, the policy without its adapter, or the policy itself behind another prompt.

    Args:
        trainer: for arguments, template and the policy's models.
        topology: this rank's place.
        policy: the policy's forward; the teacher's too where no model of its own is loaded.
        device: the rank's device.
    """

    def __init__(self, trainer: Any, topology: Topology, policy: PolicyForward, device: torch.device):
        self.args = trainer.args
        self.trainer = trainer
        self.device = device
        self.models: list[Any] = []
        self.forward = policy
        self.is_policy = self.args.teacher_model is None and not self.args._teacher_use_disable_adapter
        if self.args.teacher_model is not None:
            self.models = self._load()
            self.forward = PolicyForward(trainer, self.models, topology, self.args.temperature)

    def _load(self) -> list[Any]:
        args = self.args
        models = get_mcore_model(args, AutoConfig.from_pretrained(args.teacher_model_dir, trust_remote_code=True))
        for model in models:
            if not args.use_cpu_initialization:
                model.to('cpu' if args.offload_teacher_model else self.device)
            model.requires_grad_(False)
            model.eval()
        models[0].config.bridge.load_weights(models, args.teacher_model_dir)
        return models

    @contextlib.contextmanager
    def _teacher_weights(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.args._teacher_use_disable_adapter:
                for model in self.trainer.peft_models:
                    stack.enter_context(model.disable_adapter())
            elif self.args.offload_teacher_model:
                for model in self.models:
                    model.to(self.device)
                    stack.callback(model.to, 'cpu')
            yield

    def teaches(self, scored: ScoredRollouts) -> bool:
        """Whether it has something to say: the policy itself only where a row brings the teacher's prompt. The same on every rank."""
        refuse_own_prompts(self.args, ((prompt.dataset_index, {'teacher_prompt': sample.teacher_prompt, 'teacher_images': sample.teacher_images})
                                       for prompt, sample in zip(scored.prompts, scored.samples_P, strict=True)))
        return not self.is_policy or any(sample.teacher_prompt or sample.teacher_images is not None for sample in scored.samples_P)

    def logprobs(self, steps: Sequence[StepBatch], scored: ScoredRollouts) -> list[torch.Tensor]:
        """teacher_logprobs_K of each step, float32, own tokens filled in. All ranks, collective: one forward-only run of the schedule."""
        samples, has_own_prompts = teacher_samples(scored)
        if has_own_prompts:
            views = self.trainer.batches.build(scored.rollouts, samples, len(steps), encode=self.trainer.batches.encode_for_teacher)
            assert all(torch.equal(view.table.lengths_S, step.table.lengths_S) for view, step in zip(views, steps, strict=True))
            steps = views
        with self._teacher_weights(), self.forward.free_routing():
            return [logprobs_K for logprobs_K, _ in collect_logprobs(self.forward, steps, self.device)]


class ServerTeacher:
    """Teachers behind HTTP (a `swift rollout`, `swift deploy` or vLLM server), asked by ms-swift's client.

    A server gives log-probabilities at temperature 1. Every rank asks for its share of the rollouts, and ranks exchange what they got.

    Args:
        args: teacher_model_server, teacher_tag_key, rollout_timeout, temperature.
        template: makes token ids of an answer, so that the teacher scores exactly what was sampled.
        topology: this rank's place.
        device: the rank's device.
        connect: address -> client; ms-swift's VLLMInferClient.
    """

    def __init__(self, args: Any, template: Any, topology: Topology, device: torch.device, connect: Callable[[str], Any] | None = None):
        self.args = args
        self.template = template
        self.topology = topology
        self.device = device
        self.configs = parse_teacher_model_server(args.teacher_model_server)
        self.clients: list[Any] = []
        agree('Connecting to the teacher', lambda: self._connect(connect or _client))
        if args.temperature != 1.0:
            logger.warning(f'teacher_model_server: a server gives log-probabilities at temperature 1, and the policy samples at {args.temperature}. '
                           'Give --temperature 1, or a --teacher_model, which is taken at the same temperature.')

    def _connect(self, connect: Callable[[str], Any]) -> None:
        self.clients = [connect(config.url) for config in self.configs]

    def teaches(self, scored: ScoredRollouts) -> bool:
        return True

    def logprobs(self, steps: Sequence[StepBatch], scored: ScoredRollouts) -> list[torch.Tensor]:
        """teacher_logprobs_K of each step, float32, own tokens filled in. All ranks, collective.

        Raises RunError where a server fails, or tokenizes otherwise than the policy.
        """
        mine = scored.rollouts[slice(*_bounds(contiguous_share(len(scored.rollouts), self.topology.world_size, self.topology.rank)))]

        def ask() -> dict[int, list[float]]:
            with deadline('Log-probabilities of the teacher', self.args.rollout_timeout, rank=self.topology.rank):
                return self._ask(mine, scored)

        parts = agree('Log-probabilities of the teacher', ask)
        by_rollout = {index: values for part in parts for index, values in part.items()}
        results = []
        for step in steps:
            flat: list[float] = []
            for index, length in zip(step.table.rollout_indices_S.tolist(), step.table.lengths_S.tolist()):
                if len(by_rollout[index]) != length:
                    raise RunError(f'The teacher scored {len(by_rollout[index])} tokens of rollout {index}, which has {length} that carry loss.')
                flat += by_rollout[index]
            results.append(step.own_tokens(torch.tensor(flat, dtype=torch.float32, device=self.device)))
        return results

    def _ask(self, rollouts: Sequence[Rollout], scored: ScoredRollouts) -> dict[int, list[float]]:
        """Rollout index -> log-probability of each sampled token."""
        answered = [rollout for rollout in rollouts if rollout.num_response_tokens > 0]
        for rollout in answered:
            if len(rollout.response_token_ids) > 1:
                raise UserError('teacher_model_server scores answers of one turn; a multi-turn rollout needs a local --teacher_model.')
        samples = [scored.sample(rollout) for rollout in answered]
        for sample in samples:
            sample.build_teacher_view()
        requests = build_teacher_requests(samples, self.template)
        config = RequestConfig(prompt_logprobs=0, max_tokens=1, temperature=0.0)
        values = {rollout.index: [] for rollout in rollouts}
        for number, positions in route_samples_to_teachers(samples, self.configs, tag_key=self.args.teacher_tag_key).items():
            if not positions:
                continue
            responses = self.clients[number].infer([requests[i] for i in positions], request_config=config, use_tqdm=False)
            for i, response in zip(positions, responses, strict=True):
                logprobs, ids = parse_prompt_logprobs(response, topk=0)
                values[answered[i].index] = answer_logprobs([row[0] for row in logprobs], [row[0] for row in ids],
                                                            answered[i].response_token_ids[0], answered[i])
        return values


def answer_logprobs(logprobs: Sequence[float], token_ids: Sequence[int], answer: Sequence[int], rollout: Rollout) -> list[float]:
    """Those of a whole conversation's log-probabilities that belong to the answer, found by its token ids from the end. Pure.

    Example: ids [5, 6, 7, 2], answer [6, 7]: the second and third value.
    """
    for after in range(_MAX_TOKENS_AFTER_ANSWER + 1):
        start = len(token_ids) - after - len(answer)
        if start >= 0 and list(token_ids[start:start + len(answer)]) == list(answer):
            return [float(value) for value in logprobs[start:start + len(answer)]]
    raise RunError(f'The teacher server returned {len(token_ids)} tokens for rollout {rollout.index} (data set row {rollout.dataset_index}), and '
                   f'the {len(answer)} sampled ones are not at their end. It must use the tokenizer of the policy.')


def _client(url: str) -> Any:
    from swift.rlhf_trainers.vllm_client import VLLMInferClient
    return VLLMInferClient(base_urls=[url])


def _bounds(share: range) -> tuple[int, int]:
    return share.start, share.stop
