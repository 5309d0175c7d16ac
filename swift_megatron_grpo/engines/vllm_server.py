"""`--vllm_mode server`: one or several `swift rollout` servers as one engine of the whole run (import tier 2).

Only the last rank (ms-swift's logging rank) talks to servers: it sends weights and requests, and all ranks get the answers. What it meets is
raised on every rank.
"""
from __future__ import annotations

import concurrent.futures
import queue
import torch
import torch.distributed as dist
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from swift.rlhf_trainers.utils import format_host_for_url
from swift.utils import get_logger, synchronize
from typing import Any, TypeVar

from .. import cpu
from ..errors import RunError, UserError
from .base import Bucket, EngineGroup, RolloutEngine, Sampling
from .server_pool import EngineLost, ServerPool

logger = get_logger()
T = TypeVar('T')

FIRST_GROUP_PORT = 51216  # as ms-swift has it


def addresses(args: Any) -> list[tuple[str, int]]:
    """(url, group port) of each server. Pure; UserError where the arguments do not fit together."""
    if args.vllm_server_base_url:
        urls = [url.rstrip('/') for url in args.vllm_server_base_url]
    elif args.vllm_server_host:
        hosts, ports = list(args.vllm_server_host), list(args.vllm_server_port)
        if len(ports) == 1 and len(hosts) > 1:
            ports *= len(hosts)
        if len(hosts) != len(ports):
            raise UserError(f'--vllm_server_host names {len(hosts)} hosts and --vllm_server_port {len(ports)} ports. Give one port for each host, '
                            'or one for all.')
        urls = [f'http://{format_host_for_url(host)}:{port}' for host, port in zip(hosts, ports)]
    else:
        raise UserError('--vllm_mode server needs --vllm_server_host (and --vllm_server_port) or --vllm_server_base_url. Start the server first: '
                        'swift rollout --model ... --port 8000. Without servers: --vllm_mode colocate.')
    given = args.vllm_server_group_port
    group_ports = [FIRST_GROUP_PORT + i for i in range(len(urls))] if given is None else [given] if isinstance(given, int) else list(given)
    if len(group_ports) == 1 and len(urls) > 1:
        group_ports = [group_ports[0] + i for i in range(len(urls))]
    if len(group_ports) != len(urls):
        raise UserError(f'--vllm_server_group_port has {len(group_ports)} ports for {len(urls)} servers. Give one for each, or one to count from.')
    return list(zip(urls, group_ports))


def _limit(seconds: float) -> float:
    """0 means none, as everywhere else; what waits wants a number."""
    return seconds if seconds > 0 else 1e8


@dataclass(kw_only=True, slots=True)
class Pending:
    """`count` answers that are being sampled. What comes is on the talking rank: pieces, and None when `future` has ended."""
    count: int
    future: concurrent.futures.Future[list[Any]] | None = None
    pieces: queue.SimpleQueue[tuple[int, list[Any]] | None] = field(default_factory=queue.SimpleQueue)


class VllmServerEngine(RolloutEngine):
    """Args:
        args: vllm_server_* arguments, deadlines, num_generations.
        group: one engine; every rank of the run is in it.
        device: the rank's device; weights are sent from it.
    """

    keeps_deadlines = True

    def __init__(self, args: Any, group: EngineGroup, device: torch.device):
        self.args = args
        self.group = group
        self.talks = group.rank == group.size - 1
        self.pool: ServerPool | None = None
        self._sender = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='weights')
        self._sampler = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='rollouts')
        places = addresses(args)

        def start() -> tuple[bool, bool, bool, bool]:
            if cpu.is_active():
                from ..cpu import vllm_plugin
                vllm_plugin.register()
            from .rollout_server import SwiftRolloutServer
            servers = [SwiftRolloutServer(url, port, device, connect_timeout=args.vllm_server_timeout, server_timeout=_limit(args.server_timeout),
                                          sync_timeout=_limit(args.sync_timeout))
                       for url, port in places]
            self.pool = ServerPool(servers, say=logger.warning)
            self.pool.start()
            kinds = [server.kind for server in servers]
            return (any(bool(kind.get('enable_lora')) for kind in kinds),
                    all(kind['engine_type'] == 'LLMEngine' for kind in kinds) and all(server.world_size == 1 for server in servers),
                    any(bool(kind.get('enable_multi_turn')) for kind in kinds), any(bool(kind.get('use_gym_env')) for kind in kinds))

        lora, self.seeded, self.runs_turns, gym_env = self._told('Start of rollout servers', start)
        if gym_env != bool(args.use_gym_env):
            raise UserError(f'The rollout server runs with use_gym_env {str(gym_env).lower()}, this run with {str(bool(args.use_gym_env)).lower()}: '
                            'the reward of an environment comes from the server. Give --use_gym_env to both, or to neither.')
        if lora and args.tuner_type != 'lora':
            raise UserError(f'The rollout server runs with vllm_enable_lora true, but --tuner_type {args.tuner_type} sends no adapter: one that an '
                            'earlier run left there would go on acting. Start the server without --vllm_enable_lora.')
        self.takes_adapters = lora and args.tuner_type == 'lora'
        if args.vllm_enable_lora and args.tuner_type == 'lora' and not lora:
            raise UserError('--vllm_enable_lora true: start the server with `swift rollout ... --vllm_enable_lora true --vllm_max_lora_rank '
                            f'{args.lora_rank}`, or leave it out (the adapter is then merged into the weights that are sent).')

    # -- weights -----------------------------------------------------------------------------------------------------------------------------

    def begin_sync(self) -> None:
        def begin() -> bool:
            assert self.pool is not None
            self.pool.reconnect()
            return any(server.needs_base for server in self.pool.alive)

        self.needs_base = self._told('Weight sync', begin)

    def load_weights(self, buckets: Iterable[Bucket], version: int) -> int:
        self.version = -1
        count = 0
        sending: concurrent.futures.Future[None] | None = None
        failure: Exception | None = None

        def attempt(action: Callable[[], None]) -> None:
            # An error does not end the loop: reading the buckets is collective.
            nonlocal failure
            if failure is None:
                try:
                    action()
                except Exception as error:
                    failure = error

        if self.talks:
            attempt(lambda: self._each('Weight sync', lambda server: server.invalidate()))
        for bucket in buckets:
            count += len(bucket)
            if not self.talks:
                continue
            if sending is not None:
                attempt(sending.result)
            synchronize()  # what the export gathered is there before another thread reads it
            flat = self._flatten(bucket)
            sending = self._sender.submit(self._each, 'Weight sync', lambda server, flat=flat: server.send_flat(*flat))
        if sending is not None:
            attempt(sending.result)
        if self.talks:
            attempt(lambda: self._each('Weight sync', lambda server: server.finish(version)))

        def outcome() -> None:
            if failure is not None:
                raise failure

        self._told('Weight sync', outcome)
        self.needs_base = False
        self.version = version
        return count

    def load_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], version: int) -> int:
        self.version = -1

        def send() -> None:
            from .rollout_server import flatten
            synchronize()
            metadata, flat = flatten(list(tensors.items()))
            self._each('Weight sync', lambda server: server.send_adapter(config, metadata, flat, version))

        self._told('Weight sync', send)
        self.version = version
        return len(tensors)

    def checksums(self) -> None:
        return None

    def _flatten(self, bucket: Bucket) -> Any:
        from .rollout_server import flatten
        assert self.pool is not None
        alive = self.pool.alive
        return flatten(alive[0].load_names(bucket) if alive else bucket)

    def _each(self, phase: str, action: Callable[[Any], Any]) -> None:
        assert self.pool is not None
        self.pool.each(phase, action)

    # -- answers -----------------------------------------------------------------------------------------------------------------------------

    def start(self, requests: Sequence[Any], sampling: Sampling) -> Pending:
        """Begins to sample and returns at once. Weights must not change until `finish`."""
        if self.version < 0:
            raise RunError('Rollout was asked of servers that do not hold a complete set of weights.')
        pending = Pending(count=len(requests))
        if not self.talks:
            return pending
        assert self.pool is not None

        def config_of(start: int) -> Any:
            # Where the server spreads a batch over replicas, or samples requests apart from each other, one seed would give a group equal
            # answers: it draws by itself then.
            return sampling.request_config(seed=sampling.seed + start if self.seeded else None)

        pending.future = self._sampler.submit(
            self.pool.answers, list(requests), config_of, version=self.version, unit=self.args.num_generations,
            seconds=_limit(self.args.rollout_timeout), arrived=lambda first, answers: pending.pieces.put((first, answers)))
        pending.future.add_done_callback(lambda _: pending.pieces.put(None))
        return pending

    def arrivals(self, pending: Pending) -> Iterator[tuple[int, list[Any]]]:
        """All ranks, collective: one broadcast a piece."""

        def next_piece() -> tuple[int, list[Any]]:
            piece = pending.pieces.get()
            if piece is None:
                assert pending.future is not None
                pending.future.result()  # raises: an answer is missing
                raise RunError('The rollout servers answered less than they were asked.')
            return piece

        left = pending.count
        while left > 0:
            first, outputs = self._told('Sampling', next_piece)
            left -= len(outputs)
            yield first, outputs

    def finish(self, pending: Pending) -> list[Any]:
        """All ranks, collective: waits for what `start` began."""
        outputs: list[Any] = [None] * pending.count
        for first, piece in self.arrivals(pending):
            outputs[first:first + len(piece)] = piece
        return outputs

    def generate(self, requests: Sequence[Any], sampling: Sampling) -> list[Any]:
        return self.finish(self.start(requests, sampling))

    def close(self) -> None:
        pool, self.pool = self.pool, None
        if pool is not None:
            for server in pool.alive:
                server.disconnect(say_goodbye=True)
        self._sender.shutdown(wait=False)
        self._sampler.shutdown(wait=False, cancel_futures=True)

    # -- one rank acts, every rank knows -----------------------------------------------------------------------------------------------------

    def _told(self, phase: str, act: Callable[[], T]) -> T:
        """All ranks, collective: `act` runs on the talking rank; its result, or its error, is everyone's."""
        message: list[Any] = [None]
        if self.talks:
            try:
                message = [('ok', act())]
            except Exception as error:
                text = str(error) if isinstance(error, (RunError, UserError)) else f'{phase} failed: {type(error).__name__}: {error}'
                message = [(EngineLost.__name__ if isinstance(error, EngineLost) else UserError.__name__ if isinstance(error, UserError) else
                            RunError.__name__, text)]
        if self.group.size > 1:
            dist.broadcast_object_list(message, src=self.group.size - 1)
        kind, value = message[0]
        if kind != 'ok':
            raise {EngineLost.__name__: EngineLost, UserError.__name__: UserError, RunError.__name__: RunError}[kind](value)
        return value
