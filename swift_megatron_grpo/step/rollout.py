"""One sampling phase: prompts to scored rollouts, the same list on every rank (import tier 2)."""
from __future__ import annotations

import copy
import dataclasses
import functools
import time
import torch
from collections.abc import Sequence
from dataclasses import dataclass, field
from swift.rl_core.data import GRPOSample
from swift.template import Template
from swift.utils import remove_response
from typing import Any

from ..deadlines import deadline
from ..engines import EngineLost
from ..engines.base import EngineGroup, RolloutEngine, Sampling
from ..errors import RunError, UserError
from ..parallel import Topology, agree, contiguous_share, share_of_groups
from ..residency import Residency, Stage
from ..types import Rollout
from .prompts import Prompt, media_names
from .reward import GroupScores, Rewarder, Stopwatch
from .turns import Turns

_SEED_STRIDE = 1_000_003
GRACE_SECONDS = 30.0  # for an engine that ends its phase by itself at the deadline, and says why


@dataclass(kw_only=True, slots=True)
class ScoredRollouts:
    """All N rollouts of a generation with their rewards, equal on every rank.

    samples_P: the prompt of each group; rewards_NF: float32, NaN where a function does not apply; seconds: longest over the ranks.
    """
    prompts: list[Prompt]
    rollouts: list[Rollout]
    rewards_NF: torch.Tensor
    samples_P: list[GRPOSample]
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # of how it came about, to be logged

    @classmethod
    def joined(cls, parts: Sequence[ScoredRollouts]) -> ScoredRollouts:
        """Several batches as one, groups in order. Seconds and metrics of how they came about stay behind. Pure."""
        rollouts, first = [], 0
        for part in parts:
            rollouts += [dataclasses.replace(rollout, prompt_index=rollout.prompt_index + first) for rollout in part.rollouts]
            first += len(part.samples_P)
        return cls(prompts=[prompt for part in parts for prompt in part.prompts], rollouts=rollouts,
                   rewards_NF=torch.cat([part.rewards_NF for part in parts]), samples_P=[sample for part in parts for sample in part.samples_P])

    def sample(self, rollout: Rollout) -> GRPOSample:
        """The sample that `encode_sample` takes; shares the prompt's row, copies nothing of it."""
        prompt = self.samples_P[rollout.prompt_index]
        return dataclasses.replace(
            prompt,
            messages=rollout.messages,
            response_token_ids=rollout.response_token_ids,
            response_loss_mask=rollout.response_loss_mask,
            rollout_logprobs=rollout.rollout_logprobs,
            finish_reason=rollout.finish_reason,
            rollout_infos=rollout.rollout_infos,
            routed_experts=rollout.routed_experts,
            add_eos=False,
            **rollout.media)


@dataclass(kw_only=True, slots=True)
class Phase:
    """One sampling phase between its beginning and its end. `share`: rollouts of this engine; `part`: those of them that this rank scores."""
    prompts: list[Prompt]
    samples_P: list[GRPOSample]
    num_generations: int
    version: int
    seed: int
    share: range
    part: range
    requests: list[Any] = field(default_factory=list)
    pending: Any = None
    outputs: dict[int, Any] = field(default_factory=dict)  # of this rank's part, by rollout
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    settled: bool = False
    watch: Stopwatch = field(default_factory=Stopwatch)
    scores: GroupScores | None = None  # reward_batch group
    seconds: dict[str, float] = field(default_factory=dict)


class RolloutStage:
    """Samples and scores.

    Args:
        args: sampling arguments and deadlines.
        template: for the default system message.
        engine: this rank's engine.
        rewarder: reward functions.
        topology: this rank's place.
        residency: makes room for the engine.
        device: this rank's, for reward functions that run beside a generation.
    """

    def __init__(self, args: Any, template: Template, engine: RolloutEngine, rewarder: Rewarder, topology: Topology, residency: Residency,
                 device: torch.device):
        self.args = args
        self.template = template
        self.engine = engine
        self.rewarder = rewarder
        self.topology = topology
        self.residency = residency
        self.device = device
        self.scores_groups = args.reward_batch == 'group'
        self.turns: Turns | None = None
        if args.multi_turn_scheduler is not None and not engine.runs_turns:
            self.turns = Turns(args, template, engine)

    @property
    def group(self) -> EngineGroup:
        return self.engine.group

    def run(self, prompts: list[Prompt], *, num_generations: int, seed: int, version: int) -> ScoredRollouts:
        """`begin` and `complete` in one."""
        return self.complete(self.begin(prompts, num_generations=num_generations, seed=seed, version=version))

    @property
    def _seconds(self) -> float:
        limit = self.args.rollout_timeout
        return limit + GRACE_SECONDS if self.engine.keeps_deadlines and limit > 0 else limit

    def begin(self, prompts: list[Prompt], *, num_generations: int, seed: int, version: int) -> Phase:
        """All ranks, collective. A server samples from here on; other engines do so in `complete`.

        Args:
            prompts: P prompts, equal on every rank.
            num_generations: G.
            seed: rollout i of the phase is sampled with seed + i, wherever it is sampled.
            version: of the weights that the engine is expected to hold.
        """
        samples_P = [self.prompt_sample(prompt) for prompt in prompts]
        share, part = self._shares(len(prompts), num_generations)
        requests = self.requests([samples_P[i // num_generations] for i in share], [f'rollout-{seed + i}' for i in share])
        phase = Phase(prompts=prompts, samples_P=samples_P, num_generations=num_generations, version=version, seed=seed, share=share, part=part)
        if self.scores_groups:
            own = samples_P[(share.start + part.start) // num_generations:(share.start + part.stop) // num_generations]
            phase.scores = self.rewarder.by_group(own, len(part), phase.watch, self.device)
        if self.turns is not None:
            phase.requests = requests
        else:
            phase.pending = self.engine.start(requests, self.sampling(seed + share.start))
        return phase

    def _shares(self, num_prompts: int, num_generations: int) -> tuple[range, range]:
        """Rollouts of this engine, and which of them (counted from the engine's first) this rank scores: every rank of an engine has its outputs.
        Pure. A function that scores groups needs them whole."""
        group = self.group
        if not self.scores_groups:
            share = share_of_groups(num_prompts, num_generations, group.count, group.index)
            return share, contiguous_share(len(share), group.size, group.rank)
        prompts = contiguous_share(num_prompts, group.count, group.index)
        own = contiguous_share(len(prompts), group.size, group.rank)
        return (range(prompts.start * num_generations, prompts.stop * num_generations),
                range(own.start * num_generations, own.stop * num_generations))

    def settle(self, phase: Phase) -> None:
        """Waits until everything is sampled. All ranks, collective. Groups that are complete are being scored from then on."""
        if phase.settled:
            return
        start = time.perf_counter()
        self.residency.to(Stage.GENERATING)
        if self.turns is not None:
            self._take(phase, phase.part.start, self.turns.run(phase.requests, phase.part, self.sampling(phase.seed + phase.share.start)))
        else:
            for first, outputs in self.engine.arrivals(phase.pending):
                self._take(phase, first, outputs)
        phase.settled = True
        phase.seconds['generate'] = time.perf_counter() - start

    def _take(self, phase: Phase, first: int, outputs: Sequence[Any]) -> None:
        """Outputs of the engine's requests `first`, first + 1, ...; no communication."""
        new = {number: output for number, output in enumerate(outputs, first) if number in phase.part}
        phase.outputs.update(new)
        if phase.scores is None:
            return
        size = phase.num_generations
        for group in sorted({number // size for number in new}):  # parts are whole groups
            members = range(group * size, (group + 1) * size)
            if all(number in phase.outputs for number in members):
                part = range(members.start - phase.part.start, members.stop - phase.part.start)
                phase.scores.add(part, functools.partial(self._samples, phase, members))

    def _samples(self, phase: Phase, numbers: range) -> list[GRPOSample]:
        """What reward functions see of the engine's requests `numbers`; their rollouts are noted."""
        for number in numbers:
            phase.rollouts[number] = self._rollout(phase.share[number], phase, phase.outputs[number])
        return [self._scored_sample(phase.samples_P, phase.rollouts[number]) for number in numbers]

    def complete(self, phase: Phase) -> ScoredRollouts:
        """All ranks, collective.

        Raises:
            RunError on every rank, naming the phase, the rank and, for rewards, the function; EngineLost where no server is left.
        """
        rank = self.topology.rank
        lost: list[EngineLost] = []

        def produce() -> tuple[list[tuple[Rollout, list[float | None]]], dict[str, float]]:
            with deadline('Sampling of a generation', self._seconds, rank=rank):
                try:
                    self.settle(phase)
                except EngineLost as error:
                    lost.append(error)
                    raise
                except Exception:
                    self._blame_media(phase)
                    raise
            if len(phase.outputs) != len(phase.part):
                raise RunError(f'The engine returned {len(phase.outputs)} rollouts for {len(phase.part)} requests.')
            with deadline('Reward functions', self.args.reward_timeout, rank=rank, detail=phase.watch.running):
                if phase.scores is not None:
                    scores = phase.scores.result()
                else:
                    scores = self.rewarder.score(self._samples(phase, phase.part), phase.watch)
            phase.seconds.update({f'reward/{name}': value for name, value in scores.seconds.items()})
            return list(zip((phase.rollouts[number] for number in phase.part), scores.rewards, strict=True)), phase.seconds

        try:
            parts = agree('Sampling', produce)
        except RunError:
            if lost:  # on every rank
                raise lost[0] from None
            raise
        scored = sorted((pair for pairs, _ in parts for pair in pairs), key=lambda pair: pair[0].index)
        expected = len(phase.prompts) * phase.num_generations
        if [pair[0].index for pair in scored] != list(range(expected)):
            raise RunError(f'The engines returned {len(scored)} rollouts for {expected} requests.')
        rewards = [[float('nan') if value is None else value for value in pair[1]] for pair in scored]
        longest: dict[str, float] = {}
        for _, times in parts:
            for name, value in times.items():
                longest[name] = max(longest.get(name, 0.0), value)
        return ScoredRollouts(
            prompts=phase.prompts,
            rollouts=[pair[0] for pair in scored],
            rewards_NF=torch.tensor(rewards, dtype=torch.float32).reshape(expected, len(self.rewarder.names)),
            samples_P=phase.samples_P,
            seconds=longest)

    def _blame_media(self, phase: Phase) -> None:
        """After sampling failed: raises UserError for the first prompt of this engine whose images, videos or audios cannot be read, if any."""
        first, last = phase.share.start // phase.num_generations, -(-phase.share.stop // phase.num_generations)
        for prompt, sample in zip(phase.prompts[first:last], phase.samples_P[first:last]):
            media = media_names(vars(sample))
            if not media:
                continue
            try:
                self.template.encode(copy.deepcopy(sample.to_template_dict()))
            except ImportError:  # a package is missing: no row's fault
                return
            except Exception as error:  # whatever a reader of images raises
                raise UserError(f'Data set row {prompt.dataset_index}{media} cannot be read: {type(error).__name__}: {error}. Mend or remove '
                                'the row, or let --truncation_strategy delete replace prompts that cannot be encoded.') from error

    def prompt_sample(self, prompt: Prompt) -> GRPOSample:
        """The row as ms-swift's sample: default system message put in, a reference answer in the row taken off."""
        sample = GRPOSample.from_row(prompt.row)
        default_system = self.template.template_meta.default_system
        if default_system and sample.messages[0]['role'] != 'system':
            sample.messages.insert(0, {'role': 'system', 'content': default_system})
        remove_response(sample.messages)
        sample.prompt_id = str(prompt.dataset_index)
        return sample

    def requests(self, samples: Sequence[GRPOSample], names: Sequence[str]) -> list[Any]:
        """ms-swift's requests. Each has messages of its own, since a conversation of several turns writes into them, and a name of its own,
        by which an environment is found again."""
        args = self.args
        include_extra = bool(args.vllm_server_pass_dataset) or args.multi_turn_scheduler is not None or bool(args.use_gym_env)
        requests: list[Any] = []
        made: dict[int, Any] = {}  # pictures are read once a prompt
        for sample, name in zip(samples, names, strict=True):
            if id(sample) not in made:
                made[id(sample)] = sample.to_infer_request(include_extra=include_extra)
            request = made[id(sample)]
            own = {field.name: copy.copy(getattr(request, field.name)) for field in dataclasses.fields(request)}
            requests.append(type(request)(**{**own, 'messages': copy.deepcopy(request.messages), 'uuid': name}))
        return requests

    def metrics(self, scored: ScoredRollouts, policy_version: int) -> dict[str, float]:
        """Before training on them: how old the rollouts are (optimizer steps), and whether they come from another distribution than the
        log-probabilities of the trainer describe (top_p, top_k, min_p, a repetition penalty or a grammar change what is sampled)."""
        oldest = min((rollout.policy_version for rollout in scored.rollouts), default=policy_version)
        values = {}
        if self.args.async_generate:
            values['rollout/staleness'] = float(policy_version - oldest)
        if not self.sampling(0).is_plain:
            values['rollout/sampled_from_another_distribution'] = 1.0
        return values

    def sampling(self, seed: int) -> Sampling:
        args = self.args
        return Sampling(
            temperature=args.temperature,
            max_tokens=args.max_completion_length,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            stop_words=tuple(args.stop_words or ()),
            structured_outputs_regex=args.structured_outputs_regex,
            seed=seed)

    def _rollout(self, index: int, phase: Phase, output: Any) -> Rollout:
        prompt_index = index // phase.num_generations
        prompt_sample = phase.samples_P[prompt_index]
        sample = dataclasses.replace(prompt_sample, messages=list(prompt_sample.messages), response_token_ids=[], response_loss_mask=[],
                                     rollout_logprobs=[], rollout_infos={})
        sample.apply_rollout_output(rollout_output=output)
        token_ids = sample.response_token_ids
        if token_ids and isinstance(token_ids[0], int):
            token_ids = [token_ids]
        prompt_token_ids = output.response.prompt_token_ids
        media = {key: getattr(sample, key) for key in ('images', 'videos', 'audios') if getattr(sample, key) is not getattr(prompt_sample, key)}
        return Rollout(
            index=index,
            prompt_index=prompt_index,
            dataset_index=phase.prompts[prompt_index].dataset_index,
            response_token_ids=[list(turn) for turn in token_ids],
            response_loss_mask=[list(turn) for turn in sample.response_loss_mask],
            rollout_logprobs=[list(turn) for turn in sample.rollout_logprobs],
            finish_reason=sample.finish_reason,
            messages=sample.messages,
            num_prompt_tokens=len(prompt_token_ids) if prompt_token_ids else 0,
            rollout_infos=sample.rollout_infos,
            media=media,
            routed_experts=sample.routed_experts,
            policy_version=phase.version)

    @staticmethod
    def _scored_sample(samples_P: Sequence[GRPOSample], rollout: Rollout) -> GRPOSample:
        prompt = samples_P[rollout.prompt_index]
        return dataclasses.replace(
            prompt,
            messages=rollout.messages,
            request_id=f'{prompt.prompt_id}/{rollout.index}',
            response_token_ids=rollout.response_token_ids,
            finish_reason=rollout.finish_reason,
            rollout_infos=rollout.rollout_infos,
            **rollout.media)


def generation_seed(seed: int, generation: int, attempt: int = 0) -> int:
    """Seed of the first rollout of a sampling phase; the phases of a run do not overlap. `attempt` counts resampling within a generation."""
    return (seed * _SEED_STRIDE + generation * 2**20 + attempt * 2**17) % (2**31 - 2**20)


